"""`Regions` and `AsyncRegions`: call the nearest region, and the next one when it fails.

Each call tries the regions once without a pause, because another region is the remedy, and then
again after growing pauses, `tries_max` times in all. Only a call that failed before its answer
began is repeated; an error inside a stream is the caller's to handle, because what was read can't
be taken back.
"""

import asyncio
import http.client
import json
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from mesh.client.region_choice import REGIONS_MAX, RegionChoice, is_region_failure, retry_after_s

log = logging.getLogger(__name__)

C = TypeVar("C")
T = TypeVar("T")

REFRESH_S = 30.0
TRIES_MAX = 6
MEASURE_TIMEOUT_S = 3.0
MEASUREMENTS_MAX = 8  # at a time
PAUSE_S, PAUSE_S_MAX = 0.25, 4.0
STATUS_OK = 200
BODY_BYTES_MAX = 1024 * 1024
ENDPOINTS_MAX = 32
# What sockets, TLS and HTTP raise; ValueError is for invalid URLs and JSON.
HTTP_ERRORS = (OSError, http.client.HTTPException, ValueError)


class _RegionClients(Generic[C]):
    """What `Regions` and `AsyncRegions` share: the regions, their clients, and measurements."""

    def __init__(
        self,
        urls: Sequence[str],
        make: Callable[[str], C],
        *,
        refresh_s: float = REFRESH_S,
        tries_max: int = TRIES_MAX,
        learn: bool = True,
        learn_plain: bool = False,
    ) -> None:
        """`urls`: base URLs, at least one; `make`: a client for a base URL, made once for each.

        `learn`: add the regions that others name (their `endpoint` in mesh.toml). `learn_plain`:
        even those under `http://`, though one of `urls` is `https://`: prompts and keys go there
        unencrypted. Otherwise they are ignored, with a warning in the log.
        """
        if not urls:
            raise ValueError("name the base URL of one region at least")
        self._learns_plain = learn_plain or not any(map(is_encrypted, urls))
        self._ignored: set[str] = set()
        self._rng = random.Random()
        self._choice = RegionChoice(urls, self._rng)
        self._make = make
        self._clients: dict[str, C] = {}
        self._refresh_s = refresh_s
        self._tries_max = tries_max
        self._learns = learn
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._refreshed_at = float("-inf")

    @property
    def order(self) -> tuple[str, ...]:
        """Base URLs, the one to call first in front."""
        with self._lock:
            return tuple(self._choice.order(time.monotonic()))

    def client(self, url: str) -> C:
        """The client of that region, made at its first use."""
        with self._lock:
            if url not in self._clients:
                self._clients[url] = self._make(url)
            return self._clients[url]

    def _tries(self) -> Iterator[tuple[str, float, bool]]:
        """Of a call: the region to try, the seconds to wait before, whether it is the last."""
        tried: list[str] = []
        rounds = 0
        for left in reversed(range(max(1, self._tries_max))):
            order = self.order
            url, pause_s = next((url for url in order if url not in tried), ""), 0.0
            if not url:
                url = order[0]
                pause_s = min(PAUSE_S_MAX, PAUSE_S * 2.0**rounds) * self._rng.uniform(0.5, 1.0)
                rounds += 1
                tried.clear()
            tried.append(url)
            yield url, pause_s, left == 0

    def _succeeded(self, url: str) -> None:
        with self._lock:
            self._choice.succeeded(url)

    def _is_region_failure(self, url: str, error: Exception) -> bool:
        """Whether the region failed, so that another may do better; then it rests."""
        if not is_region_failure(error):
            return False
        log.info("%s: %s; trying the next region", url, error)
        with self._lock:
            self._choice.failed(url, time.monotonic(), retry_after_s(error))
        return True

    @property
    def _is_measured(self) -> bool:
        return self._refreshed_at > float("-inf")

    def _refresh_if_old(self) -> None:
        """Measure in another thread if that is due and not being done."""
        is_old = time.monotonic() - self._refreshed_at >= self._refresh_s
        if is_old and not self._refreshing.locked():
            threading.Thread(target=self._measure, name="mesh regions", daemon=True).start()

    def _measure(self) -> None:
        """Measure every region, and those that they name."""
        with self._refreshing:
            seen: set[str] = set()
            while new := [url for url in self._choice.urls if url not in seen]:
                self._measure_all(new)
                seen.update(new)
            self._refreshed_at = time.monotonic()

    def _measure_all(self, urls: Sequence[str]) -> None:
        with ThreadPoolExecutor(min(MEASUREMENTS_MAX, len(urls))) as pool:
            measurements = list(pool.map(self._measure_one, urls))
        with self._lock:
            for url, (rtt_s, others) in zip(urls, measurements, strict=True):
                if rtt_s is None:
                    self._choice.failed(url, time.monotonic())
                else:
                    self._choice.measured(url, rtt_s)
                self._choice.add(other for other in others if self._may_learn(other, url))

    def _measure_one(self, url: str) -> tuple[float | None, tuple[str, ...]]:
        rtt_s = round_trip_s(url, MEASURE_TIMEOUT_S)
        learns = self._learns and rtt_s is not None
        return rtt_s, endpoints(url, MEASURE_TIMEOUT_S) if learns else ()

    def _may_learn(self, url: str, named_by: str) -> bool:
        """A client that was given https URLs is not moved to http by what a region sends."""
        if self._learns_plain or is_encrypted(url) or url in self._choice.urls:
            return True
        if url not in self._ignored and len(self._ignored) < REGIONS_MAX:
            self._ignored.add(url)
            log.warning(
                "%s names the region %s, which is not https: ignored. Give learn_plain=True to "
                "use it unencrypted",
                named_by,
                url,
            )
        return False


