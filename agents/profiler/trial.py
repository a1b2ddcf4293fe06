"""One test run: online requests at their times, and offline ones through the agent's own admission.

The admission decides with the same numbers as in an agent: what was sent and began, and the scrapes
of the engine. Offline requests wait in its queue without end; one that is given back or aborted is
lost, another takes its place. The offline load is there from the first online request to the last
answer.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import ceil, inf

from agents.core.offline_admission import OfflineAdmission
from agents.core.offline_request import Abort, Admit, GiveBack, OfflineRequest
from agents.core.slo_profile import Measure
from agents.profiler.engine import ProfiledEngine
from agents.profiler.load import Lengths, OnlineRequest
from agents.profiler.stream import Stream
from infra.process import end_all

DECIDE_S = 0.01  # at least so often, as an agent's timers do
SCRAPE_S = 0.05  # `mesh-agent run --read-interval-ms`
LATE_S_MIN, LATE_SHARE = 20.0, 0.5  # after the last arrival: of the run's length, for its answers
SECONDS_MIN = 1e-6
FILLED_BEFORE_S = 0.5  # the offline load comes first


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What online requests saw, and what offline work was done beside them."""

    latency_s: Mapping[Measure, float]
    online: int
    failed: int
    problem: str  # of the first one that failed
    unanswered: int  # still under way when the run's time was over
    offline_tokens_per_s: float
    aborted: int  # offline requests that left the engine for online ones


