"""Looking at a region over HTTP: how far it is, whether it is ready, what others there are."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

STATUS_OK = 200
BODY_BYTES_MAX = 1024 * 1024
ENDPOINTS_MAX = 32
# What sockets, TLS and HTTP raise; ValueError is for URLs and JSON that are none.
PROBLEMS = (OSError, http.client.HTTPException, ValueError)


def round_trip_s(base_url: str, timeout_s: float) -> float | None:
    """Seconds for a question and its answer; None if the region is not ready.

    The second question on one connection is timed: the first one pays for TCP and TLS.
    """
    try:
        with _connected(base_url, timeout_s) as (connection, root):
            if _get(connection, root + "/ready")[0] != STATUS_OK:
                return None
            began_at = time.monotonic()
            status, _ = _get(connection, root + "/ready")
            return time.monotonic() - began_at if status == STATUS_OK else None
    except PROBLEMS:
        return None


def endpoints(base_url: str, timeout_s: float) -> tuple[str, ...]:
    """Base URLs of the regions that this one knows of; none if it doesn't say."""
    try:
        with _connected(base_url, timeout_s) as (connection, root):
            status, body = _get(connection, root + "/v1/regions")
        found = json.loads(body) if status == STATUS_OK else {}
        told = (region.get("endpoint") for region in found.get("data", ()))
        return tuple(filter(_is_base_url, told))[:ENDPOINTS_MAX]
    except (*PROBLEMS, AttributeError, TypeError):
        return ()


def is_encrypted(base_url: str) -> bool:
    """Whether what is sent there goes by TLS."""
    return urlsplit(base_url).scheme == "https"


def _is_base_url(text: object) -> bool:
    return isinstance(text, str) and urlsplit(text).scheme in ("http", "https")


@contextmanager
def _connected(base_url: str, timeout_s: float) -> Iterator[tuple[http.client.HTTPConnection, str]]:
    """A connection, and the path under which the router's own paths are."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{base_url!r} is no base URL, like https://us.example.com/v1")
    encrypted = is_encrypted(base_url)
    kind = http.client.HTTPSConnection if encrypted else http.client.HTTPConnection
    root = parts.path.rstrip("/").removesuffix("/v1")
    with closing(kind(parts.hostname, parts.port, timeout=timeout_s)) as connection:
        yield connection, root


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read(BODY_BYTES_MAX)
