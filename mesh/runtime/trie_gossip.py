"""Gossip on the bus: deltas and questions in as events, and out as messages.

The answers of each origin come to an inbox of their own, whose last token is random and told to
that origin's region only: nobody else can put a set in that region's mouth. Whatever is not what
it says it is gets dropped, counted and logged.
"""

import logging
import secrets
from collections.abc import Callable
from typing import NamedTuple

from nats.aio.msg import Msg

from infra.limited_log import LimitedLog
from mesh.adapters.bus import RouterBus, has_headers
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.reply_guard import ReplyGuard
from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.core.gossip.told import Origin
from mesh.runtime.config import RouterConfig
from schemas import subjects, wire
from schemas.gossip import PEERS, SIBLINGS, TrieAsk, TrieDelta, TriePart
from schemas.ids import RouterId
from schemas.replies import TRIE_PREFIX

log = logging.getLogger(__name__)

TOKEN_BYTES = 12
ASKED_MAX = 256  # origins that an answer is awaited of

PART_SEEN: dict[int, Callable[[TriePart], ev.Event]] = {
    PEERS: ev.TriePartSeen,
    SIBLINGS: ev.SiblingPartSeen,
}
DELTA_SEEN: dict[int, Callable[[TrieDelta], ev.Event]] = {
    PEERS: ev.TrieSeen,
    SIBLINGS: ev.SiblingSeen,
}


class Source(NamedTuple):
    """Whose answer comes to an inbox, and of which of its streams."""

    origin: Origin
    stream: int


class TrieGossip:
    """One router's. `hear_…` is called by the bus, the rest performs effects."""

    def __init__(
        self,
        config: RouterConfig,
        bus: RouterBus,
        metrics: RouterMetrics,
        feed: Callable[[ev.Event], None],
        guard: ReplyGuard,
    ) -> None:
        self._guard = guard
        self._log = LimitedLog(log)
        self._config = config
        self._bus = bus
        self._metrics = metrics
        self._feed = feed
        self._tokens: dict[Source, str] = {}  # of the inbox that it answers to
        self._sources: dict[str, Source] = {}  # the same the other way round

    def hear_delta(self, msg: Msg) -> None:
        """A router of a peer region, or of our own, tells what its region gained and lost."""
        delta = self._read(msg)
        if not isinstance(delta, TrieDelta):
            self._drop(msg, "no delta")
        elif delta.region != subjects.owner(msg.subject):
            self._drop(msg, "speaks for another region")
        elif delta.region in self._config.peers or self._is_sibling(delta):
            self._feed(ev.TrieSeen(delta))

    def hear_sibling(self, msg: Msg) -> None:
        """A router of our own region tells what it placed where."""
        delta = self._read(msg)
        if not isinstance(delta, TrieDelta):
            self._drop(msg, "no delta")
        elif self._is_sibling(delta):
            self._feed(ev.SiblingSeen(delta))

    def hear_ask(self, msg: Msg) -> None:
        """A router of a peer region, or of our own, missed something."""
        address = self._guard.inbox("snapshot", msg)
        if address is None:
            return
        ask = self._read(msg)
        if not isinstance(ask, TrieAsk):
            self._drop(msg, "no question")
        else:
            self._feed(ev.TrieAsked(ask, address.region, msg.reply))

    def hear_answer(self, msg: Msg) -> None:
        """What we had missed: deltas, or a part of the whole set."""
        source = self._sources.get(msg.subject.rpartition(".")[2])
        answer = self._read(msg)
        if not isinstance(answer, TrieDelta | TriePart):
            self._drop(msg, "no answer")
        elif source is None or source.origin != (answer.region, answer.router):
            self._drop(msg, "answers what was not asked")
        elif isinstance(answer, TriePart):
            self._feed(PART_SEEN[source.stream](answer))
        else:
            self._feed(DELTA_SEEN[source.stream](answer))

    def publish(self, effect: fx.PublishTrie) -> None:
        """Tell the peers."""
        self._bus.publish(subjects.trie(self._config.region), wire.encode(effect.delta))

    def publish_to_siblings(self, effect: fx.PublishToSiblings) -> None:
        """Tell the other routers of our region."""
        self._bus.publish(subjects.siblings(self._config.region), wire.encode(effect.delta))

    def answer(self, effect: fx.AnswerTrie) -> None:
        """Say it again to one of them."""
        self._bus.publish(effect.inbox, wire.encode(effect.answer))

    def ask(self, effect: fx.AskTrie) -> None:
        """Ask one of them."""
        origin = Origin(effect.region, RouterId(effect.ask.router))
        token = self._token(Source(origin, effect.ask.stream))
        inbox = subjects.inbox(self._config.region, self._config.router, token)
        subject = subjects.snapshot(effect.region, self._config.region)
        self._bus.publish(subject, wire.encode(effect.ask), reply=inbox)

    def _token(self, source: Source) -> str:
        token = self._tokens.get(source)
        if token is None:
            if len(self._tokens) >= ASKED_MAX:
                oldest = next(iter(self._tokens))
                del self._sources[self._tokens.pop(oldest)]
            token = self._tokens[source] = TRIE_PREFIX + secrets.token_hex(TOKEN_BYTES)
            self._sources[token] = source
        return token

    def _is_sibling(self, delta: TrieDelta) -> bool:
        """Not ourselves, whom the bus lets us hear too."""
        return delta.region == self._config.region and delta.router != self._config.router

    @staticmethod
    def _read(msg: Msg) -> object:
        if has_headers(msg):
            return None
        try:
            return wire.decode(msg.data)
        except wire.WireError as error:
            return error

    def _drop(self, msg: Msg, why: str) -> None:
        self._metrics.gossip_dropped.inc()
        self._log.warning("gossip", why, "gossip on %s dropped: %s", msg.subject, why)
