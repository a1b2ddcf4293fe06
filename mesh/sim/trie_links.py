"""Prefix gossip between the twin's routers: the core's effects carried, lost, and counted.

The same messages as live ones, over the network's links with their delay, jitter, loss and cuts.
Their bytes are counted per link and direction as `schemas.gossip.size_bytes` says, whether they
arrive or not, and inside a region apart. What goes over a link once may be heard by every router
of the region there. An inbox names the region and the router that asked, and the stream.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.sim.config import SimTopology
from mesh.sim.network import Network, RegionPair
from schemas.gossip import PEERS, TrieAnswer, TrieAsk, TrieDelta, TriePart, size_bytes
from schemas.ids import RegionId, RouterId


class Listener(Protocol):
    """A router, as far as gossip goes."""

    site: RegionId
    name: RouterId

    def feed(self, event: ev.Event) -> None:
        """Something has happened to it."""


class TrieLinks:
    """Of all routers. `performers` are one router's."""

    def __init__(
        self,
        network: Network,
        crews: Mapping[RegionId, Sequence[Listener]],
        topology: SimTopology,
    ) -> None:
        self.sent_bytes: dict[RegionPair, int] = {}
        self._network = network
        self._crews = crews
        self._topology = topology

    def performers(self, origin: Origin) -> dict[type, Callable[[Any], None]]:
        """How effects of that router are performed."""
        return {
            fx.PublishTrie: lambda effect: self._publish(origin, effect.delta),
            fx.PublishToSiblings: lambda effect: self._tell_siblings(origin, effect.delta),
            fx.AskTrie: lambda effect: self._ask(origin, effect.region, effect.ask),
            fx.AnswerTrie: lambda effect: self._answer(origin, effect.inbox, effect.answer),
        }

    def _publish(self, origin: Origin, delta: TrieDelta) -> None:
        for region in (*self._topology.peers_of(origin.region, self._crews), origin.region):
            self._send(origin, region, size_bytes(delta), ev.TrieSeen(delta))

    def _tell_siblings(self, origin: Origin, delta: TrieDelta) -> None:
        self._send(origin, origin.region, size_bytes(delta), ev.SiblingSeen(delta))

    def _ask(self, origin: Origin, region: RegionId, ask: TrieAsk) -> None:
        inbox = f"{origin.region}/{origin.router}/{ask.stream}"
        asked = ev.TrieAsked(ask, origin.region, inbox)
        self._send(origin, region, size_bytes(ask), asked, RouterId(ask.router))

    def _answer(self, origin: Origin, inbox: str, answer: TrieAnswer) -> None:
        region, router, stream = inbox.split("/")
        event: ev.Event
        if isinstance(answer, TriePart):
            is_told = int(stream) == PEERS
            event = ev.TriePartSeen(answer) if is_told else ev.SiblingPartSeen(answer)
        else:
            event = ev.TrieSeen(answer)
        self._send(origin, RegionId(region), size_bytes(answer), event, RouterId(router))

    def _send(
        self, origin: Origin, to: RegionId, size: int, event: ev.Event, only: RouterId | None = None
    ) -> None:
        listeners = [
            router
            for router in self._crews[to]
            if (to, router.name) != origin and only in (None, router.name)
        ]
        if to != origin.region:
            link = (origin.region, to)
            self.sent_bytes[link] = self.sent_bytes.get(link, 0) + size
        for router in listeners:
            self._network.send_state(origin.region, to, router.feed, event)