class Trial:
    """Run it once. `admission`: None for a run without offline work."""

    def __init__(
        self,
        engine: ProfiledEngine,
        online: Sequence[OnlineRequest],
        offline: Lengths,
        admission: OfflineAdmission | None,
        dice: random.Random,
        offline_priority: int | None = None,
    ) -> None:
        self._engine = engine
        self._online_requests = online
        self._lengths = offline
        self._admission = admission
        self._dice = dice
        self._priority = offline_priority
        self._keys = count()
        self._online: dict[int, Stream] = {}  # at the engine
        self._offline: dict[int, Stream] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of offline requests at the engine
        self._queued: dict[int, OfflineRequest] = {}
        self._ended: list[tuple[float, Stream]] = []  # online: when each was due
        self._waiting_scraped = 0  # online ones in the engine's queue, by the last scrape
        self._scrape_began_at = -inf
        self._offline_tokens = 0
        self._is_over = False
        self._wake = asyncio.Event()

    async def run(self) -> TrialResult:
        """Play it. Raises EngineUnusable."""
        began_at = time.monotonic()
        background = [
            asyncio.create_task(self._scrape()),
            asyncio.create_task(self._decide_again()),
        ]
        online: list[asyncio.Task[None]] = []
        try:
            start_at = began_at + (FILLED_BEFORE_S if self._admission is not None else 0.0)
            online = [
                asyncio.create_task(self._one_online(start_at + request.at_s, request))
                for request in self._online_requests
            ]
            last_s = self._online_requests[-1].at_s if self._online_requests else 0.0
            until = start_at + last_s + max(LATE_S_MIN, LATE_SHARE * last_s)
            await self._all_done(online, background, until - time.monotonic())
            seconds = time.monotonic() - began_at
        finally:
            self._is_over = True
            self._offline_tokens += sum(map(_computed, self._offline.values()))
            await end_all([*background, *online])
            await end_all(list(self._tasks.values()))
        await self._engine.idle()
        return self._result(seconds)

    async def _all_done(
        self,
        online: Sequence[asyncio.Task[None]],
        background: Sequence[asyncio.Task[None]],
        timeout_s: float,
    ) -> None:
        """Return when all online requests have ended, or their time is over."""
        answered = asyncio.create_task(_gathered(online))
        try:
            waits_for = [answered, *background]
            done, _ = await asyncio.wait(
                waits_for, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # raises what went wrong
        finally:
            await end_all([answered])

    # Online.

    async def _one_online(self, at: float, request: OnlineRequest) -> None:
        await asyncio.sleep(at - time.monotonic())
        key = next(self._keys)
        stream = Stream(request.prompt_tokens, request.output_tokens, lambda s: self._began(key, s))
        task = self._engine.start(stream)
        self._online[key] = stream
        if self._admission is not None:
            tokens = request.prompt_tokens
            self._admission.online_sent(key, tokens, tokens, time.monotonic(), generates=True)
            self._wake.set()
        try:
            await asyncio.wait([task])
        finally:
            await end_all([task])
            del self._online[key]
            self._ended.append((at, stream))
            self._left(key, stream)

    # Offline.

    def _decide(self) -> None:
        """Ask the admission and carry out its decisions, before anything else happens."""
        admission = self._admission
        if admission is None or self._is_over:
            return
        now = time.monotonic()
        self._fill(admission, now)
        for decision in admission.decide(now, full=self._online_waiting() > 0):
            key = decision.key
            assert isinstance(key, int)
            if isinstance(decision, Admit):
                self._send(key, self._queued.pop(key))
            elif isinstance(decision, GiveBack):
                del self._queued[key]
            elif isinstance(decision, Abort) and (task := self._tasks.get(key)) is not None:
                task.cancel()

    def _fill(self, admission: OfflineAdmission, now: float) -> None:
        """Queue requests until there is no room for one more."""
        while True:
            prompt, output = self._lengths.draw(self._dice, self._engine.context_tokens)
            request = OfflineRequest(next(self._keys), prompt, output)
            if not admission.offer(request, now):
                return
            assert isinstance(request.key, int)
            self._queued[request.key] = request

    def _send(self, key: int, request: OfflineRequest) -> None:
        stream = Stream(
            request.prompt_tokens, request.answer_tokens_max, lambda s: self._began(key, s)
        )
        self._offline[key] = stream
        self._tasks[key] = task = self._engine.start(stream, self._priority)
        task.add_done_callback(lambda _: self._offline_left(key, stream))

    def _offline_left(self, key: int, stream: Stream) -> None:
        self._tasks.pop(key, None)
        self._offline.pop(key, None)
        if not self._is_over:
            if stream.is_whole:  # the work of one that was aborted is lost
                self._offline_tokens += _computed(stream)
            self._left(key, stream)

    # Both.

    def _began(self, key: int, stream: Stream) -> None:
        if self._admission is not None and len(stream.token_at) == 1:
            self._admission.began(key, time.monotonic())

    def _left(self, key: int, stream: Stream) -> None:
        if self._admission is not None:
            tokens = len(stream.token_at) if stream.is_whole else -1
            self._admission.ended(key, time.monotonic(), tokens)
            self._wake.set()

    async def _decide_again(self) -> None:
        while True:
            self._decide()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DECIDE_S):
                    await self._wake.wait()

    async def _scrape(self) -> None:
        """Scrape the engine again and again; its silence is an error."""
        while True:
            began_at = time.monotonic()
            reading = await self._engine.scrape()
            waiting = self._online_part(reading.waiting or 0, began_at)
            self._waiting_scraped, self._scrape_began_at = waiting, began_at
            if self._admission is not None:
                self._admission.scraped(reading, waiting, time.monotonic())
                self._wake.set()
            await asyncio.sleep(SCRAPE_S)

    def _online_part(self, waiting: int, began_at: float) -> int:
        """Of the requests in the engine's queue, the online ones: what waits was sent last, and by
        priority offline requests wait behind all others."""
        if not waiting:
            return 0
        ours = [(False, s.sent_at) for s in self._online.values() if not s.token_at]
        ours += [
            (self._priority is not None, s.sent_at)
            for s in self._offline.values()
            if not s.token_at
        ]
        online = {stream.sent_at for stream in self._online.values()}
        order = sorted(each for each in ours if each[1] <= began_at)
        return sum(sent_at in online for _, sent_at in order[-waiting:])

    def _online_waiting(self) -> int:
        """Of those that the last scrape showed waiting, those that still can be."""
        without = sum(
            not stream.token_at and stream.sent_at <= self._scrape_began_at
            for stream in self._online.values()
        )
        return min(self._waiting_scraped, without)

    def _result(self, seconds: float) -> TrialResult:
        ttft_s, gaps_s = [], []
        failed, unanswered, problem = 0, 0, ""
        for due_at, stream in self._ended:
            if stream.problem:
                failed, problem = failed + 1, problem or stream.problem
                continue
            unanswered += not stream.is_whole
            if stream.token_at:
                ttft_s.append(stream.token_at[0] - due_at)
            elif stream.ended_at < inf:
                ttft_s.append(stream.ended_at - due_at)  # it had none by then
            gaps_s += [later - earlier for earlier, later in pairwise(stream.token_at)]
        return TrialResult(
            _measures(sorted(ttft_s), sorted(gaps_s)),
            online=len(self._ended),
            failed=failed,
            problem=problem,
            unanswered=unanswered,
            offline_tokens_per_s=self._offline_tokens / seconds,
            aborted=0 if self._admission is None else self._admission.aborted_total,
        )


def _measures(ttft_s: Sequence[float], gaps_s: Sequence[float]) -> dict[Measure, float]:
    """Of sorted values; a measure that nothing was seen of is missing."""
    found: dict[Measure, float] = {}
    for values, mean, p99 in (
        (ttft_s, Measure.TTFT_MEAN, Measure.TTFT_P99),
        (gaps_s, Measure.TBT_MEAN, Measure.TBT_P99),
    ):
        if values:
            found[mean] = max(SECONDS_MIN, sum(values) / len(values))
            found[p99] = max(SECONDS_MIN, values[ceil(0.99 * len(values)) - 1])
    return found


async def _gathered(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Until all have ended; raises what one of them raises."""
    if tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            with contextlib.suppress(asyncio.CancelledError):
                task.result()


def _computed(stream: Stream) -> int:
    """Tokens of prompt and answer so far."""
    return stream.prompt_tokens + len(stream.token_at) if stream.token_at else 0
