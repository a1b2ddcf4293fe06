"""The open loop: departures don't wait for answers, and every one is counted once."""

import asyncio
import random
import time

from mesh.replay.play import OpenLoop
from mesh.replay.schedule import Departure
from mesh.replay.tally import RequestOutcome, RequestResult, RunTally
from mesh.replay.trace import TraceRequest
from tests.support.until import PATIENCE_S


def plan_of(count: int, every_s: float) -> tuple[Departure, ...]:
    request = TraceRequest(0.0, 10, 1)
    return tuple(Departure(n, n * every_s, "us", request) for n in range(count))


class Sink:
    """Takes requests; answers when released."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, float, float]] = []
        self.arrived = asyncio.Condition()
        self.release = asyncio.Event()

    async def ask(self, region: str, body: bytes, due_s: float) -> RequestResult:
        self.seen.append((body, due_s, time.monotonic()))
        async with self.arrived:
            self.arrived.notify_all()
        await self.release.wait()
        return RequestResult(RequestOutcome.OK)

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.seen) >= count)


def replay_of(sink: Sink, plan: tuple[Departure, ...], max_in_flight: int = 1000) -> OpenLoop:
    return OpenLoop(
        plan,
        sink.ask,
        lambda departure: b"%d" % departure.number,
        RunTally(("us",), random.Random(0)),
        max_in_flight=max_in_flight,
    )


async def test_requests_leave_on_time_though_none_is_answered() -> None:
    sink = Sink()
    replay = replay_of(sink, plan_of(30, 0.01))
    running = asyncio.create_task(replay.run())
    await sink.wait_for(30)
    assert replay.in_flight == 30
    sink.release.set()
    assert await running >= 0.29
    assert [body for body, _, _ in sink.seen] == [b"%d" % n for n in range(30)]
    assert all(left_s >= due_s for _, due_s, left_s in sink.seen)
    assert replay.tally.total.outcomes == {RequestOutcome.OK: 30}


async def test_beyond_the_bound_requests_fail_and_are_not_delayed() -> None:
    sink = Sink()
    replay = replay_of(sink, plan_of(8, 0.0), max_in_flight=3)
    running = asyncio.create_task(replay.run())
    await sink.wait_for(3)
    sink.release.set()
    await running
    total = replay.tally.total
    assert total.requests == 8
    assert total.failures["in_flight_limit"] == total.outcomes[RequestOutcome.FAILED] >= 1
    assert total.outcomes[RequestOutcome.OK] == 8 - total.outcomes[RequestOutcome.FAILED]


async def test_a_stop_ends_what_is_in_flight_and_sends_no_more() -> None:
    sink = Sink()
    replay = replay_of(sink, (*plan_of(5, 0.0), Departure(5, 3600.0, "us", TraceRequest(0, 1, 1))))
    running = asyncio.create_task(replay.run())
    await sink.wait_for(5)
    replay.stop()
    async with asyncio.timeout(PATIENCE_S):
        await running
    assert replay.sent == 5
    assert replay.tally.total.failures == {"interrupted": 5}


async def test_a_stop_before_a_request_took_its_first_step_still_counts_it() -> None:
    sink = Sink()

    def body(departure: Departure) -> bytes:
        if departure.number == 1:  # made right after the first left, before anything else runs
            replay.stop()
        return b""

    ledger = RunTally(("us",), random.Random(0))
    replay = OpenLoop(plan_of(2, 0.0), sink.ask, body, ledger, max_in_flight=9)
    await replay.run()
    assert sink.seen == []
    assert replay.sent == 1
    assert ledger.total.failures == {"interrupted": 1}
