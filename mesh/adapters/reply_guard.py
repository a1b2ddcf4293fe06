"""What a router does with a request whose answer would go where it may not: drop, count, log."""

import logging
from collections.abc import Callable

from nats.aio.msg import Msg

from infra.limited_log import LimitedLog
from mesh.adapters.metrics import RouterMetrics
from schemas.ids import RegionId
from schemas.replies import reply_inbox
from schemas.subjects import InboxAddress

log = logging.getLogger(__name__)


class ReplyGuard:
    """One router's. Every answer to a request goes to an inbox that this gives."""

    def __init__(
        self,
        home: RegionId,
        peers: tuple[RegionId, ...],
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._home, self._peers = home, frozenset(peers)
        self._metrics = metrics
        self._log = LimitedLog(log, clock)

    def inbox(self, channel: str, msg: Msg) -> InboxAddress | None:
        """Where to answer a request that came on that channel; None after it was counted."""
        address = reply_inbox(channel, msg.subject, msg.reply, self._home, self._peers)
        if address is None:
            self.drop(channel, msg)
        return address

    def drop(self, channel: str, msg: Msg) -> None:
        """It is not answered."""
        self._metrics.replies_dropped.labels(channel).inc()
        text = "%s: dropped a request of %d bytes: its reply subject %.200r is not allowed"
        self._log.warning(channel, "reply", text, msg.subject, len(msg.data), msg.reply)
