"""Frames of answers, from the bus to the request that they are for, and back to their senders.

Credits, requests to retransmit and cancels go out from here. A frame that no attempt under way
waits for is a stray: its sender gets a cancel, and another one CANCEL_AGAIN_S later if strays still
come, as the bus may lose a cancel like any other message.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from mesh.core.model import events as ev
from mesh.session.answer import PROGRESS_S, AnswerReceiver, FramesMissing, Message, place_named
from mesh.session.record import Bus, Home, Observer, OpenRequest
from schemas import exchange, wire
from schemas.exchange import Frame
from schemas.ids import RegionId, ReplicaId
from schemas.parcels import unpack_parcel

NOBODY_LISTENS = "nobody_listens"  # the bus's own answer, beside those of schemas.exchange.Refusal
_BODY_WANTED, _DATA, _WORKING = Frame.BODY_WANTED, Frame.DATA, Frame.WORKING
_GOES_ON = (ev.AttemptProgressed, ev.PlacedByPeer)
REQUEST_S = 0.5  # after the first request; each wait is twice as long as the one before
REQUESTS_MAX = 3
CANCEL_AGAIN_S = 1.0  # several round trips of a link; what is computed meanwhile is for nobody
CANCELLED_MAX = 1024  # answers whose end has not come; the oldest is forgotten


@dataclass(slots=True)
class RetransmitRequest:
    """Frame `number` of the answer of that inbox."""

    inbox: str
    number: int
    due_s: float
    requests: int = 0

    @property
    def is_lost(self) -> bool:
        """Whether the last request was in vain; of use when it is due."""
        return self.requests >= REQUESTS_MAX

    def was_requested(self, now: float) -> None:
        """Sets when it is due again."""
        self.due_s = now + REQUEST_S * 2**self.requests
        self.requests += 1


class RetransmitRequests:
    """Frames that answers miss: when each is requested again, and when it counts as lost.

    Requested at once, then after 0.5 and 1.5 s, because the request may be lost as well; 2 s after
    that the frame counts as lost. An answer waits for one frame, the next in its order.
    """

    def __init__(self) -> None:
        self._frames: dict[str, RetransmitRequest] = {}

    def __len__(self) -> int:
        return len(self._frames)

    def enter(self, inbox: str, number: int, now: float) -> RetransmitRequest:
        """It is missing from now on, in the place of any other of this answer; due at once."""
        missing = self._frames[inbox] = RetransmitRequest(inbox, number, now)
        return missing

    def drop(self, missing: RetransmitRequest) -> None:
        """It has come, or is not wanted any more."""
        if self._frames.get(missing.inbox) is missing:
            del self._frames[missing.inbox]

    def due(self, now: float, *, bus_is_there: bool) -> list[RetransmitRequest]:
        """What is to be requested, or counts as lost; nothing while the bus is away."""
        if not bus_is_there:
            return []
        return [missing for missing in self._frames.values() if missing.due_s <= now]

    def requested_after_outage(self, inbox: str, now: float) -> None:
        """The bus was away, and what that answer misses was requested: that counts as the first
        request."""
        missing = self._frames.get(inbox)
        if missing is not None:
            missing.requests = 0
            missing.was_requested(now)


class BusReceiver:
    """One session's. What comes to an inbox in `streams` is fed to the answer of its request."""

    def __init__(
        self,
        home: Home,
        streams: Mapping[str, OpenRequest],
        bus: Bus,
        clock: Callable[[], float],
        observer: Observer,
        feed: Callable[[ev.Event], None],
        over: Callable[[OpenRequest, AnswerReceiver, ev.Event], None],
    ) -> None:
        """`over` is called with the event that ends an attempt, `feed` with all others."""
        self._region, _, self._ground = home
        self._bus = bus
        self._clock = clock
        self._observer = observer
        self._feed = feed
        self._over = over
        self.streams = streams
        self._missing = RetransmitRequests()
        self._cancelled: dict[str, tuple[RegionId, ReplicaId, float]] = {}  # where, and when last
        self._look_at = -inf

    @property
    def missing(self) -> int:
        """Answers of which frames were lost and have not come yet."""
        return len(self._missing)

    def receive_frame(self, inbox: str, data: bytes) -> bool:
        """A frame of an answer, alone. False if no attempt under way answers there."""
        record = self.streams.get(inbox)
        if record is None:
            return False
        if record.direct_writer is None or not record.direct_writer.pass_on(data):
            self.take_in(record, data)
        return True

    def take_in(self, record: OpenRequest, data: bytes) -> None:
        """A frame that its direct writer, if there is one, does not pass on."""
        self._frame(record, data, self._clock())
        record.changed()

    def receive_parcel(self, inboxes: str, data: bytes) -> None:
        """Frames of several answers. Each client's side is woken once, when all are here.

        `inboxes`: what their inboxes begin with.
        """
        now = self._clock()
        fed: dict[int, OpenRequest] = {}
        try:
            for stream, frame in unpack_parcel(data):
                record = self.streams.get(inboxes + stream)
                if record is None:
                    self.receive_stray(inboxes + stream, frame)
                elif record.direct_writer is None or not record.direct_writer.pass_on(frame):
                    self._frame(record, frame, now)
                    fed[record.request.key] = record
        except wire.WireError as error:  # what was in the rest is missed by its numbers
            self._observer.unreadable("parcel", "parcel on %s: %s", inboxes, error)
        finally:
            for record in fed.values():
                record.changed()

    def receive(self, inbox: str, message: Message) -> bool:
        """A decoded frame. False if no attempt under way answers there."""
        record = self.streams.get(inbox)
        if record is None:
            return False
        assert record.answer is not None
        event = record.answer.receive(message, self._clock())
        if event is not None:
            self._received(record, record.answer, event)
        record.changed()
        return True

    def receive_stray(self, inbox: str, data: bytes) -> None:
        """A frame that no attempt waits for: its sender gets a cancel."""
        try:
            kind, _, payload = exchange.unpack_frame(data)
            if kind is Frame.PLACED or (kind is Frame.WORKING and payload):
                sender: exchange.Placed | exchange.Head = wire.decode_as(exchange.Placed, payload)
            elif kind is Frame.HEAD:
                sender = wire.decode_as(exchange.Head, payload)
            else:
                self._nameless_stray(inbox, kind)
                return
            self.cancel(*place_named(sender.region, sender.replica), inbox)
        except wire.WireError as error:
            self._unreadable_frame(inbox, error)

    def _nameless_stray(self, inbox: str, kind: Frame) -> None:
        if kind is Frame.END:
            self._cancelled.pop(inbox, None)
        elif (known := self._cancelled.get(inbox)) is not None:
            region, replica, told_at = known
            if self._clock() - told_at >= CANCEL_AGAIN_S:
                self.cancel(region, replica, inbox)

    def cancel(self, region: RegionId, replica: ReplicaId, inbox: str) -> None:
        """That agent's answer is not wanted any more."""
        self._bus.send_cancel(region, replica, inbox)
        self._cancelled.pop(inbox, None)
        if len(self._cancelled) >= CANCELLED_MAX:
            del self._cancelled[next(iter(self._cancelled))]
        self._cancelled[inbox] = region, replica, self._clock()

    def no_subscriber(self, inbox: str) -> bool:
        """The bus reports that a message with this reply subject had no subscriber. False if no
        attempt under way answers there."""
        record = self.streams.get(inbox)
        if record is None or record.answer is None:
            return False
        # Nothing was begun, so it counts as a refusal: that place rests until it reports again.
        answer = record.answer
        place = answer.region or self._region, answer.replica
        event = ev.AttemptRefused(answer.key, answer.attempt, NOBODY_LISTENS, *place, -1, -1)
        self._attempt_over(record, answer, event)
        return True

    def _frame(self, record: OpenRequest, data: bytes, now: float) -> None:
        answer = record.answer
        assert answer is not None
        try:
            frame = exchange.unpack_frame(data)
            kind, _, payload = frame
            event = answer.feed(frame, now)
            if isinstance(event, FramesMissing):
                self._observer.frames_missing()
                self._request_again(self._missing.enter(answer.inbox, event.number, now), now)
                return
            if kind is _BODY_WANTED and not answer.body_sent:
                answer.body_sent = True
                if why_not := self._send_body(record, answer, payload):
                    failed = ev.AttemptFailed(answer.key, answer.attempt, why_not)
                    self._attempt_over(record, answer, failed)
                    return
            if event is not None:
                self._received(record, answer, event)
            if kind is _DATA:
                if not answer.is_event_stream or answer.pace or answer.splice:
                    self.give_credit(answer)
            elif kind is _WORKING:
                self.give_credit(answer)
        except wire.WireError as error:
            self._unreadable_frame(answer.inbox, error)
            self._attempt_over(record, answer, answer.unreadable())

    def _unreadable_frame(self, inbox: str, error: wire.WireError) -> None:
        self._observer.unreadable("frame", "frame on %s: %.300s", inbox, error)

    def _received(self, record: OpenRequest, answer: AnswerReceiver, event: ev.Event) -> None:
        if not isinstance(event, _GOES_ON):
            self._attempt_over(record, answer, event)
            return
        if isinstance(event, ev.PlacedByPeer) and answer.region:
            self._observer.placed_by_peer(record, answer)
        self._feed(event)

    def _attempt_over(self, record: OpenRequest, answer: AnswerReceiver, event: ev.Event) -> None:
        """An agent that has not ended its answer itself gets a cancel."""
        goes_on = not (answer.has_ended or isinstance(event, ev.AttemptRefused))
        if goes_on and answer.region is not None and answer.replica is not None:
            self.cancel(answer.region, answer.replica, answer.inbox)
        self._over(record, answer, event)

    def _send_body(self, record: OpenRequest, answer: AnswerReceiver, payload: bytes) -> str:
        """To an agent that requests the body's parts, perhaps of a region that we did not choose.

        Returns why it may not go there, empty where it may; then this attempt is over, by the fault
        of whoever sent the request on to there. Raises WireError where no such agent can be.
        """
        wanted = wire.decode_as(exchange.BodyWanted, payload)
        region, replica = place_named(wanted.region, wanted.replica)
        if not self._ground.may_hold(region, self._region, record.request.residency):
            self._observer.residency_refused("body")
            return f"{region} wants a body that may not go there"
        inbox, streams = answer.inbox, self.streams

        def is_wanted() -> bool:
            return streams.get(inbox) is record

        if not self._bus.send_body(record, region, replica, inbox, is_wanted):
            raise wire.WireError(f"{region} wants a body and is no peer")
        return ""

    def give_credit(self, answer: AnswerReceiver) -> bool:
        """Send the agent a credit if one is due, and say whether it is; over a link it is sent when
        there is room on it."""
        if answer.region is None or answer.replica is None:
            return False
        if answer.pace is not None:
            if is_due := answer.is_credit_due:
                answer.pace()
            return is_due
        credit = answer.credit_due()
        if credit is None:
            return False
        self._bus.send_credit(answer.region, answer.replica, credit)
        return True

    def tick(self) -> None:
        """Request again what was lost and has still not come, and what may be lost; tell the core
        which streams flow."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + PROGRESS_S
            for record in list(self.streams.values()):
                if (answer := record.answer) is None:
                    continue
                if answer.may_lack_rest() and self._bus.is_connected:
                    self._request_rest(answer)
                # Those that no frame is fed of.
                if record.direct_writer is not None and (event := answer.looked_at()) is not None:
                    self._feed(event)
        for missing in self._missing.due(now, bus_is_there=self._bus.is_connected):
            self._request_again(missing, now)

    def bus_returned(self) -> None:
        """Request what came while the bus was away, of answers that have begun."""
        for record in self.streams.values():
            if record.answer is not None and record.answer.head is not None:
                self._request_rest(record.answer)

    def link_returned(self, region: RegionId) -> None:
        """The same of that region's answers: the link to it was lost for a moment."""
        self._bus.link_returned(region)
        for record in self.streams.values():
            if record.answer is not None and record.answer.region == region:
                self._request_rest(record.answer)

    def _request_rest(self, answer: AnswerReceiver) -> None:
        self._send_again(answer, answer.next_number)
        self._missing.requested_after_outage(answer.inbox, self._clock())

    def _request_again(self, missing: RetransmitRequest, now: float) -> None:
        """Request what was lost, until it comes or counts as lost."""
        record = self.streams.get(missing.inbox)
        answer = record.answer if record is not None else None
        if record is None or answer is None:
            self._missing.drop(missing)
        elif answer.next_number != missing.number:  # it came
            self._missing.drop(missing)
            if answer.lacks_frames:  # of those that were sent again after it, too
                number = answer.next_number
                self._request_again(self._missing.enter(missing.inbox, number, now), now)
        elif missing.is_lost:
            self._missing.drop(missing)
            self._attempt_over(record, answer, answer.lost(missing.number))
        elif self._bus.is_connected:
            self._send_again(answer, missing.number)
            missing.was_requested(now)

    def _send_again(self, answer: AnswerReceiver, number: int) -> None:
        if answer.region is not None and answer.replica is not None:
            credit = exchange.Credit(answer.inbox, answer.credited_bytes, number)
            self._bus.send_credit(answer.region, answer.replica, credit)
