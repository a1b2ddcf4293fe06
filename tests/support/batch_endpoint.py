"""An OpenAI endpoint for files and batch jobs that cuts and refuses as a test tells it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

JOB = "batch_" + "1" * 32
FILE = "file-" + "2" * 32
CREATED_AT = 1_800_000_000


def job_fields(job_id: str = JOB, **changed: Any) -> dict[str, Any]:
    """A job as OpenAI's API writes it."""
    return {
        "id": job_id,
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "status": "in_progress",
        "input_file_id": FILE,
        "completion_window": "24h",
        "created_at": CREATED_AT,
        "expires_at": CREATED_AT + 86_400,
        "request_counts": {"total": 4, "completed": 0, "failed": 0},
        **changed,
    }


@dataclass
class BatchEndpoint:
    """`jobs`: what is answered for a job, one after another, the last one again and again."""

    jobs: list[dict[str, Any]] = field(default_factory=lambda: [job_fields(status="completed")])
    listed: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next uploads or downloads are cut off."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """Status and message of the next answers."""
    lose_creations: int = 0
    """How many jobs are created without an answer."""
    lose_deletions: int = 0
    """How many files are deleted without an answer."""
    knows_ranges: bool = True
    claims_bytes: int | None = None
    """What it says that a file has, where that is not so."""
    created: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    ranges: list[str] = field(default_factory=list)
    idempotency_keys: list[str] = field(default_factory=list)
    """Of uploads."""
    url: str = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        self.keys.add(request.headers.get("authorization", ""))
        if self.refusals:
            status, message = self.refusals.pop(0)
            return web.json_response({"error": {"message": message}}, status=status)
        return await self._handler(request)(request)

    def _handler(self, request: web.BaseRequest) -> Callable[[web.BaseRequest], Any]:
        what, _, rest = request.path.removeprefix("/v1/").partition("/")
        if what == "files" and request.method == "POST":
            return self._upload
        if what == "files" and not rest:
            return self._list_files
        if what == "files" and request.method == "DELETE":
            return self._delete
        if what == "files":
            return self._content if rest.endswith("/content") else self._file
        if request.method == "POST" and not rest:
            return self._create
        return self._job if rest else self._list

    async def _upload(self, request: web.BaseRequest) -> web.StreamResponse:
        self.idempotency_keys.append(request.headers["idempotency-key"])
        if request.headers.get("expect") == "100-continue":
            assert request.transport is not None
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.cuts:
            await request.content.readexactly(self.cuts.pop(0))
            return _cut(request)
        fields: dict[str, bytes] = {}
        async for part in await request.multipart():
            assert part.name is not None  # type: ignore[union-attr]
            fields[part.name] = bytes(await part.read())  # type: ignore[union-attr, arg-type]
        assert fields["purpose"] == b"batch"
        self.files[FILE] = fields["file"]
        return web.json_response({"id": FILE, "object": "file", "bytes": len(fields["file"])})

    async def _create(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = await request.json()
        self.created.append(asked)
        if self.lose_creations:
            self.lose_creations -= 1
            self.listed.insert(0, job_fields(input_file_id=asked["input_file_id"]))
            return _cut(request)
        return web.json_response(job_fields(status="validating", metadata=asked.get("metadata")))

    async def _job(self, request: web.BaseRequest) -> web.StreamResponse:
        if JOB not in request.path:
            return web.json_response({"error": {"message": "no such batch"}}, status=404)
        if request.path.endswith("/cancel"):
            return web.json_response(job_fields(status="cancelling"))
        return web.json_response(self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0])

    async def _list(self, request: web.BaseRequest) -> web.StreamResponse:
        limit, after = int(request.query["limit"]), request.query.get("after")
        ids = [job["id"] for job in self.listed]
        start = ids.index(after) + 1 if after else 0
        page = self.listed[start : start + limit]
        return web.json_response({"data": page, "has_more": start + limit < len(self.listed)})

    async def _list_files(self, request: web.BaseRequest) -> web.StreamResponse:
        limit, after = int(request.query["limit"]), request.query.get("after")
        ids = list(self.files)
        start = ids.index(after) + 1 if after else 0
        page = [
            {
                "id": name,
                "object": "file",
                "bytes": len(self.files[name]),
                "created_at": CREATED_AT,
                "filename": "in.jsonl",
                "purpose": "batch",
            }
            for name in ids[start : start + limit]
        ]
        return web.json_response({"data": page, "has_more": start + limit < len(ids)})

    async def _delete(self, request: web.BaseRequest) -> web.StreamResponse:
        name = request.path.rpartition("/")[2]
        if self.files.pop(name, None) is None:
            return _no_file(name)
        if self.lose_deletions:
            self.lose_deletions -= 1
            return _cut(request)
        return web.json_response({"id": name, "object": "file", "deleted": True})

    async def _file(self, request: web.BaseRequest) -> web.StreamResponse:
        name = request.path.rpartition("/")[2]
        if name not in self.files:
            return _no_file(name)
        size = len(self.files[name]) if self.claims_bytes is None else self.claims_bytes
        return web.json_response({"id": name, "object": "file", "bytes": size})

    async def _content(self, request: web.BaseRequest) -> web.StreamResponse:
        data = self.files[request.path.split("/")[-2]]
        start = 0
        if self.knows_ranges and (asked := request.headers.get("range")):
            self.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        answer = web.StreamResponse(status=206 if start else 200)
        answer.content_length = len(data) - start
        if start:
            answer.headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        await answer.prepare(request)
        cut = self.cuts.pop(0) if self.cuts else None
        await answer.write(data[start:] if cut is None else data[start : start + cut])
        if cut is not None:
            _cut(request)
        return answer


def _no_file(name: str) -> web.Response:
    return web.json_response({"error": {"message": f"no file {name}"}}, status=404)


def _cut(request: web.BaseRequest) -> web.StreamResponse:
    """End the connection, without the answer that is returned."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@contextlib.asynccontextmanager
async def batch_endpoint(endpoint: BatchEndpoint | None = None) -> AsyncIterator[BatchEndpoint]:
    """Serve it on a free port."""
    endpoint = endpoint or BatchEndpoint()
    server = web.Server(endpoint.handle, access_log=None, auto_decompress=False)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    endpoint.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    try:
        yield endpoint
    finally:
        listening.close()
        await server.shutdown(1.0)
