"""Messages from the bus to a router: answers, states of replicas and regions.

Each is read and checked; a malformed or forged one is dropped with a warning. Peers' requests are
in `peer_requests`.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from nats.aio.msg import Msg

from infra.process import LimitedLog
from mesh.adapters.bus import (
    RouterBus,
    has_headers,
    is_no_responders,
)
from mesh.core.model import events as ev
from mesh.core.model.served_names import with_fields
from mesh.session.session import Session
from schemas import state, subjects, wire
from schemas.held import HeldDelta, HeldPart
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.parcels import PARCEL
from schemas.replies import PING_PREFIX

log = logging.getLogger(__name__)


class Process(Protocol):
    """A router or batch runner."""

    @property
    def region(self) -> RegionId: ...
    @property
    def router(self) -> RouterId: ...
    @property
    def peers(self) -> tuple[RegionId, ...]: ...


TakeControl = Callable[[str, Msg], bool]  # of an inbox's last token; False: it is not for this one


class RequestMessages:
    """One router's or batch runner's; what is received goes to its session."""

    def __init__(self, config: Process, session: Session, bus: RouterBus) -> None:
        self.session = session
        self._config = config
        self._bus = bus
        self._streams = session.answers.streams
        self._log = LimitedLog(log)
        self._parcels = subjects.inbox(config.region, config.router, PARCEL)
        self.takers: list[TakeControl] = []  # of what comes to inboxes that are no answer's

    def receive_answer(self, msg: Msg) -> None:
        """Something for an inbox of this router: nearly always the bytes of some answer."""
        record = self._streams.get(msg.subject)
        if record is None or msg.headers is not None:
            self._receive_unusual(msg, msg.subject)
            return
        writer = record.direct_writer  # as `receive_frame`, for every token
        if writer is None or not writer.pass_on(msg.data):
            self.session.answers.take_in(record, msg.data)

    def _receive_unusual(self, msg: Msg, subject: str) -> None:
        """Frames of several answers, a message with headers, or one that is no answer's."""
        if subject == self._parcels:
            self.session.answers.receive_parcel(subject.removesuffix(PARCEL), msg.data)
            return
        answers = self.session.answers
        has_no_subscriber = is_no_responders(msg.headers)
        if has_no_subscriber:
            if answers.no_subscriber(subject):
                return
        elif answers.receive_frame(subject, msg.data):
            return
        token = subject.rpartition(".")[2]
        if token.startswith(PING_PREFIX):
            if has_no_subscriber:
                self._bus.paced_links.unanswered(token)
            elif self._bus.paced_links.passed(token, msg.data):
                return
        is_taken = any(take(token, msg) for take in self.takers)
        if not is_taken and not has_no_subscriber:
            answers.receive_stray(subject, msg.data)

    def receive_heartbeat(self, msg: Msg) -> None:
        """A replica of this region, or of one that it has adopted."""
        if has_headers(msg):
            self._drop_with_headers("heartbeat", msg)
        else:
            self.read_heartbeat(msg.subject, msg.data)

    def read_last_heartbeat(self, subject: str, data: bytes) -> None:
        """A replica's last one, out of the stream: what it said of its next one may be long ago."""
        self.read_heartbeat(subject, data, is_last=True)

    def read_heartbeat(self, subject: str, data: bytes, *, is_last: bool = False) -> None:
        """A heartbeat and the subject that it was published on, which only its replica may."""
        try:
            beat = state.decode_heartbeat(data)
        except wire.WireError as error:
            self._log.warning("heartbeat", "unreadable", "heartbeat dropped: %.300s", error)
            return
        if subject != subjects.heartbeat(beat.region, beat.replica):
            text = "heartbeat on %s dropped: it names another replica"
            self._log.warning("heartbeat", "another", text, subject)
        elif beat.region == self._config.region or beat.region in self._config.peers:
            if is_last and beat.next_within_s is not None:
                beat = with_fields(beat, next_within_s=None)
            self.session.feed(ev.HeartbeatSeen(beat))

    def receive_held(self, msg: Msg) -> None:
        """What a replica's engine holds of prompts: the subject names the replica."""
        if has_headers(msg):
            self._drop_with_headers("held", msg)
            return
        try:
            message = wire.decode(msg.data)
        except wire.WireError as error:
            self._log.warning("held", "unreadable", "%s dropped: %.300s", msg.subject, error)
            return
        replica = ReplicaId(msg.subject.split(".")[3])
        if isinstance(message, HeldDelta):
            self.session.feed(ev.HeldDeltaSeen(replica, message))
        elif isinstance(message, HeldPart):
            self.session.feed(ev.HeldPartSeen(replica, message))

    def receive_digest(self, msg: Msg) -> None:
        """A router of a peer region, or of our own."""
        if has_headers(msg):
            self._drop_with_headers("digest", msg)
            return
        try:
            digest = state.decode_digest(msg.data)
        except wire.WireError as error:
            self._log.warning("digest", "unreadable", "digest dropped: %.300s", error)
            return
        if digest.region != subjects.owner(msg.subject):
            text = "digest on %s dropped: it names another region"
            self._log.warning("digest", "another", text, msg.subject)
        elif digest.region in self._config.peers:
            self.session.feed(ev.DigestSeen(digest))

    def _drop_with_headers(self, what: str, msg: Msg) -> None:
        text = "%s on %s dropped: it has headers, so no router or agent published it"
        self._log.warning(what, "headers", text, what, msg.subject)
