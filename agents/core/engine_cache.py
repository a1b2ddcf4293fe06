"""Follows one engine's KV events through gaps and restarts.

Feed batches as they arrive. Where batches are missing, the engine is asked to repeat them; until it
has, the batch that showed the gap waits. A replay may have gaps itself: vLLM sends all it has at
once through a ZeroMQ ROUTER socket, which drops what exceeds its queue of 1,000 messages. Then the
engine is asked again, from the gap on, as long as each replay brings something. What can't be
repeated any more leaves the held set unknown: it is forgotten, so what is reported as held is
always part of what the engine holds. After a restart of the engine, or a lost connection, which
can't be told from one, everything is lost, for routers' estimates too.
"""

from agents.core.held_blocks import HeldBlocks
from agents.core.kv_events import BatchUse, KvEventOrder, KvEventsInvalid, parse_batch

REPLAYS_MAX = 100  # for one gap: vLLM keeps 10,000 batches by default, and drops none of 1,000


class EngineCache:
    """What the engine holds. `live`, `connected` and `replay_ended` return from which batch on to
    ask for a replay, None for no replay; `repeated` with each batch of it and `replay_ended` must
    follow before the next batch."""

    def __init__(self, held: HeldBlocks) -> None:
        self.held = held
        self.holes = 0  # times that batches could not be had any more
        self._order = KvEventOrder()
        self._waiting: tuple[int, bytes] | None = None  # the batch that showed a gap
        self._is_connected = self._was_lost = False
        self._is_behind = False  # by all that the engine had published before
        self._replays = 0  # for this gap
        self._has_brought = False  # this replay, a batch that was missing
        self._is_cut = False  # this replay has a gap

    @property
    def is_known(self) -> bool:
        """Whether all that the engine holds is known: not while it repeats all that it published,
        nor where it stopped half way, until the next live batch; nor where it doesn't tell all."""
        return self.held.is_whole and not self._is_behind and self.held.tells_all

    def connected(self) -> int:
        """A connection was made: what the engine published before is to be repeated."""
        self.disconnected()
        if self._was_lost:  # what the last run had published may have been taken since
            self.held.restarted()
        self._is_connected, self._was_lost = True, False
        self._order.restarted()
        self._replays, self._is_behind = 0, True
        return self._ask()

    def disconnected(self) -> None:
        """The connection was lost: the engine may have restarted, and what it reports goes lost."""
        if self._is_connected:
            self._is_connected, self._was_lost = False, True
            self.held.restarted()

    def live(self, seq: int, payload: bytes) -> int | None:
        """A batch arrived as it was published."""
        use = self._order.live(seq)
        if use is BatchUse.RESTARTED:
            self.held.restarted()
            use = BatchUse.TAKE if seq == 0 else BatchUse.REPLAY
            self._is_behind = True
        if use is BatchUse.TAKE:
            self._is_behind = False
            self._apply(seq, payload)
        elif use is BatchUse.REPLAY:
            self._waiting = seq, payload
            self._replays = 0
            return self._ask()
        return None

    def repeated(self, seq: int, payload: bytes) -> bool:
        """The engine repeated this batch; in order. False: those before it were dropped on their
        way, so the rest of this replay is of no use."""
        if seq < self._order.next:
            return True  # it has been taken
        if seq > self._order.next and self._may_ask_again:
            self._is_cut = True
            return False
        if not self._order.replayed((seq,)):
            self._lose()
        self._has_brought = True
        self._apply(seq, payload)
        return True

    def replay_ended(self, *, was_answered: bool) -> int | None:
        """The engine repeats no more, or did not answer to the end."""
        lacks_some = self._waiting is not None and self._waiting[0] > self._order.next
        if (self._is_cut or lacks_some or not was_answered) and self._may_ask_again:
            return self._ask()
        if was_answered and self._order.next == 0:
            self.held.is_whole = True  # it has published nothing
        waiting, self._waiting = self._waiting, None
        if was_answered or waiting is not None:
            self._is_behind = False
        if waiting is not None and waiting[0] >= self._order.next:
            if waiting[0] > self._order.next:
                self._lose()
            self._order.give_up(waiting[0])
            self._apply(*waiting)
        return None

    def _ask(self) -> int:
        self._replays += 1
        self._has_brought = self._is_cut = False
        return self._order.next

    @property
    def _may_ask_again(self) -> bool:
        return self._has_brought and self._replays < REPLAYS_MAX

    def _lose(self) -> None:
        self.holes += 1
        self.held.forget()

    def _apply(self, seq: int, payload: bytes) -> None:
        self.held.is_whole = self.held.is_whole or seq == 0
        try:
            self.held.apply(parse_batch(payload))
        except KvEventsInvalid:
            self.held.forget()
