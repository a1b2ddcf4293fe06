"""The routes of files and batches together: counted, and answered as JSON."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from infra.batch_table import BatchTable
from mesh.adapters.metrics import BatchMetrics
from mesh.adapters.refused import RequestRefused
from mesh.batch.records import Page
from mesh.http.batch_requests import BatchDoor
from mesh.http.batches_api import BatchesApi
from mesh.http.files_api import FilesApi, Transfers
from mesh.http.http_request import Answer, HttpRequest

JSON = {"content-type": "application/json"}
OBJECTS_AT_ONCE = 100  # of a list: half a millisecond
LISTS_MAX = 16  # under way; each reads a whole bucket, one after another
OK = "ok"
CONTENT, LISTS = "downloadFile", frozenset({"listFiles", "listBatches"})
BATCH_ROUTES = (
    *("createFile", "listFiles", "retrieveFile", "deleteFile", CONTENT),
    *("createBatch", "listBatches", "retrieveBatch", "cancelBatch"),
)
NOT_CONFIGURED = (
    "no files and batches are kept here: give the region batch_runners in mesh.toml, run `mesh "
    "infra nats` and `mesh infra streams`, and start its routers with --batch-credentials"
)


class BatchApi:
    """The handlers of one router by the names of their routes."""

    def __init__(self, door: BatchDoor, limits: BatchTable, metrics: BatchMetrics) -> None:
        self._files, self._batches = FilesApi(door, limits, metrics), BatchesApi(door)
        self._metrics = metrics
        self._lists = Transfers(LISTS_MAX, "lists")
        self._handlers: dict[str, Callable[[HttpRequest], Awaitable[Any]]] = {
            "createFile": self._files.create,
            "listFiles": self._files.list,
            "retrieveFile": self._files.retrieve,
            "deleteFile": self._files.delete,
            "createBatch": self._batches.create,
            "listBatches": self._batches.list,
            "retrieveBatch": self._batches.retrieve,
            "cancelBatch": self._batches.cancel,
        }
        metrics.uploads.set_function(lambda: self._files.uploads.open)
        metrics.downloads.set_function(lambda: self._files.downloads.open)

    @property
    def open(self) -> int:
        """Uploads and downloads that are under way."""
        return self._files.uploads.open + self._files.downloads.open

    async def close(self) -> None:
        await self._batches.close()

    async def handle(self, name: str, request: HttpRequest, headers: Mapping[str, str]) -> Answer:
        """Answer with these headers, and those that the route has besides. Raises
        RequestRefused."""
        try:
            if name == CONTENT:
                answer = await self._files.content(request, headers)
            else:
                with self._lists.one_more() if name in LISTS else contextlib.nullcontext():
                    body = await _json(await self._handlers[name](request))
                answer = Answer(200, {**headers, **JSON}, body)
        except RequestRefused as refused:
            self._metrics.requests.labels(name, refused.fault.value.code).inc()
            raise
        self._metrics.requests.labels(name, OK).inc()
        return answer


async def _json(value: Any) -> bytes:
    """The value as JSON; a page as OpenAI's list, written so that others have their turn."""
    if not isinstance(value, Page):
        return orjson.dumps(value)
    parts = []
    for at in range(0, len(value.items), OBJECTS_AT_ONCE):
        parts.append(orjson.dumps(value.items[at : at + OBJECTS_AT_ONCE])[1:-1])
        await asyncio.sleep(0)
    ends = {
        "first_id": value.items[0].id if value.items else None,
        "last_id": value.items[-1].id if value.items else None,
        "has_more": value.has_more,
    }
    return b'{"object":"list","data":[%b],%b' % (b",".join(parts), orjson.dumps(ends)[1:])
