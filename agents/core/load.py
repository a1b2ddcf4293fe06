"""The two rules by which a replica speaks of its load: `pending` and `full`. Nowhere else.

Pending requests, not outstanding ones, say whether an engine has room: batch capacity varies
with request length by an order of magnitude, but a waiting request always means that the batch
or the KV cache is full now (SkyWalker, section 3.3).

    pending = what the engine said waits and can still be waiting
            + what was handed over since it said so, has no first byte,
              and does not fit the room it showed

A reading is up to 100 ms old, and an engine counts even a request that it is about to start as
waiting. Without a correction one glimpse of it makes an idle replica refuse work until the next
look. So what had no first byte at the reading and has one now (or has ended) no longer waits.
That takes the waiting requests to be ours; requests of other clients beyond ours stay counted.

Room is `batch_max - running - waiting`, and what fits the free KV cache at the usual size of an
answer; the smaller of the two. Where an engine shows neither, what was handed over is taken to
fit: the next reading, at most 100 ms away, tells. An engine that shows no queue has no pending
at all, and only the cap on outstanding requests bounds it.
"""

from typing import NamedTuple

from agents.core.reading import EngineReading


class Handed(NamedTuple):
    """What the agent itself knows of the requests that it handed over."""

    still: int = 0  # before the reading's end, no first byte yet
    settled: int = 0  # before the reading's end, first byte or end since the reading began
    since: int = 0  # after the reading began, no first byte yet


NOBODY_HANDED = Handed()


def pending(reading: EngineReading, handed: Handed, tokens_per_answer: float | None) -> int | None:
    """Requests that wait, by the rule above; None for an engine that shows no queue."""
    if reading.waiting is None or handed is NOBODY_HANDED:
        return reading.waiting
    waiting = still_waiting(reading.waiting, handed)
    if not handed.since:
        return waiting
    space = room(reading, tokens_per_answer)
    beyond = 0 if space is None else max(0, handed.since - space)
    return waiting + beyond


def still_waiting(said: int, handed: Handed) -> int:
    """How many of the requests that the engine said were waiting can be waiting now."""
    could_wait = max(said, handed.still + handed.settled)
    return min(said, could_wait - handed.settled)


def room(reading: EngineReading, tokens_per_answer: float | None) -> int | None:
    """How many more requests would start at once, or None when the engine does not show it."""
    rooms = (_batch_room(reading), _kv_room(reading, tokens_per_answer))
    return min((space for space in rooms if space is not None), default=None)


def full(pending_now: int | None, outstanding: int, outstanding_max: int) -> bool:
    """Whether new work would be refused."""
    return outstanding >= outstanding_max or (pending_now or 0) > 0


def occupancy(running: int | None, batch_max: int | None) -> float | None:
    """Share of the batch in use; engines may briefly run more than they promise."""
    if running is None or not batch_max:
        return None
    return min(1.0, running / batch_max)


def _batch_room(reading: EngineReading) -> int | None:
    if reading.batch_max is None or reading.running is None:
        return None
    return max(0, reading.batch_max - reading.running - (reading.waiting or 0))


def _kv_room(reading: EngineReading, tokens_per_answer: float | None) -> int | None:
    if reading.kv_capacity_tokens is None or reading.kv_used_ratio is None:
        return None
    if not tokens_per_answer:
        return None
    free = reading.kv_capacity_tokens * (1.0 - reading.kv_used_ratio)
    return max(0, int(free / tokens_per_answer))
