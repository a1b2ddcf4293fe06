"""What the bus brings, as core events: heartbeats, digests, frames of answers, peers' requests."""

import logging
from collections.abc import Callable

from nats.aio.msg import Msg

from infra.limited_log import LimitedLog
from mesh.adapters.answer import Answer, FramesMissing, place_named
from mesh.adapters.bus import RouterBus, has_headers, is_no_responders
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.missing import MissingFrame, MissingFrames
from mesh.adapters.ticket import Ticket
from mesh.core import events as ev
from mesh.runtime import warm_ups
from mesh.runtime.config import RouterConfig
from mesh.runtime.ingress import Ingress
from mesh.runtime.prompts import PromptReader
from mesh.runtime.tickets import Tickets
from mesh.runtime.work import body_parts
from schemas import exchange, state, subjects, wire
from schemas.exchange import Frame
from schemas.ids import RegionId
from schemas.parcels import PARCEL, unpack_parcel

log = logging.getLogger(__name__)

OTHER = "other"  # of labels that would name what no router of ours knows
NOBODY_LISTENS = "nobody_listens"  # the bus's own answer, beside those of schemas.exchange.Refusal

_REASONS = frozenset((*exchange.Refusal, NOBODY_LISTENS))
_GOES_ON = (ev.AttemptProgressed, ev.PlacedByPeer)

Feed = Callable[[ev.Event], None]


