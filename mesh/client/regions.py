"""`Regions` and `AsyncRegions`: call a region, and the next one when it fails.

Each call goes through the regions once without a pause, because another region is the remedy,
and then again after growing pauses, `tries_max` times in all. Only what failed before its answer
began is asked again; what breaks inside a stream is the caller's to see, because nobody can take
back what was read.

Rejected: an HTTP transport that changes the host under an SDK's feet (another one for each HTTP
library, and the SDK's own retries multiply with ours).
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from mesh.client import look
from mesh.client.choice import REGIONS_MAX, Choice
from mesh.client.faults import is_a_regions, retry_after_s

log = logging.getLogger(__name__)

C = TypeVar("C")
T = TypeVar("T")

REFRESH_S = 30.0
TRIES_MAX = 6
LOOK_TIMEOUT_S = 3.0
LOOKS_MAX = 8  # at a time
PAUSE_S, PAUSE_S_MAX = 0.25, 4.0


class _Round:
    """The tries of one call: which client next, and how long to wait before it."""

    def __init__(self, tries_max: int, dice: random.Random) -> None:
        self._left = tries_max
        self._dice = dice
        self._tried: list[str] = []
        self._rounds = 0

    def next(self, order: Sequence[str]) -> tuple[str, float]:
        """The region to try, and the seconds to wait before it."""
        self._left -= 1
        pause_s = 0.0
        fresh = [url for url in order if url not in self._tried]
        if not fresh:
            pause_s = min(PAUSE_S_MAX, PAUSE_S * 2.0**self._rounds) * self._dice.uniform(0.5, 1.0)
            self._rounds += 1
            self._tried.clear()
            fresh = list(order)
        self._tried.append(fresh[0])
        return fresh[0], pause_s

    @property
    def is_over(self) -> bool:
        """Whether that was the last try."""
        return self._left <= 0


class Regions(Generic[C]):
    """The regions of one mesh, for threads. Safe to share between them."""

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
        """`urls`: base URLs, one at least; `make`: a client for a base URL, made once for each.

        `learn`: let regions name others (their `endpoint` in mesh.toml). `learn_plain`: even those
        under `http://`, though one of `urls` is `https://`: prompts and keys go there unencrypted.
        Otherwise they are passed by, with a warning in the log.
        """
        if not urls:
            raise ValueError("name the base URL of one region at least")
        self._learns_plain = learn_plain or not any(map(look.is_encrypted, urls))
        self._passed_by: set[str] = set()
        self._dice = random.Random()
        self._choice = Choice(urls, self._dice)
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
        """Base URLs, the one to ask first in front."""
        with self._lock:
            return tuple(self._choice.order(time.monotonic()))

    def nearest(self) -> str:
        """Base URL of the nearest healthy region. The first call measures, so it takes a while."""
        self._keep_fresh()
        return self.order[0]

    def call(self, ask: Callable[[C], T]) -> T:
        """`ask` with the nearest healthy region's client; with others while regions fail.

        Raises what the last try raised, and at once what is not a region's fault.
        """
        self._keep_fresh()
        tries = self.tries()
        while True:
            url, pause_s = tries.next(self.order)
            time.sleep(pause_s)
            try:
                answer = ask(self.client(url))
            except Exception as error:
                if not self.failed(url, error) or tries.is_over:
                    raise
            else:
                self.answered(url)
                return answer

    def refresh(self) -> None:
        """Measure every region now, those that this one or that one tells of included."""
        with self._refreshing:
            seen: set[str] = set()
            while new := [url for url in self._choice.urls if url not in seen]:
                self._look_at_all(new)
                seen.update(new)
            self._refreshed_at = time.monotonic()

    # What AsyncRegions needs, too.

    @property
    def is_fresh(self) -> bool:
        """Whether the measurements are young enough."""
        return time.monotonic() - self._refreshed_at < self._refresh_s

    @property
    def is_measured(self) -> bool:
        """Whether there are any."""
        return self._refreshed_at > float("-inf")

    def tries(self) -> _Round:
        """The tries of one call."""
        return _Round(self._tries_max, self._dice)

    def client(self, url: str) -> C:
        """The client of that region, made at its first use."""
        with self._lock:
            if url not in self._clients:
                self._clients[url] = self._make(url)
            return self._clients[url]

    def answered(self, url: str) -> None:
        """That region is well."""
        with self._lock:
            self._choice.answered(url)

    def failed(self, url: str, error: Exception) -> bool:
        """Whether the error is the region's; then it rests."""
        if not is_a_regions(error):
            return False
        log.info("%s: %s; the next region is asked", url, error)
        with self._lock:
            self._choice.failed(url, time.monotonic(), retry_after_s(error))
        return True

    def refresh_aside(self) -> None:
        """Measure in a thread of its own, unless that is being done."""
        if not self._refreshing.locked():
            threading.Thread(target=self.refresh, name="mesh regions", daemon=True).start()

    def _keep_fresh(self) -> None:
        if not self.is_measured:
            self.refresh()
        elif not self.is_fresh:
            self.refresh_aside()

    def _look_at_all(self, urls: Sequence[str]) -> None:
        with ThreadPoolExecutor(min(LOOKS_MAX, len(urls))) as pool:
            looks = list(pool.map(self._look_at, urls))
        with self._lock:
            for url, (rtt_s, others) in zip(urls, looks, strict=True):
                self._note(url, rtt_s)
                self._choice.learn(other for other in others if self._may_learn(other, url))

    def _look_at(self, url: str) -> tuple[float | None, tuple[str, ...]]:
        rtt_s = look.round_trip_s(url, LOOK_TIMEOUT_S)
        others = look.endpoints(url, LOOK_TIMEOUT_S) if self._learns and rtt_s is not None else ()
        return rtt_s, others

    def _may_learn(self, url: str, teller: str) -> bool:
        """Whoever chose TLS keeps it: no region may talk a client out of it."""
        if self._learns_plain or look.is_encrypted(url) or url in self._choice.urls:
            return True
        if url not in self._passed_by and len(self._passed_by) < REGIONS_MAX:
            self._passed_by.add(url)
            log.warning(
                "%s names the region %s, which is not https: passed by. Give learn_plain=True to "
                "go there unencrypted",
                teller,
                url,
            )
        return False

    def _note(self, url: str, rtt_s: float | None) -> None:
        if rtt_s is None:
            self._choice.failed(url, time.monotonic())
        else:
            self._choice.measured(url, rtt_s)


