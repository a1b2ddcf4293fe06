"""Which region to call: the nearest healthy one, then the others, then those that failed.

Clients measure round trips themselves, because only they know where they are. The choice changes
only when another region is clearly nearer: a conversation that alternates between two equally near
regions finds its prefix cached in neither. A region that failed rests, for twice as long each time
and for a random share of it, so that not all clients return to it at once. When all rest, the one
whose rest ends first is called all the same.

An error is a region's if it could not be reached, hung up before it answered, or answered 503.
Everything else (a bad request, 429 of a mesh that is full everywhere, an engine's own error) would
be the same in every region. SDKs have their own classes for a lost connection; they are recognised
by name, so that none has to be installed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from random import Random

REST_S, REST_S_MAX = 1.0, 60.0
# Nearer by a fifth and by 5 ms, or it isn't worth the caches left behind.
NEARER_RATIO, NEARER_S = 0.8, 0.005
REGIONS_MAX = 32

STATUS_UNAVAILABLE = 503
# Bases of what openai, httpx and aiohttp raise when a connection fails; others raise OSError.
CONNECTION_ERRORS = frozenset({"APIConnectionError", "TransportError", "ClientConnectionError"})
FILE_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError)
CAUSES_MAX = 8


@dataclass(slots=True)
class _RegionState:
    rtt_s: float | None = None
    failures: int = 0  # in a row
    rests_until: float = -inf


class RegionChoice:
    """Pure: `now` is seconds of any monotonic clock, `rng` varies the rests."""

    def __init__(self, urls: Iterable[str], rng: Random) -> None:
        self._rng = rng
        self._regions: dict[str, _RegionState] = {}
        self._chosen: str | None = None
        self.add(urls)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._regions)

    def add(self, urls: Iterable[str]) -> None:
        """Add regions, up to `REGIONS_MAX`."""
        for url in urls:
            if len(self._regions) < REGIONS_MAX:
                self._regions.setdefault(url, _RegionState())

    def measured(self, url: str, rtt_s: float) -> None:
        """It is healthy, with that round trip."""
        self._regions[url] = _RegionState(rtt_s)

    def succeeded(self, url: str) -> None:
        region = self._regions[url]
        region.failures, region.rests_until = 0, -inf

    def failed(self, url: str, now: float, retry_after_s: float = 0.0) -> None:
        """Let it rest, at least for what its Retry-After asked for (0: it had none)."""
        region = self._regions[url]
        rest_s = min(REST_S_MAX, REST_S * 2.0 ** min(region.failures, 10))
        rest_s = max(self._rng.uniform(0.5, 1.0) * rest_s, min(REST_S_MAX, retry_after_s))
        region.failures += 1
        region.rests_until = max(region.rests_until, now + rest_s)

    def order(self, now: float) -> list[str]:
        """All regions, the one to call first in front."""
        healthy = [url for url, region in self._regions.items() if region.rests_until <= now]
        healthy.sort(key=self._rtt_s)
        resting = [url for url in self._regions if url not in healthy]
        resting.sort(key=lambda url: self._regions[url].rests_until)
        if healthy:
            self._chosen = first = self._keep_or_change(healthy)
            healthy.remove(first)
            healthy.insert(0, first)
        return healthy + resting

    def _keep_or_change(self, healthy: list[str]) -> str:
        chosen, nearest = self._chosen, healthy[0]
        if chosen not in healthy:
            return nearest
        limit_s = min(NEARER_RATIO * self._rtt_s(chosen), self._rtt_s(chosen) - NEARER_S)
        return nearest if self._rtt_s(nearest) < limit_s else chosen

    def _rtt_s(self, url: str) -> float:
        rtt_s = self._regions[url].rtt_s
        return inf if rtt_s is None else rtt_s


def is_region_failure(error: BaseException) -> bool:
    """Whether the request may be sent to another region.

    Of errors that an SDK raised before it returned an answer: nothing of one was read then.
    """
    status = _status(error)
    if status is not None:
        return status == STATUS_UNAVAILABLE
    return any(map(_is_connection_error, _causes(error)))


def retry_after_s(error: BaseException) -> float:
    """The seconds of a 503's Retry-After; 0.0 without one."""
    response = getattr(error, "response", None)
    headers = getattr(response, "headers", None) or getattr(error, "headers", None) or {}
    text = str(headers.get("retry-after") or headers.get("Retry-After") or "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0


def _is_connection_error(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return not isinstance(error, FILE_ERRORS)
    return not CONNECTION_ERRORS.isdisjoint(base.__name__ for base in type(error).mro())


def _status(error: BaseException) -> int | None:
    """The HTTP status, as openai, aiohttp, urllib and httpx name it, in this order."""
    for status in (
        getattr(error, "status_code", None),
        getattr(error, "status", None),
        getattr(error, "code", None),
        getattr(getattr(error, "response", None), "status_code", None),
    ):
        if isinstance(status, int):
            return status
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__
