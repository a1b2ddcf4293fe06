"""When keepalives leave and what they say of the next one, by a clock that nobody waits for."""

import asyncio

from mesh.runtime import ticks
from schemas.exchange import ALIVE_REST_S, ALIVE_S


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
