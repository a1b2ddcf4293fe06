"""Warm-ups of a router of the twin: what it keeps of prompts, and asks without a client.

A kept text is a list of segments cut at a block, which has the same keys as the whole up to there.
"""

from collections.abc import Callable
from typing import Any

from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.core.prefixes.prompt import BLOCK_BYTES
from mesh.sim.ask import Ask, Tree
from mesh.sim.event_queue import EventQueue
from mesh.sim.network import Network
from mesh.sim.prompts import HASH_TOKENS, keys_of
from mesh.sim.surroundings import Surroundings
from mesh.sim.tickets import Tickets
from mesh.sim.workload import Node, Segment
from schemas.ids import RegionId

ONE_TOKEN = Segment(0, 1)  # the answer that nobody reads


class WarmUps:
    """One router's."""

    def __init__(
        self,
        site: RegionId,
        queue: EventQueue,
        network: Network,
        around: Surroundings,
        tickets: Tickets,
        feed: Callable[[ev.Event], None],
    ) -> None:
        self._site = site
        self._queue = queue
        self._network = network
        self._around = around
        self._tickets = tickets
        self._feed = feed
        self._kept: dict[int, tuple[Segment, ...]] = {}

    def performers(self) -> dict[type, Callable[[Any], None]]:
        """What is done with the core's effects."""
        return {
            fx.KeepPrefix: self._keep,
            fx.DropPrefix: self._drop,
            fx.OpenWarmUp: self._open,
            fx.CloseWarmUp: self._close,
            fx.StopWarmUp: self._stop,
        }

    def clear(self) -> None:
        """The process is gone."""
        self._kept.clear()

    def _keep(self, effect: fx.KeepPrefix) -> None:
        ticket = self._tickets.get(effect.key)
        size = None
        if ticket is not None:
            self._kept[effect.prefix] = cut(ticket.ask.node.prompt, effect.blocks * HASH_TOKENS)
            size = effect.blocks * BLOCK_BYTES
        self._queue.at(self._queue.now, self._feed, ev.PrefixKept(effect.prefix, size))

    def _drop(self, effect: fx.DropPrefix) -> None:
        self._kept.pop(effect.prefix, None)

    def _open(self, effect: fx.OpenWarmUp) -> None:
        request, prompt = effect.request, self._kept[effect.prefix]
        node = Node(prompt=prompt, answer=ONE_TOKEN, priority=request.priority)
        # Ended from the first: no client hears of it.
        now, key = self._queue.now, request.key
        ask = Ask(key, self._site, node, Tree(None), keys_of(node), request.prompt, now, ended=True)
        self._tickets.open(ask, now, request.deadline, key=key)

    def _close(self, effect: fx.CloseWarmUp) -> None:
        if (ticket := self._tickets.get(effect.key)) is not None:
            self._tickets.close(ticket)

    def _stop(self, effect: fx.StopWarmUp) -> None:
        replica = self._around.replicas[effect.replica]
        self._network.send(self._site, replica.site, replica.hear_cancel, effect.answer_inbox)


def cut(prompt: tuple[Segment, ...], tokens: int) -> tuple[Segment, ...]:
    """The first `tokens` of a prompt that has at least so many."""
    found = []
    for part in prompt:
        if tokens <= 0:
            break
        found.append(part._replace(tokens=min(part.tokens, tokens)))
        tokens -= part.tokens
    return tuple(found)
