"""Follows one engine's KV events through gaps and restarts.

Feed batches as they arrive. Where batches are missing, the engine is asked to repeat them; until it
has, the batch that showed the gap waits. What can't be repeated any more leaves the held set
unknown: it is forgotten, so what is reported as held is always part of what the engine holds. After
a restart of the engine, or a lost connection, which can't be told from one, everything is lost.
"""

from dataclasses import dataclass

from agents.core.held_blocks import HeldBlocks
from agents.core.kv_events import KvEventOrder, KvEventsInvalid, Verdict, parse_batch


@dataclass(slots=True)
class EventCounts:
    """Since the start."""

    batches: int = 0
    payload_bytes: int = 0
    replays: int = 0  # requested
    holes: int = 0  # batches that could not be had any more
    restarts: int = 0
    invalid: int = 0  # batches that could not be read


class EngineCache:
    """What the engine holds. `live` and `connected` return from which batch on to ask for a replay,
    None for no replay; `repeated` with each batch of it and `replay_ended` must follow before the
    next batch."""

    def __init__(self, held: HeldBlocks) -> None:
        self.held = held
        self.counts = EventCounts()
        self._order = KvEventOrder()
        self._waiting: tuple[int, bytes] | None = None  # the batch that showed a gap
        self._has_connected = False

    def connected(self) -> int:
        """A connection was made: what the engine published before is to be repeated."""
        if self._has_connected:
            self._restart()
        self._has_connected = True
        self._order.restarted()
        self.counts.replays += 1
        return 0

    def live(self, seq: int, payload: bytes) -> int | None:
        """A batch arrived as it was published."""
        verdict = self._order.live(seq)
        if verdict is Verdict.RESTARTED:
            self._restart()
            verdict = Verdict.TAKE if seq == 0 else Verdict.REPLAY
        if verdict is Verdict.TAKE:
            self._apply(seq, payload)
        elif verdict is Verdict.REPLAY:
            self._waiting = seq, payload
            self.counts.replays += 1
            return self._order.next
        return None

    def repeated(self, seq: int, payload: bytes) -> None:
        """The engine repeated this batch; in order."""
        if seq < self._order.next:
            return  # it has been taken
        if not self._order.replayed((seq,)):
            self._lose()
        self._apply(seq, payload)

    def replay_ended(self, *, was_answered: bool) -> None:
        """The engine repeats no more, or did not answer to the end."""
        if was_answered and self._order.next == 0:
            self.held.is_whole = True  # it has published nothing
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting[0] >= self._order.next:
            if waiting[0] > self._order.next:
                self._lose()
            self._order.give_up(waiting[0])
            self._apply(*waiting)

    def _restart(self) -> None:
        self.counts.restarts += 1
        self.held.clear()
        self.held.is_whole = False  # until its first batch was taken: it may not have restarted

    def _lose(self) -> None:
        self.counts.holes += 1
        self.held.forget()

    def _apply(self, seq: int, payload: bytes) -> None:
        self.held.is_whole = self.held.is_whole or seq == 0
        self.counts.batches += 1
        self.counts.payload_bytes += len(payload)
        try:
            self.held.apply(parse_batch(payload))
        except KvEventsInvalid:
            self.counts.invalid += 1
            self.held.forget()