class Hearing:
    """Listens for one router. Bytes that are no message of ours are dropped and logged."""

    def __init__(
        self,
        config: RouterConfig,
        bus: RouterBus,
        tickets: Tickets,
        ingress: Ingress,
        prompts: PromptReader,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        feed: Feed,
    ) -> None:
        self._config = config
        self._bus = bus
        self._tickets = tickets
        self._ingress = ingress
        self._prompts = prompts
        self._metrics = metrics
        self._clock = clock
        self._feed = feed
        self._missing = MissingFrames()
        self._log = LimitedLog(log)

    def hear_heartbeat(self, msg: Msg) -> None:
        """A replica of this region, or of one that it has adopted."""
        if has_headers(msg):
            self._from_nobody("heartbeat", msg)
        else:
            self.read_heartbeat(msg.subject, msg.data)

    def read_heartbeat(self, subject: str, data: bytes) -> None:
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
            self._feed(ev.HeartbeatSeen(beat))

    def hear_digest(self, msg: Msg) -> None:
        """A router of a peer region, or of our own."""
        if has_headers(msg):
            self._from_nobody("digest", msg)
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
            self._feed(ev.DigestSeen(digest))

    def _from_nobody(self, what: str, msg: Msg) -> None:
        text = "%s on %s dropped: it has headers, so no router or agent published it"
        self._log.warning(what, "headers", text, what, msg.subject)

    def hear_answer(self, msg: Msg) -> None:
        """A frame of some answer, alone; or the bus, which knows of nobody who would answer."""
        if msg.headers is not None and is_no_responders(msg.headers):
            ticket = self._tickets.answering(msg.subject)
            if ticket is not None and ticket.answer is not None:
                self._attempt_over(ticket, _nobody_listens(ticket.answer, self._config.region))
        else:
            ticket = self._tickets.answering(msg.subject)
            now = self._clock()
            if ticket is None:
                self._hear_frame(ticket, msg.subject, msg.data, now)
            elif ticket.outlet is None or not ticket.outlet.pass_on(msg.data, now):
                self._hear_frame(ticket, msg.subject, msg.data, now)
                ticket.wake()

    def hear_parcel(self, msg: Msg) -> None:
        """Frames of several answers. Each handler is woken once, when all are heard."""
        inboxes, now = msg.subject.removesuffix(PARCEL), self._clock()
        heard: dict[int, Ticket] = {}
        try:
            for stream, frame in unpack_parcel(msg.data):
                inbox = inboxes + stream
                ticket = self._tickets.answering(inbox)
                if ticket is None:
                    self._hear_frame(ticket, inbox, frame, now)
                elif ticket.outlet is None or not ticket.outlet.pass_on(frame, now):
                    self._hear_frame(ticket, inbox, frame, now)
                    heard[ticket.key] = ticket
        except wire.WireError as error:  # what was in the rest is missed by its numbers
            self._log.warning("parcel", "unreadable", "parcel on %s: %s", msg.subject, error)
        finally:
            for ticket in heard.values():
                ticket.wake()

    def _hear_frame(self, ticket: Ticket | None, inbox: str, data: bytes, now: float) -> None:
        answer = ticket.answer if ticket is not None else None
        try:
            frame = exchange.unpack_frame(data)
            if ticket is None or answer is None:
                self._stray(inbox, frame)
                return
            self._heard(ticket, answer, frame, answer.feed(frame, now))
        except wire.WireError as error:
            self._log.warning("frame", "unreadable", "frame on %s: %.300s", inbox, error)
            if ticket is not None and answer is not None:
                detail = "the replica sent a frame that can't be read"
                self._attempt_over(ticket, ev.AttemptFailed(answer.key, answer.attempt, detail))

    def _heard(
        self,
        ticket: Ticket,
        answer: Answer,
        frame: exchange.FrameView,
        event: ev.Event | FramesMissing | None,
    ) -> None:
        if isinstance(event, FramesMissing):
            self._metrics.frames_missing.inc()
            now = self._clock()
            self._ask_again(self._missing.enter(answer.inbox, event.number, now), now)
            return
        if frame.kind is Frame.BODY_WANTED and not answer.body_sent:
            answer.body_sent = True
            self._send_body(ticket, wire.decode_as(exchange.BodyWanted, frame.payload))
        if event is None:
            pass
        elif isinstance(event, _GOES_ON):
            if not ticket.ask.warm:
                self._count_placed(event, answer)
            self._feed(event)
        else:
            self._attempt_over(ticket, event)
        if not answer.is_event_stream or frame.kind is Frame.WORKING:
            self._bus.give_credit(answer)

    def ask_for_missing(self) -> None:
        """By the tick: what was lost and has still not come."""
        now = self._clock()
        for missing in self._missing.due(now, bus_is_there=self._bus.is_connected):
            self._ask_again(missing, now)

    def _ask_again(self, missing: MissingFrame, now: float) -> None:
        """Ask for what was lost until it comes, or for too long."""
        ticket = self._tickets.answering(missing.inbox)
        answer = ticket.answer if ticket is not None else None
        if ticket is None or answer is None or not answer.misses(missing.number):
            self._missing.drop(missing)
        elif missing.is_lost:
            self._missing.drop(missing)
            self._attempt_over(ticket, answer.lost(missing.number))
        elif self._bus.is_connected:
            self._bus.ask_again(answer, missing.number)
            missing.was_asked_for(now)

    def ask_for_the_rest(self) -> None:
        """The bus was away: of answers that have begun, what came since may be lost."""
        now = self._clock()
        for answer in self._tickets.answers():
            if answer.head is not None:
                self._bus.ask_again(answer, answer.next_number)
                self._missing.asked_anew(answer.inbox, now)

    def _attempt_over(self, ticket: Ticket, event: ev.Event) -> None:
        """Nothing more of this attempt is wanted."""
        answer = ticket.answer
        assert answer is not None
        self._tickets.stop_listening(ticket)
        if ticket.ask.warm:
            self._feed(warm_ups.outcome(ticket, event))
            return
        if isinstance(event, ev.AnswerEnded):
            self._learn(ticket, answer)
        elif isinstance(event, ev.AttemptRefused):
            self._metrics.refusals.labels(event.reason if event.reason in _REASONS else OTHER).inc()
            if event.region != self._config.region:
                self._metrics.forwards.labels(self._known(event.region), "refused").inc()
            if answer.fresh is not None and answer.fresh.region == answer.asked:
                self._feed(ev.DigestSeen(answer.fresh))
        elif isinstance(event, ev.AttemptFailed):
            self._metrics.failures.inc()
            ticket.engine_error = answer.engine_error or ticket.engine_error
            log.info("%s: attempt %d: %s", ticket.ask.request_id, event.attempt, event.detail)
        self._feed(event)

    def _count_placed(self, event: ev.Event, answer: Answer) -> None:
        if isinstance(event, ev.PlacedByPeer) and answer.region is not None:
            self._metrics.forwards.labels(self._known(answer.region), "placed").inc()

    def _known(self, region: RegionId) -> str:
        """That region as a label: whoever sends frames may name any."""
        return region if region in (*self._config.peers, self._config.region) else OTHER

    def _learn(self, ticket: Ticket, answer: Answer) -> None:
        end = answer.end
        if end is None or end.prompt_tokens < 0:
            return
        self._prompts.learn(ticket.ask.model, ticket.size, end.prompt_tokens)
        self._metrics.prompt_tokens.inc(end.prompt_tokens)
        self._metrics.cached_tokens.inc(max(0, end.cached_tokens))

    def _stray(self, inbox: str, frame: exchange.FrameView) -> None:
        """A frame that nobody waits for: whoever sends it should stop."""
        if frame.kind is Frame.PLACED or (frame.kind is Frame.WORKING and frame.payload):
            placed = wire.decode_as(exchange.Placed, frame.payload)
        elif frame.kind is Frame.HEAD:
            head = wire.decode_as(exchange.Head, frame.payload)
            placed = exchange.Placed(head.region, head.replica)
        else:
            return
        subject = subjects.cancel(*place_named(placed.region, placed.replica))
        self._bus.publish(subject, wire.encode(exchange.Cancel(inbox)))

    def _send_body(self, ticket: Ticket, wanted: exchange.BodyWanted) -> None:
        """Whoever wants it may be in a region that we did not ask: sent on by one that we did.

        Raises WireError where it may not go: then this attempt is over.
        """
        assert ticket.answer is not None
        region, replica = place_named(wanted.region, wanted.replica)
        home, ground = self._config.region, self._config.settings.ground
        if not ground.may_hold(region, home, ticket.ask.residency):
            self._metrics.residency_refused.labels("body").inc()
            raise wire.WireError(f"{region} wants a body that may not go there")
        inbox, subject = ticket.answer.inbox, subjects.body(region, replica)
        for payload, headers in body_parts(ticket.ask.body, inbox, self._bus.payload_bytes_max):
            self._bus.publish(subject, payload, headers=headers)

    def hear_ingress(self, msg: Msg, key: int) -> None:
        """A peer asks this region to place a request; `key` is its own from now on."""
        request = self._ingress.read(msg, key, self._clock())
        if request is not None:
            self._feed(ev.RequestArrived(request))


def _nobody_listens(answer: Answer, home: RegionId) -> ev.AttemptRefused:
    # Nothing was begun, so it counts as a refusal: whoever was asked rests until it speaks.
    region, replica = answer.region or home, answer.replica
    return ev.AttemptRefused(answer.key, answer.attempt, NOBODY_LISTENS, region, replica, -1, -1)
