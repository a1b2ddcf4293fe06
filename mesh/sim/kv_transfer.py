"""KV caches on their way between engines of the twin.

A prefill engine offers the cache of a prompt that it has computed, a decode engine wants it: by the
name that the prefill engine's answer gave it (nixl), or by the room that both were told (sglang;
the one that comes first waits). A transfer takes `BASE_S` and `S_PER_TOKEN`; until it is over, or
`TIMEOUT_S` after the offer, the cache takes memory of the prefill engine. It fails where that
engine has crashed meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agents.sim.engine import EngineSim
from mesh.sim.event_queue import EventQueue

if TYPE_CHECKING:
    from mesh.sim.engine import ReplicaEngine

BASE_S, S_PER_TOKEN = 0.005, 1e-5  # 128 KiB a token over 100 Gbit/s
TIMEOUT_S = 60.0

OnResult = Callable[[bool], None]  # whether the transfer is complete


def _ignored(done: bool) -> None:
    """Nobody waits for the result."""


@dataclass(slots=True, eq=False)
class Offer:
    """A KV cache in the memory of a prefill engine."""

    engine: "ReplicaEngine"
    sim: EngineSim  # the engine's process: another one after a crash
    pinned: Sequence[int]
    on_result: OnResult

    @property
    def is_there(self) -> bool:
        return not self.engine.is_down and self.engine.sim is self.sim


@dataclass(slots=True, eq=False)
class Want:
    """A decode engine that waits for one."""

    tokens: int
    on_result: OnResult


class KvTransfers:
    """All of one world, by name."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self._offers: dict[str, Offer] = {}
        self._wants: dict[str, Want] = {}

    def __len__(self) -> int:
        """Caches that are kept for decode engines, and decode engines that wait for one."""
        return len(self._offers) + len(self._wants)

    def offer(
        self,
        name: str,
        engine: "ReplicaEngine",
        blocks: Sequence[int],
        on_result: OnResult = _ignored,
    ) -> None:
        """The engine has computed a prompt with these blocks, and keeps them."""
        offer = Offer(engine, engine.sim, engine.pin(blocks), on_result)
        self._offers[name] = offer
        self._queue.after(TIMEOUT_S, self._expire_offer, name, offer)
        if (want := self._wants.pop(name, None)) is not None:
            self._start(name, offer, want)

    def want(self, name: str, tokens: int, on_result: OnResult, *, waits: bool) -> None:
        """A decode engine needs a cache of so many tokens. `waits`: for one that is not there."""
        want, offer = Want(tokens, on_result), self._offers.get(name)
        if offer is not None:
            self._start(name, offer, want)
        elif waits:
            self._wants[name] = want
            self._queue.after(TIMEOUT_S, self._expire_want, name, want)
        else:
            self._queue.after(0.0, on_result, False)

    def _start(self, name: str, offer: Offer, want: Want) -> None:
        seconds = BASE_S + S_PER_TOKEN * want.tokens
        self._queue.after(seconds, self._end, name, offer, want)

    def _end(self, name: str, offer: Offer, want: Want) -> None:
        is_there = offer.is_there and self._offers.get(name) is offer
        self._release(name, offer, is_complete=is_there)
        want.on_result(is_there)

    def _expire_offer(self, name: str, offer: Offer) -> None:
        if self._offers.get(name) is offer:
            self._release(name, offer, is_complete=False)

    def _release(self, name: str, offer: Offer, *, is_complete: bool) -> None:
        if self._offers.get(name) is offer:
            del self._offers[name]
            if offer.is_there:
                offer.engine.unpin(offer.pinned)
                offer.on_result(is_complete)

    def _expire_want(self, name: str, want: Want) -> None:
        if self._wants.get(name) is want:
            del self._wants[name]
            want.on_result(False)
