"""Prefix gossip between the twin's routers: the core's effects carried, lost, and counted.

The same messages as live ones, over the network's links with their delay, jitter, loss and cuts.
Their bytes are counted per link and direction as `schemas.gossip.size_bytes` says, whether they
arrive or not. An inbox is the name of the region that asked: every region has one router.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.sim.network import Link, Network
from mesh.sim.topology import Topology
from schemas.gossip import TrieAnswer, TrieAsk, TrieDelta, TriePart, size_bytes
from schemas.ids import RegionId


class Listener(Protocol):
    """A router, as far as gossip goes."""

    site: RegionId

    def feed(self, event: ev.Event) -> None:
        """Something has happened to it."""


class TrieLinks:
    """Of all routers. `performers` are one router's."""

    def __init__(
        self, network: Network, routers: Mapping[RegionId, Listener], topology: Topology
    ) -> None:
        self.sent_bytes: dict[Link, int] = {}
        self._network = network
        self._routers = routers
        self._topology = topology

    def performers(self, site: RegionId) -> dict[type, Callable[[Any], None]]:
        """How effects of the router at `site` are performed."""
        return {
            fx.PublishTrie: lambda effect: self._publish(site, effect.delta),
            fx.AskTrie: lambda effect: self._ask(site, effect.region, effect.ask),
            fx.AnswerTrie: lambda effect: self._answer(site, effect.inbox, effect.answer),
        }

    def _publish(self, site: RegionId, delta: TrieDelta) -> None:
        for peer in self._topology.peers_of(site, self._routers):
            self._send(site, peer, size_bytes(delta), ev.TrieSeen(delta))

    def _ask(self, site: RegionId, peer: RegionId, ask: TrieAsk) -> None:
        self._send(site, peer, size_bytes(ask), ev.TrieAsked(ask, site, str(site)))

    def _answer(self, site: RegionId, inbox: str, answer: TrieAnswer) -> None:
        seen = ev.TriePartSeen(answer) if isinstance(answer, TriePart) else ev.TrieSeen(answer)
        self._send(site, RegionId(inbox), size_bytes(answer), seen)

    def _send(self, site: RegionId, to: RegionId, size: int, event: ev.Event) -> None:
        link = (site, to)
        self.sent_bytes[link] = self.sent_bytes.get(link, 0) + size
        self._network.send_state(site, to, self._routers[to].feed, event)