class AsyncRegions(Generic[C]):
    """The same for asyncio: `make` gives asynchronous clients, `ask` is awaited."""

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
        self._regions = Regions(
            urls,
            make,
            refresh_s=refresh_s,
            tries_max=tries_max,
            learn=learn,
            learn_plain=learn_plain,
        )

    @property
    def order(self) -> tuple[str, ...]:
        """Base URLs, the one to ask first in front."""
        return self._regions.order

    async def nearest(self) -> str:
        """Base URL of the nearest healthy region. The first call measures, so it takes a while."""
        await self._keep_fresh()
        return self._regions.order[0]

    async def call(self, ask: Callable[[C], Awaitable[T]]) -> T:
        """As `Regions.call`."""
        await self._keep_fresh()
        regions, tries = self._regions, self._regions.tries()
        while True:
            url, pause_s = tries.next(regions.order)
            await asyncio.sleep(pause_s)
            try:
                answer = await ask(regions.client(url))
            except Exception as error:
                if not regions.failed(url, error) or tries.is_over:
                    raise
            else:
                regions.answered(url)
                return answer

    async def refresh(self) -> None:
        """Measure every region now, in threads."""
        await asyncio.to_thread(self._regions.refresh)

    async def _keep_fresh(self) -> None:
        if not self._regions.is_measured:
            await self.refresh()
        elif not self._regions.is_fresh:
            self._regions.refresh_aside()
