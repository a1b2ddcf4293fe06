"""One OpenAI endpoint: its files and batch jobs, by HTTP.

What may be repeated is repeated while the endpoint can't be reached or asks to wait, for
`patience_s`. A job whose creation was cut off is looked for before it is created again: its input
file was uploaded for it alone, so it is known by that file.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar
from urllib.parse import quote

import aiohttp
import orjson

from mesh.batch_client.job_answers import (
    AnswerInvalid,
    FileAnswer,
    ItemT,
    JobAnswer,
    Page,
    error_message,
    read_file,
    read_files,
    read_job,
    read_jobs,
)
from schemas.http import H_IDEMPOTENCY_KEY

PATIENCE_S = 10.0
PAUSE_S, PAUSE_S_MAX = 0.5, 10.0
CONNECT_S, ANSWER_S = 10.0, 60.0
STALL_S = 120.0  # of an upload or a download, without a byte
CHUNK_BYTES = 256 * 1024
ANSWER_BYTES_MAX = 16 * 1024 * 1024
PAGE_JOBS = 100
PAGE_FILES = 1000
FILES_LISTED_MAX = 100_000
WAIT_STATUSES = frozenset({408, 429, 502, 503, 504})
PARTIAL, NOT_FOUND, RANGE_WRONG = 206, 404, 416

T = TypeVar("T")
Progress = Callable[[int], None]  # bytes so far


class EndpointError(Exception):
    """What an endpoint could not do; the message says what and, if known, why."""


class Unreachable(EndpointError):
    """No answer, or one that was cut off: the request may have had its effect."""


class NotConnected(Unreachable):
    """The request was not sent."""


class Refused(EndpointError):
    """An answer with an error status."""

    def __init__(self, status: int, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status, self.retry_after_s = status, retry_after_s

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed in a while."""
        return self.status in WAIT_STATUSES


class Transfer:
    """A download to come: what the server sends next, and from which byte of the file."""

    def __init__(self, response: aiohttp.ClientResponse, start: int) -> None:
        self.start = start
        self._response = response

    async def chunks(self) -> AsyncIterator[bytes]:
        """Raises Unreachable where it is cut off."""
        try:
            async for chunk in self._response.content.iter_chunked(CHUNK_BYTES):
                yield chunk
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"the download was cut off: {_why(error)}") from error


