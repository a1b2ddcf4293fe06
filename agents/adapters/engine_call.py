"""One short request to an engine of the agent's own, and its whole answer: pages, probes, loads."""

import asyncio
from collections.abc import Mapping

from agents.adapters.http_client import HttpClient
from agents.core.engine_pages import FaultKind
from schemas.http_statuses import LOGINS

PAGE_BYTES_MAX = 8 * 1024 * 1024
JSON_BODY = {"Content-Type": "application/json"}
NO_HEADERS: Mapping[str, str] = {}


class UnexpectedAnswer(ValueError):
    """The engine answered a scrape in a way that it should not; the message says how."""

    kind = FaultKind.BAD_ANSWER
    what = "not what it should hold"


class UnexpectedStatus(UnexpectedAnswer):
    """With another HTTP status than 200."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.kind = FaultKind.LOGIN if status in LOGINS else FaultKind.BAD_ANSWER
        self.what = f"HTTP {status}"


async def call_engine(
    client: HttpClient,
    method: str,
    path: str,
    timeout_s: float,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Status and body of a short response, of PAGE_BYTES_MAX at most. A body without headers is
    JSON."""
    if headers is None:
        headers = JSON_BODY if body else NO_HEADERS
    page = bytearray()
    async with asyncio.timeout(timeout_s):
        response = await client.request(method, path, headers, body)
        try:
            status = (await response.head()).status
            while chunk := await response.read():
                page += chunk
                if len(page) > PAGE_BYTES_MAX:
                    url = client.url + path
                    raise UnexpectedAnswer(f"{url} sends more than {PAGE_BYTES_MAX} bytes")
        finally:
            client.release(response)
    return status, bytes(page)


async def fetched(url: str, path: str, key: str | None, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of one short page. Raises OSError (TimeoutError among them), HttpBroken and
    UnexpectedAnswer."""
    client = HttpClient(url, key)
    try:
        return await call_engine(client, "GET", path, timeout_s)
    finally:
        client.close()
