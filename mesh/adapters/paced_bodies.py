"""Large bodies on their way to peer regions: in parts, at the pace of the link.

Several bodies to one region take turns, so that each agent gets its next part in time. A body whose
attempt has ended meanwhile is not sent any further.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from mesh.session.link_pace import PART_BYTES, LinkPace
from mesh.session.record import OpenRequest
from schemas import exchange, subjects
from schemas.ids import RegionId, RouterId
from schemas.replies import PING_BYTES, PING_PREFIX

PINGS_MAX = 256  # remembered of each link; a whole window are 128
Publish = Callable[..., bool]  # as `RouterBus.publish`


@dataclass(slots=True)
class _Body:
    record: OpenRequest
    inbox: str
    subject: str
    is_wanted: Callable[[], bool]
    offset: int = 0

    def next_part(self) -> bytes:
        """Empty when all is sent, or nobody waits for it any more."""
        if not self.is_wanted():
            return b""
        return self.record.body[self.offset : self.offset + PART_BYTES]


@dataclass(slots=True)
class _Link:
    region: RegionId
    pace: LinkPace = field(default_factory=LinkPace)
    waiting: deque[_Body] = field(default_factory=deque)  # whose turn is next, first
    pings: dict[bytes, int] = field(default_factory=dict)  # the part that each one left behind
    timer: asyncio.TimerHandle | None = None


class PacedBodies:
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

    def send(
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
        link = self._links.get(region)
        if link is None:
            link = self._links[region] = _Link(region)
        link.waiting.append(_Body(record, inbox, subject, is_wanted))
        self._go_on(link)
        return True

    def close(self) -> None:
        """Send nothing more."""
        for link in self._links.values():
            link.waiting.clear()
            if link.timer is not None:
                link.timer.cancel()
        self._links.clear()

    def passed(self, token: str, data: bytes) -> bool:
        """An answer to a ping, by the last token of its inbox; False if it is not one of these."""
        link = self._links.get(RegionId(token.removeprefix(PING_PREFIX)))
        number = None if link is None else link.pings.pop(data, None)
        if link is None or number is None:
            return False
        link.pace.passed(number, asyncio.get_running_loop().time())
        self._go_on(link)
        return True

    def unanswered(self, token: str) -> None:
        """The bus reports that nobody there takes pings."""
        link = self._links.get(RegionId(token.removeprefix(PING_PREFIX)))
        if link is None or link.pace.due_at is None or link.pace.is_blind:
            return
        link.pace.unanswered()
        if link.timer is not None:
            link.timer.cancel()
            link.timer = None
        self._go_on(link)

    def _go_on(self, link: _Link) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while link.waiting and link.pace.may_send(now):
            body = link.waiting.popleft()
            if self._send_part(link, body, now):
                link.waiting.append(body)
        due_at = link.pace.due_at
        if due_at is None:
            link.pings.clear()
        elif link.timer is None:
            link.timer = loop.call_at(due_at, self._expire, link)

    def _send_part(self, link: _Link, body: _Body, now: float) -> bool:
        """Whether the body has another part after this one."""
        part = body.next_part()
        if not part:
            return False
        headers = {exchange.H_BODY_INBOX: body.inbox, exchange.H_BODY_OFFSET: str(body.offset)}
        if not self._publish(body.subject, part, headers=headers):
            return False
        body.offset += len(part)
        ping = secrets.token_bytes(PING_BYTES)  # that nobody else can answer
        link.pings[ping] = link.pace.sent(len(part), now)
        inbox = subjects.inbox(self._region, self._router, PING_PREFIX + link.region)
        self._publish(subjects.ping(link.region), ping, reply=inbox)
        return body.offset < len(body.record.body)

    def _expire(self, link: _Link) -> None:
        link.timer = None
        link.pace.expire(asyncio.get_running_loop().time())
        while len(link.pings) > PINGS_MAX:
            del link.pings[next(iter(link.pings))]
        self._go_on(link)