class Endpoint:
    """Use it as an asynchronous context manager. Its methods raise EndpointError."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        patience_s: float = PATIENCE_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        """`base_url`: with or without /v1. `patience_s`: how long what failed is repeated, after
        `pause_s` and then longer pauses."""
        plain = base_url.rstrip("/")
        self.url = plain if plain.endswith("/v1") else f"{plain}/v1"
        self.patience_s, self.pause_s = patience_s, pause_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=ANSWER_S),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def job(self, job_id: str) -> JobAnswer:
        return read_answer(read_job, await self._ask("GET", f"/batches/{_in_path(job_id)}"))

    async def job_now(self, job_id: str) -> JobAnswer:
        """The same, asked once."""
        return read_answer(read_job, await self._ask_once("GET", f"/batches/{_in_path(job_id)}"))

    async def cancel(self, job_id: str) -> JobAnswer:
        return read_answer(read_job, await self._ask("POST", f"/batches/{_in_path(job_id)}/cancel"))

    async def jobs(self, limit: int) -> tuple[JobAnswer, ...]:
        """The newest jobs, as many as `limit`."""
        return (await self._listed("/batches", read_jobs, PAGE_JOBS, limit))[0]

    async def file(self, file_id: str) -> FileAnswer:
        return read_answer(read_file, await self._ask("GET", f"/files/{_in_path(file_id)}"))

    async def files(self, limit: int) -> tuple[tuple[FileAnswer, ...], bool]:
        """The newest files, as many as `limit`, and whether there are more."""
        return await self._listed("/files", read_files, PAGE_FILES, limit)

    async def _listed(
        self, path: str, read: Callable[[bytes], Page[ItemT]], page_max: int, limit: int
    ) -> tuple[tuple[ItemT, ...], bool]:
        found: list[ItemT] = []
        has_more = True
        while has_more and len(found) < limit:
            query = f"?limit={min(page_max, limit - len(found))}"
            query += f"&after={_in_path(found[-1].id)}" if found else ""
            page = read_answer(read, await self._ask("GET", f"{path}{query}"))
            found.extend(page.data)
            has_more = page.has_more and bool(page.data)
        return tuple(found[:limit]), has_more or len(found) > limit

    async def delete_file(self, file_id: str) -> None:
        """Delete a file that is there. A request may have been repeated, so its 404 is no error."""
        await self.file(file_id)
        try:
            await self._ask("DELETE", f"/files/{_in_path(file_id)}")
        except Refused as error:
            if error.status != NOT_FOUND:
                raise

    async def create_job(
        self, input_file_id: str, endpoint: str, window: str, metadata: Mapping[str, str]
    ) -> JobAnswer:
        fields = {
            "input_file_id": input_file_id,
            "endpoint": endpoint,
            "completion_window": window,
            **({"metadata": dict(metadata)} if metadata else {}),
        }

        async def create() -> JobAnswer:
            try:
                answer = await self._ask_once("POST", "/batches", orjson.dumps(fields))
            except NotConnected:
                raise
            except Unreachable:
                recent = await self.jobs(PAGE_JOBS)
                found = next((job for job in recent if job.input_file_id == input_file_id), None)
                if found is None:
                    raise
                return found
            return read_answer(read_job, answer)

        return await self._patiently(create)

    async def upload(self, path: Path, sent: Progress) -> FileAnswer:
        """Upload a batch input file; from its beginning again after a loss, as often as patience
        lasts from the last byte that went through. The endpoint keeps no part of a file, and, if it
        knows idempotency keys, one file where only the answer was lost."""
        key = secrets.token_hex(16)

        async def once() -> FileAnswer:
            sent(0)
            with path.open("rb") as file:
                return await self._upload_once(file, path, key, sent)

        return await self._patiently(once)

    async def _upload_once(
        self, file: BinaryIO, path: Path, key: str, sent: Progress
    ) -> FileAnswer:
        assert self._session is not None
        boundary = secrets.token_hex(16)
        size = os.fstat(file.fileno()).st_size
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; '
            f'filename="{_plain_name(path)}"\r\nContent-Type: application/jsonl\r\n\r\n'
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        headers = {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(len(head) + size + len(tail)),
            H_IDEMPOTENCY_KEY: key,
        }
        form = _Form(file, size, head, tail)
        url = f"{self.url}/files"
        try:
            async with asyncio.timeout(STALL_S) as stall:
                body = form.chunks(lambda done: _went_on(stall, done, sent))
                # Expect: a refusal (no room, too large) comes before the file is sent.
                request = self._session.post(url, data=body, headers=headers, expect100=True)
                return read_answer(read_file, await self._answer_of(request, url))
        except TimeoutError as error:
            raise Unreachable(f"the upload stood still for {STALL_S:.0f} s") from error
        except Unreachable as error:
            if form.problem is not None:
                raise EndpointError(f"can't read {path}: {form.problem}") from error
            raise

    async def download(
        self, file_id: str, start: int, take: Callable[[Transfer], Awaitable[None]]
    ) -> None:
        """Give the file's bytes from `start` on to `take`; from 0 if the server can't do that."""
        assert self._session is not None
        url = f"{self.url}/files/{_in_path(file_id)}/content"
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                if response.status not in (200, PARTIAL):
                    raise _refused(response, await _body(response))
                await take(Transfer(response, start if response.status == PARTIAL else 0))
        except aiohttp.ClientConnectorError as error:
            raise NotConnected(_no_answer(url, error)) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(_no_answer(url, error)) from error

    async def _ask(self, method: str, path: str) -> bytes:
        return await self._patiently(lambda: self._ask_once(method, path))

    async def _ask_once(self, method: str, path: str, body: bytes | None = None) -> bytes:
        assert self._session is not None
        headers = {} if body is None else {"Content-Type": "application/json"}
        url = f"{self.url}{path}"
        request = self._session.request(
            method, url, data=body, headers=headers, allow_redirects=False
        )
        return await self._answer_of(request, url)

    async def _answer_of(self, request: "aiohttp.client._RequestContextManager", url: str) -> bytes:
        try:
            async with request as response:
                data = await _body(response)
                if response.status != 200:
                    raise _refused(response, data)
                return data
        except aiohttp.ClientConnectorError as error:
            raise NotConnected(_no_answer(url, error)) from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise Unreachable(_no_answer(url, error)) from error

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat what may pass, for `patience_s` at most."""
        until = time.monotonic() + self.patience_s
        pause_s = self.pause_s
        while True:
            try:
                return await ask()
            except EndpointError as error:
                wait_s = pause_after(error, pause_s)
                if wait_s is None or time.monotonic() + wait_s > until:
                    raise
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)


