"""When keepalives leave and what they say of the next one, and when ticks come, by clocks that
nobody waits for."""

import asyncio
from contextlib import suppress

import pytest

from mesh.runtime import ticks
from schemas.exchange import ALIVE_REST_S, ALIVE_S
from tests.seeds.loop import VirtualLoop


class Clock:
    """Time passes in sleeps alone; after `until` they are cancelled."""

    def __init__(self, until: float) -> None:
        self.now, self.until = 0.0, until

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > self.until:
            raise asyncio.CancelledError


def sent(rests, until: float, monkeypatch) -> list[tuple[float, float]]:
    clock, found = Clock(until), []
    monkeypatch.setattr(ticks.asyncio, "sleep", clock.sleep)

    async def run() -> None:
        await ticks.keep_alive(lambda s: found.append((clock.now, s)), lambda: rests(clock.now))

    try:
        run().send(None)
    except asyncio.CancelledError:
        return found
    raise AssertionError("it ended")


def test_keepalives_come_as_usual_while_there_are_requests(monkeypatch) -> None:
    found = sent(lambda now: False, 2.0, monkeypatch)
    assert found == [(at * ALIVE_S, ALIVE_S) for at in range(5)]


def test_at_rest_they_come_less_often_and_say_so(monkeypatch) -> None:
    found = sent(lambda now: True, 3.0 * ALIVE_REST_S, monkeypatch)
    assert found == [(at * ALIVE_REST_S, ALIVE_REST_S) for at in range(4)]


def test_a_request_ends_the_rest_within_the_usual_time(monkeypatch) -> None:
    found = sent(lambda now: now < 2.7, 4.2, monkeypatch)
    assert found == [(0.0, 2.0), (2.0, 2.0), (3.0, 0.5), (3.5, 0.5), (4.0, 0.5)]


class Requests:
    """A session that ticks. One request after 1.27 s, over at once; a second later it rests."""

    fed = None

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time
        self.begun, self.busy_at, self.ticked = self.clock(), float("-inf"), []
        asyncio.get_running_loop().call_later(1.27, self.come)

    def rests(self) -> bool:
        return self.clock() - self.busy_at > 0.98

    def tick(self) -> None:
        self.ticked.append(round(self.clock() - self.begun, 3))
        self.feed()

    def come(self) -> None:
        self.busy_at = self.clock()
        self.feed()

    def feed(self) -> None:
        if self.fed is not None:
            self.fed()


def test_what_comes_at_rest_ends_it_at_once() -> None:
    async def ticked() -> tuple[list[float], list[float]]:
        requests, late = Requests(), []
        with suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                await ticks.keep_ticking(requests, late.append, requests.rests)
        return requests.ticked, late

    loop = VirtualLoop()
    found, late = loop.run_until_complete(ticked())
    loop.close()
    rest, usual = [0.2 * n for n in range(1, 7)], [1.27 + 0.05 * n for n in range(1, 21)]
    assert found == pytest.approx([*rest, *usual, 2.47, 2.67, 2.87], abs=0.002)
    assert max(late) < 0.001