class Regions(_RegionClients[C]):
    """The regions of one mesh, for threads. Safe to share between them."""

    def nearest(self) -> str:
        """Base URL of the nearest healthy region. The first call measures, so it takes a while."""
        self._ensure_measured()
        return self.order[0]

    def call(self, request: Callable[[C], T]) -> T:
        """`request` with the nearest healthy region's client; with others while regions fail.

        Raises what the last try raised, and at once an error that is not of a region.
        """
        self._ensure_measured()
        for url, pause_s, is_last in self._tries():
            time.sleep(pause_s)
            try:
                answer = request(self.client(url))
            except Exception as error:
                if not self._is_region_failure(url, error) or is_last:
                    raise
            else:
                self._succeeded(url)
                return answer
        raise AssertionError("the last try returns or raises")

    def refresh(self) -> None:
        self._measure()

    def _ensure_measured(self) -> None:
        if self._is_measured:
            self._refresh_if_old()
        else:
            self._measure()


class AsyncRegions(_RegionClients[C]):
    """The same for asyncio: `make` gives asynchronous clients, `request` is awaited."""

    async def nearest(self) -> str:
        """Base URL of the nearest healthy region. The first call measures, so it takes a while."""
        await self._ensure_measured()
        return self.order[0]

    async def call(self, request: Callable[[C], Awaitable[T]]) -> T:
        await self._ensure_measured()
        for url, pause_s, is_last in self._tries():
            await asyncio.sleep(pause_s)
            try:
                answer = await request(self.client(url))
            except Exception as error:
                if not self._is_region_failure(url, error) or is_last:
                    raise
            else:
                self._succeeded(url)
                return answer
        raise AssertionError("the last try returns or raises")

    async def refresh(self) -> None:
        await asyncio.to_thread(self._measure)

    async def _ensure_measured(self) -> None:
        if self._is_measured:
            self._refresh_if_old()
        else:
            await self.refresh()


def round_trip_s(base_url: str, timeout_s: float) -> float | None:
    """Seconds for a request and its answer; None if the region is not ready.

    The second request on one connection is timed: the first one pays for TCP and TLS.
    """
    try:
        with _connected(base_url, timeout_s) as (connection, root):
            if _get(connection, root + "/ready")[0] != STATUS_OK:
                return None
            began_at = time.monotonic()
            status, _ = _get(connection, root + "/ready")
            return time.monotonic() - began_at if status == STATUS_OK else None
    except HTTP_ERRORS:
        return None


def endpoints(base_url: str, timeout_s: float) -> tuple[str, ...]:
    """Base URLs of the regions that this one lists; none if it can't be read."""
    try:
        with _connected(base_url, timeout_s) as (connection, root):
            status, body = _get(connection, root + "/v1/regions")
        listed = json.loads(body) if status == STATUS_OK else {}
        urls = (region.get("endpoint") for region in listed.get("data", ()))
        return tuple(filter(_is_base_url, urls))[:ENDPOINTS_MAX]
    except (*HTTP_ERRORS, AttributeError, TypeError):
        return ()


def is_encrypted(base_url: str) -> bool:
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