def pause_after(error: EndpointError, pause_s: float) -> float | None:
    """Seconds to wait before the same request; None: it would fail again."""
    if isinstance(error, Refused):
        return max(pause_s, error.retry_after_s) if error.may_pass else None
    return pause_s if isinstance(error, Unreachable) else None


def read_answer(read: Callable[[bytes], T], data: bytes) -> T:
    try:
        return read(data)
    except AnswerInvalid as error:
        raise EndpointError(str(error)) from error


def _in_path(name: str) -> str:
    """A name that a person or a server gave, as one segment of a path."""
    return quote(name, safe="")


class _Form:
    """A form with the file's first `size` bytes, which its Content-Length has promised."""

    def __init__(self, file: BinaryIO, size: int, head: bytes, tail: bytes) -> None:
        self._file, self._size, self._head, self._tail = file, size, head, tail
        self.problem: str | None = None
        """Why the file could not be read; aiohttp hides it behind an error of its own."""

    async def chunks(self, went_on: Progress) -> AsyncIterator[bytes]:
        """`went_on` is called after each chunk."""
        yield self._head
        done = 0
        try:
            while done < self._size:
                wanted = min(CHUNK_BYTES, self._size - done)
                chunk = await asyncio.to_thread(self._file.read, wanted)
                if not chunk:
                    raise OSError("it became shorter while it was uploaded")
                yield chunk
                done += len(chunk)
                went_on(done)
        except OSError as error:
            self.problem = str(error)
            raise
        yield self._tail


def _went_on(stall: asyncio.Timeout, done: int, sent: Progress) -> None:
    stall.reschedule(asyncio.get_running_loop().time() + STALL_S)
    sent(done)


def _plain_name(path: Path) -> str:
    """The file's name as it may stand in a header."""
    kept = "".join(
        c if c.isascii() and c.isprintable() and c not in '"\\' else "_" for c in path.name
    )
    return kept[:200]


async def _body(response: aiohttp.ClientResponse) -> bytes:
    data = await response.content.read(ANSWER_BYTES_MAX + 1)
    parts = [data]
    while data and sum(map(len, parts)) <= ANSWER_BYTES_MAX:
        data = await response.content.read(ANSWER_BYTES_MAX)
        parts.append(data)
    return b"".join(parts)


def _refused(response: aiohttp.ClientResponse, data: bytes) -> Refused:
    text = response.headers.get("Retry-After", "")
    seconds = float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0
    return Refused(response.status, error_message(data), seconds)


def _no_answer(url: str, error: BaseException) -> str:
    return f"no answer from {url}: {_why(error)}"


def _why(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error)
    if isinstance(error, TimeoutError):
        return f"nothing came for {ANSWER_S:.0f} s"
    return str(error) or type(error).__name__
