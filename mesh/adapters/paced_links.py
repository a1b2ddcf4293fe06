"""What is large on the links to peer regions: bodies in parts, and answers by credits.

Both go at the pace of the link, so that nothing waits for them. Of a body, the next part leaves
when there is room on the way to the peer. Of an answer, the agent is sent the next credit when
there is room on the way from it; before the first credit it may send a few KiB. Bodies to one
region take turns, so that each agent gets its next part in time, and so do answers. A body whose
attempt has ended meanwhile is not sent any further, nor is such an answer credited.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from mesh.session.answer import AnswerReceiver
from mesh.session.link_pace import PART_BYTES, FirstWindows, LinkPace
from mesh.session.record import OpenRequest
from schemas import exchange, subjects, wire
from schemas.ids import RegionId, RouterId
from schemas.replies import PING_BYTES, PING_PREFIX

PINGS_MAX = 256  # remembered of each direction; a whole window of bodies' parts are 128
Publish = Callable[..., bool]  # as `RouterBus.publish`


class _Paced(Protocol):
    """Something of which a part crosses the link at each turn."""

    def send_part(self, publish: Publish) -> int:
        """Bytes that this lets onto the link; 0 when it has no more."""

    @property
    def has_more(self) -> bool:
        """Whether it waits for another turn."""


@dataclass(slots=True, eq=False)
class _Body:
    record: OpenRequest
    inbox: str
    subject: str
    is_wanted: Callable[[], bool]
    offset: int = 0

    def send_part(self, publish: Publish) -> int:
        if not self.is_wanted():
            return 0
        part = self.record.body[self.offset : self.offset + PART_BYTES]
        headers = {exchange.H_BODY_INBOX: self.inbox, exchange.H_BODY_OFFSET: str(self.offset)}
        if not part or not publish(self.subject, part, headers=headers):
            return 0
        self.offset += len(part)
        return len(part)

    @property
    def has_more(self) -> bool:
        return self.offset < len(self.record.body)


@dataclass(slots=True)
class _Answer:
    answer: AnswerReceiver
    waits: bool = False  # for its turn

    def send_part(self, publish: Publish) -> int:
        answer, self.waits = self.answer, False
        if answer.region is None or answer.replica is None or not answer.is_wanted:
            return 0
        if not answer.is_credit_due:
            return 0
        granted_bytes = answer.granted_bytes
        credit = wire.encode(answer.next_credit())
        if not publish(subjects.credit(answer.region, answer.replica), credit):
            return 0
        self.waits = answer.is_credit_due
        return answer.granted_bytes - granted_bytes

    @property
    def has_more(self) -> bool:
        return self.waits


@dataclass(slots=True)
class _Direction:
    """One way between this router's region and a peer."""

    region: RegionId
    pace: LinkPace = field(default_factory=LinkPace)
    waiting: deque[_Paced] = field(default_factory=deque)  # whose turn is next, first
    pings: dict[bytes, int] = field(default_factory=dict)  # the part that each one left behind
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Link:
    there: _Direction
    back: _Direction
    first_windows: FirstWindows = field(default_factory=FirstWindows)


class PacedLinks:
    """One router's. `passed` is to be called with what comes to its ping inboxes."""

    def __init__(
        self,
        region: RegionId,
        router: RouterId,
        peers: Collection[RegionId],
        publish: Publish,
    ) -> None:
        self._region, self._router = region, router
        self._peers = frozenset(peers)  # adopted regions are some of these
        self._publish = publish
        self._links: dict[RegionId, _Link] = {}  # of peers only
        self._is_closed = False

    def send_body(
        self,
        record: OpenRequest,
        region: RegionId,
        subject: str,
        inbox: str,
        is_wanted: Callable[[], bool],
    ) -> bool:
        """The record's body to an agent of that region, which answers to `inbox`, while it
        `is_wanted`. False, and nothing is sent or kept, if the region is no peer: frames may name
        any."""
        if region not in self._peers:
            return False
        self._wait(self._link(region).there, _Body(record, inbox, subject, is_wanted))
        return True

    def expect_answer(self, record: OpenRequest, region: RegionId, headers: dict[str, str]) -> None:
        """The record's answer will come over the link to that peer: `headers` of its request say
        how much of it may come at first, and its credits are paced."""
        answer = record.answer
        if answer is None or region not in self._peers:
            return
        first = self._link(region).first_windows.next(asyncio.get_running_loop().time())
        headers[exchange.H_WINDOW] = str(first)
        paced = _Answer(answer)

        def pace() -> None:
            if not paced.waits:
                paced.waits = True
                # The peer may have placed it at a region that it adopted.
                sender = answer.region if answer.region in self._peers else region
                self._wait(self._link(sender).back, paced)

        answer.begin_small(first, pace)

    def close(self) -> None:
        """Send nothing more."""
        self._is_closed = True
        for link in self._links.values():
            for way in (link.there, link.back):
                way.waiting.clear()
                if way.timer is not None:
                    way.timer.cancel()
        self._links.clear()

    def passed(self, token: str, data: bytes) -> bool:
        """An answer to a ping, by the last token of its inbox; False if it is not one of these."""
        for way in self._ways(token):
            if (number := way.pings.pop(data, None)) is not None:
                way.pace.passed(number, asyncio.get_running_loop().time())
                self._go_on(way)
                return True
        return False

    def returned(self, region: RegionId | None = None) -> None:
        """The link to that peer was lost for a moment; None: those to all."""
        for peer, link in list(self._links.items()):
            for way in (link.there, link.back) if region in (None, peer) else ():
                way.pace.cut()
                self._go_on(way)

    def unanswered(self, token: str) -> None:
        """The bus reports that nobody there takes pings."""
        for way in self._ways(token):
            if way.pace.due_at is None or way.pace.is_blind:
                continue
            way.pace.unanswered()
            if way.timer is not None:
                way.timer.cancel()
                way.timer = None
            self._go_on(way)

    def _link(self, region: RegionId) -> _Link:
        link = self._links.get(region)
        if link is None:
            link = self._links[region] = _Link(_Direction(region), _Direction(region))
        return link

    def _ways(self, token: str) -> tuple[_Direction, ...]:
        link = self._links.get(RegionId(token.removeprefix(PING_PREFIX)))
        return () if link is None else (link.there, link.back)

    def _wait(self, way: _Direction, paced: _Paced) -> None:
        if self._is_closed:
            return
        way.waiting.append(paced)
        self._go_on(way)

    def _go_on(self, way: _Direction) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while way.waiting and way.pace.may_send(now):
            paced = way.waiting.popleft()
            if size := paced.send_part(self._publish):
                self._ping(way, size, now)
                if paced.has_more:
                    way.waiting.append(paced)
        due_at = way.pace.due_at
        if due_at is None:
            way.pings.clear()
        elif way.timer is None:
            way.timer = loop.call_at(due_at, self._expire, way)

    def _ping(self, way: _Direction, size: int, now: float) -> None:
        ping = secrets.token_bytes(PING_BYTES)  # that nobody else can answer
        way.pings[ping] = way.pace.sent(size, now)
        inbox = subjects.inbox(self._region, self._router, PING_PREFIX + way.region)
        self._publish(subjects.ping(way.region), ping, reply=inbox)

    def _expire(self, way: _Direction) -> None:
        way.timer = None
        way.pace.expire(asyncio.get_running_loop().time())
        while len(way.pings) > PINGS_MAX:
            del way.pings[next(iter(way.pings))]
        self._go_on(way)
