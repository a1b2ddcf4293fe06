"""One attempt's answer as it comes off the bus: order, buffer, flow control.

Frames go in, core events come out; the HTTP side takes bytes. Nothing is given out before the
answer is *startable*: an event stream with its first whole event, or a plain answer that is
complete (or too large to wait for). Until then the attempt can fail and be replaced unseen. Of
an event stream only whole events are given out: an answer that breaks inside an event can then
be ended by an error event that a client can read.

Memory is bounded: the agent sends at most WINDOW_BYTES beyond what was credited, and an answer of
which more than BUFFERED_BYTES_MAX wait for the client is broken off.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isfinite

from mesh.core.model import events as ev
from mesh.core.model.request import Served
from mesh.session.said import Splice
from schemas import exchange, http, wire
from schemas.exchange import FRAME_HEADER, WINDOW_BYTES, Frame, FrameView, Outcome, window_bytes
from schemas.http_statuses import CLIENT_ERRORS, SERVER_ERROR, SUCCESS, TOO_MANY
from schemas.ids import NameInvalid, RegionId, ReplicaId, checked_name
from schemas.passed_headers import as_mapping
from schemas.state import Digest, decode_digest

PLAIN_BYTES_MAX = 1024 * 1024  # a plain answer up to this size is complete before it starts
ERROR_BYTES_MAX = 64 * 1024  # of an engine's error answer that is kept to be passed on
PROGRESS_S = 0.5  # between two progress events to the core
REST_LOOKS = (2, 4, 8, 16)  # at an answer that is silent
DOUBTED = 1  # of a head
ENGINES_FAULT = (Outcome.ENGINE_LOST, Outcome.ENGINE_BROKEN, Outcome.ENGINE_FAILED)
EVENT_STREAM = "text/event-stream"
USUAL_END = b"}\n\n"  # of all events but the last one
EVENT_ENDS = (b"\n\n", b"\n\r\n")
LAST_EVENTS = tuple(line + ending for line in http.DONE_LINES for ending in (b"\n\n", b"\r\n\r\n"))
LAST_BYTES = 4096  # of what was given out that are kept; any last event is shorter
EVENT_BYTES_MAX = 64 * 1024  # of an unfinished event that is held back
JSON = "application/json"
ERROR_EVENT = b'data: {"error"'  # what engines write where they fail inside a stream
CREDIT_BYTES = WINDOW_BYTES // 2  # given out since the last credit, until the next one
PACED_CREDIT_BYTES = 16 * 1024  # at most, over a link, where more than this waits for its turn
HEADS_CACHED = 512  # of at most wire.MESSAGE_BYTES_MAX, usually 50
_DATA = Frame.DATA
_HEADER_BYTES = FRAME_HEADER.size
_frame_header = FRAME_HEADER.pack
BUFFERED_BYTES_MAX = 2 * max(WINDOW_BYTES, PLAIN_BYTES_MAX)  # what an honest agent never reaches


@dataclass(frozen=True, slots=True)
class Held:
    """A peer has the request in its hold queue. `hops`: regions that it has passed."""

    hops: int = 1


class Working:
    """The sender is alive, and has nothing to send yet."""


WORKING = Working()
_nothing: Callable[[bytes], None] = deque[bytes](maxlen=0).append
Message = (
    exchange.Placed
    | exchange.Lost
    | exchange.Refused
    | exchange.Head
    | exchange.End
    | Held
    | Working
    | bytes
)
_ABOUT_PLACE: Mapping[Frame, type] = {
    Frame.PLACED: exchange.Placed,
    Frame.HELD: Held,
    Frame.REFUSED: exchange.Refused,
    Frame.LOST: exchange.Lost,
}


@dataclass(frozen=True, slots=True)
class EngineError:
    """An engine's own error answer."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # its harmless ones


@dataclass(frozen=True, slots=True)
class FramesMissing:
    """Later frames came than this one, which is to be requested."""

    number: int


@dataclass(slots=True, eq=False)
class AnswerReceiver:
    """The answer of attempt number `attempt` of request `key`, from its first frame to its end."""

    key: int
    attempt: int
    inbox: str
    head: exchange.Head | None = None
    passed: Mapping[str, str] = field(default_factory=dict)  # the engine's headers, for the client
    end: exchange.End | None = None
    has_ended: bool = False  # its agent has said so, whatever the outcome
    failed_as: str = ""  # the outcome that its agent named, of an answer that is not whole
    engine_error: EngineError | None = None
    region: RegionId | None = None  # who answers, as soon as it is known
    replica: ReplicaId | None = None
    asked: RegionId | None = None  # the peer that is to place it
    peer_held_s: float = 0.0  # in that peer's hold queue, by its own claim
    fresh: Digest | None = None  # how the region is that refused it
    generates: bool = True  # else it is a prompt's work alone, as an embedding is
    is_event_stream: bool = False  # so that an error event may end it; known with the head
    buffered_bytes: int = 0  # that wait for the client
    taken_bytes: int = 0  # given out
    first_bytes: int = 0  # given out first: up to the first content
    credit_at_bytes: int = CREDIT_BYTES  # given out: then a credit is due
    credited_bytes: int = 0  # as the agent was last granted
    next_number: int = 0  # of the frame that it waits for
    body_sent: bool = False  # in parts, as the agent requested
    keep: Callable[[bytes], None] = _nothing  # what is given out
    splice: Splice | None = None  # it goes on with a stream that broke
    is_broken: bool = False  # it is to go on elsewhere; what it gave out is counted already
    is_wanted: bool = True  # until its attempt is over
    # Of an answer that comes over a link: called when a credit is due, which it sends later.
    pace: Callable[[], None] | None = None
    _chunks: list[bytes] = field(default_factory=list)
    given_out_last: bytes = b""  # the last event of it, or the last LAST_BYTES of several
    _progress_due_at: float = -inf
    _looked_at_bytes: int = 0  # that had been given out then
    _looked_at_number: int = 0
    _silent_looks: int = 0  # in turn
    _is_error: bool = False
    _credit_may_be_lost: bool = False  # its replica waits for something, or has had none yet
    _missing_from: int = -1
    _came_last: int = -1
    _first_window: int = WINDOW_BYTES

    def begin_small(self, first_window: int, pace: Callable[[], None]) -> None:
        """It comes over a link, and its agent is told to send `first_window` bytes at first."""
        self._first_window, self.pace = first_window, pace
        self.credit_at_bytes = first_window // 2

    @property
    def is_between_events(self) -> bool:
        """Whether what was given out ends with a whole event; not inside one too long to hold."""
        return not self.given_out_last or self.given_out_last.endswith(EVENT_ENDS)

    @property
    def has_last_event(self) -> bool:
        """Whether its last event was given out; clients may leave on it."""
        return self.is_event_stream and self.given_out_last.endswith(LAST_EVENTS)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is missing, though its end may be: its last event is here."""
        if self.end is not None or not self.is_event_stream:
            return self.end is not None
        return b"".join((self.given_out_last, *self._chunks)).endswith(LAST_EVENTS)

    @property
    def engine_failure(self) -> str | None:
        """What the engine reported in an error event of its own, with which it ended the stream."""
        failed = self.end is not None and self.end.outcome == Outcome.ENGINE_FAILED
        return self.end.detail if failed and self.end is not None else None

    @property
    def shows_ttft(self) -> bool:
        """Whether its first byte comes when the first token is there, once its head is known."""
        if self.generates or self.head is None:
            return self.is_event_stream
        return self.head.status in SUCCESS

    @property
    def is_startable(self) -> bool:
        """Whether the client may be sent its first byte. Not where the attempt failed before that:
        what came of it is dropped, as another attempt's answer follows."""
        if self.head is None or self._is_error:
            return False
        if self.end is not None:
            return True
        if not self.is_wanted:
            return False
        if self.is_event_stream:
            return bool(self._chunks) and self._whole_bytes(b"".join(self._chunks)) > 0
        return self.buffered_bytes >= PLAIN_BYTES_MAX

    def passing(self, frame: bytes) -> bytes:
        """What a frame brings, if it can be given out as it is; empty if it is to be fed instead.

        Most frames are the next event of a stream that flows, an object of JSON. The last event
        (LAST_EVENTS) is not passed: where the end is in the same parcel, they go out in one write.
        """
        if self._chunks or not frame.startswith(_frame_header(_DATA, self.next_number)):
            return b""
        data = frame[_HEADER_BYTES:]
        if not data.endswith(USUAL_END) or ERROR_EVENT in data:
            return b""
        self.next_number += 1
        self.taken_bytes += len(data)
        self.given_out_last = data
        self.keep(data)
        return data

    def looked_at(self) -> ev.AttemptProgressed | None:
        """The core's event where bytes were given out since the last look."""
        if self.taken_bytes == self._looked_at_bytes:
            return None
        self._looked_at_bytes = self.taken_bytes
        return ev.AttemptProgressed(self.key, self.attempt)

    def may_lack_rest(self) -> bool:
        """Whether its sender is to be asked for what follows, as the last frames may be lost: it
        has begun, and is silent at the second look in turn, the 4th, and so on. To be called every
        PROGRESS_S."""
        is_silent = self.head is not None and self.next_number == self._looked_at_number
        self._looked_at_number = self.next_number
        self._silent_looks = looks = self._silent_looks + 1 if is_silent else 0
        is_asked = self.lacks_frames or (self.pace is not None and self.is_credit_due)
        return looks in REST_LOOKS and self.next_number > 0 and not is_asked

    def take(self) -> bytes:
        """The bytes that may be given out and have not been; empty when there are none."""
        if not self._chunks:
            return b""
        data = b"".join(self._chunks)  # nearly always one: then no copy
        self._chunks.clear()
        if not data.endswith(b"\n\n"):  # nearly always: engines write whole events
            whole = self._whole_bytes(data)
            if whole < len(data):
                self._chunks.append(data[whole:])
                data = data[:whole]
        if ERROR_EVENT in data and self._may_go_on:
            at = data.find(ERROR_EVENT)
            self._chunks.insert(0, data[at:])
            data = data[:at]
        if data:
            if not self.taken_bytes:
                self.first_bytes = len(data)
            self.taken_bytes += len(data)
            self.buffered_bytes -= len(data)
            if self.splice is not None and not (data := self.splice.joined(data)):
                return b""
            self.given_out_last = data[-LAST_BYTES:]
            self.keep(data)
        return data

    @property
    def _may_go_on(self) -> bool:
        """Whether another engine may go on with the stream, if this one fails: an error event of
        the engine's is held back until it is known whether it ends the stream."""
        return self.keep is not _nothing and self.end is None

    def broke(self) -> None:
        """Of a stream that is to go on elsewhere: only whole events of it are given out any more,
        and they are kept now."""
        data = b"".join(self._chunks)
        data = data[: _events_bytes(data)]
        if self.splice is not None:
            data, self.splice = self.splice.joined(data), None
        if data:
            self.keep(data)
        self.keep = _nothing
        self._chunks, self.buffered_bytes = [data] if data else [], len(data)
        self.is_broken = True

    def _whole_bytes(self, data: bytes) -> int:
        """How many of the buffered bytes end with a whole event; all of them in other answers."""
        if not self.is_event_stream or self.end is not None or data.endswith(b"\n\n"):
            return len(data)
        whole = _events_bytes(data)
        is_long = len(data) - whole > EVENT_BYTES_MAX and self.splice is None
        return len(data) if is_long else whole

    @property
    def is_credit_due(self) -> bool:
        """Whether the agent is to be sent a credit, once the taken bytes have left for the client.

        Short answers never need it: half a window must have gone by.
        """
        if self.end is not None:
            return False
        return self._credit_may_be_lost or self._passed_bytes() >= self.credit_at_bytes

    def credit_due(self) -> exchange.Credit | None:
        """The credit that is due, if one is: the agent is taken to have it."""
        return self.next_credit() if self.is_credit_due else None

    def next_credit(self) -> exchange.Credit:
        """The credit that is due."""
        self._credit_may_be_lost = False
        passed = self._passed_bytes()
        step = CREDIT_BYTES
        if self.pace is not None:
            passed = min(passed, self.credited_bytes + PACED_CREDIT_BYTES)
            step = min(PACED_CREDIT_BYTES, window_bytes(self._first_window, passed) // 2)
        self.credited_bytes = passed
        self.credit_at_bytes = passed + step
        return exchange.Credit(self.inbox, passed)

    @property
    def granted_bytes(self) -> int:
        """How far the agent may send, by the last credit."""
        return self.credited_bytes + window_bytes(self._first_window, self.credited_bytes)

    def _passed_bytes(self) -> int:
        """What has left for the client, and what waits for more of the answer."""
        waiting = self.buffered_bytes
        # An event may be longer than a window that begins small. With a splice it is always held.
        if self.is_event_stream and self.splice is None:
            waiting = 0 if self.pace is None else min(waiting, EVENT_BYTES_MAX)
        return self.taken_bytes + min(waiting, PLAIN_BYTES_MAX)

    def feed(self, frame: FrameView, now: float) -> ev.Event | FramesMissing | None:
        """Take in one frame. Returns the core's event, or which frames are missing, if any.

        Raises WireError for frames that no sender of ours makes.
        """
        kind, number, payload = frame
        if kind is not _DATA and (message := _ABOUT_PLACE.get(kind)) is not None:
            decoded = Held(number) if message is Held else wire.decode_as(message, payload)
            return self._about_place(decoded)
        if number != self.next_number:
            return self._out_of_order(number)
        self.next_number = number + 1
        if kind is _DATA:
            return self._data(payload, now)
        if kind is Frame.HEAD:
            return self._head(*_read_head(payload), now)
        if kind is Frame.END:
            self.has_ended = True
            return self._end(wire.decode_as(exchange.End, payload))
        self._credit_may_be_lost = kind is Frame.WORKING
        return self._progressed(now)  # WORKING, or BODY_WANTED, which the edge answers

    def receive(self, message: Message, now: float) -> ev.Event | None:
        """Take in a decoded message, in its order: `feed` for a host without bytes."""
        if isinstance(message, bytes):
            return self._data(message, now)
        if isinstance(message, exchange.Head):
            region, replica = RegionId(message.region), ReplicaId(message.replica)
            return self._head(message, region, replica, {}, now)
        if isinstance(message, exchange.End):
            self.has_ended = True
            return self._end(message)
        return self._progressed(now) if message is WORKING else self._about_place(message)

    def _out_of_order(self, number: int) -> ev.Event | FramesMissing | None:
        """A duplicate, or too early: from a lost frame on, all frames are sent again."""
        self._came_last = max(self._came_last, number)
        if number < self.next_number or self._missing_from == self.next_number:
            return None
        if self.replica is None:  # no sender is known
            return self.lost(self.next_number)
        self._missing_from = self.next_number
        return FramesMissing(self.next_number)

    @property
    def lacks_frames(self) -> bool:
        """Whether a later frame came than the one that it waits for."""
        return self._came_last >= self.next_number

    def unreadable(self) -> ev.Event:
        """A frame of it can't be read."""
        return self._failed("the replica sent a frame that can't be read")

    def lost(self, number: int) -> ev.Event:
        """That frame was requested again in vain."""
        return self._failed(f"frame {number} of the answer was lost", blameless=True)

    def _head(
        self,
        head: exchange.Head,
        region: RegionId,
        replica: ReplicaId,
        passed: Mapping[str, str],
        now: float,
    ) -> ev.Event | None:
        if self.head is not None:
            return self._failed("the answer has two heads")
        self.head = head
        is_client_error = head.status in CLIENT_ERRORS
        is_doubted = is_client_error and head.doubted == DOUBTED
        is_busy = head.status == TOO_MANY
        self._is_error = head.status >= SERVER_ERROR or is_busy or is_doubted
        if self.splice is not None and not head.content_type.startswith(EVENT_STREAM):
            self._is_error = True  # whatever it is: a stream is to go on
        # No error answer is read event by event.
        self.is_event_stream = not self._is_error and head.content_type.startswith(EVENT_STREAM)
        self.region, self.replica, self.passed = region, replica, passed
        return self._progressed(now)

    def _about_place(self, message: object) -> ev.Event | None:
        if isinstance(message, Held):
            if self.replica is not None:  # it was placed: only its replica may answer
                return None
            return ev.AttemptProgressed(self.key, self.attempt)
        if isinstance(message, exchange.Placed):
            self.region, self.replica = place_named(message.region, message.replica)
            self.peer_held_s = message.held_s if isfinite(message.held_s) else 0.0
            return ev.PlacedByPeer(self.key, self.attempt, self.replica)
        if isinstance(message, exchange.Lost):
            place = place_named(message.region, message.replica)
            why = f"replica {place[1]} of region {place[0]} was lost"
            return self._failed(why, blameless=True, replica_lost=True)
        assert isinstance(message, exchange.Refused)
        return self._refused(message)

    def _refused(self, refused: exchange.Refused) -> ev.AttemptRefused:
        region = region_named(refused.region)
        replica = place_named(region, refused.replica)[1] if refused.replica else None
        if self.region is None:  # else it was passed to an agent, which may have refused it
            self.fresh = _digest(refused.digest)
        return ev.AttemptRefused(
            self.key,
            self.attempt,
            refused.reason,
            region,
            replica,
            refused.pending,
            refused.running,
        )

    def _data(self, payload: bytes, now: float) -> ev.Event | None:
        if self.head is None:
            return self._failed("the answer began without its head")
        if self._is_error:
            kept = payload[: ERROR_BYTES_MAX - self.buffered_bytes]
            self.taken_bytes += len(payload) - len(kept)  # so that credit goes on
            payload = kept
        self._chunks.append(payload)
        self.buffered_bytes += len(payload)
        if self.buffered_bytes > BUFFERED_BYTES_MAX:
            return self._failed("the replica sent more than flow control allows")
        is_long = self.splice is not None and self.buffered_bytes > PLAIN_BYTES_MAX
        if is_long and not _events_bytes(b"".join(self._chunks)):
            return self._failed("a stream that goes on has too long an event", blameless=True)
        return self._progressed(now)

    def _end(self, end: exchange.End) -> ev.Event:
        counts = end.prompt_tokens, end.cached_tokens, end.completion_tokens
        if max(counts) > exchange.TOKENS_MAX:  # accounts would add up what nobody computed
            prompt, cached, output = (
                -1 if count > exchange.TOKENS_MAX else count for count in counts
            )
            end = exchange.End(end.outcome, end.detail, prompt, cached, output, end.ttft_s)
        if end.outcome == Outcome.ENGINE_FAILED and self.is_event_stream:
            rest = b"".join(self._chunks)
            at = rest.find(ERROR_EVENT)
            if at >= 0 and (self._may_go_on or not self.taken_bytes):
                self._chunks, self.buffered_bytes = [rest[:at]] if at else [], at
                self.failed_as = end.outcome
                words = rest[at + len(b"data: ") :].split(b"\n", 1)[0].strip()
                self.engine_error = EngineError(SERVER_ERROR, JSON, words, self.passed)
                return ev.AttemptFailed(self.key, self.attempt, end.detail, SERVER_ERROR)
            self.end = end  # the engine's own error event has reached the client, or does soon
            return ev.AnswerEnded(self.key, self.attempt, None)
        if end.outcome != Outcome.DONE:
            self.failed_as = end.outcome
        if end.outcome == Outcome.PREEMPTED:
            return ev.AttemptFailed(self.key, self.attempt, end.outcome, preempted=True)
        if end.outcome != Outcome.DONE:
            blameless = end.outcome not in ENGINES_FAULT
            return self._failed(end.detail or end.outcome, blameless=blameless)
        if self.head is None:
            return self._failed("the answer ended without a head")
        if self._is_error:
            self.engine_error = EngineError(
                self.head.status, self.head.content_type, self.take(), self.passed
            )
            return self._failed(f"the engine answered {self.head.status}", self.head.status)
        self.end = end
        return ev.AnswerEnded(self.key, self.attempt, _served(end), self.shows_ttft)

    def _failed(
        self,
        detail: str,
        status: int | None = None,
        *,
        blameless: bool = False,
        replica_lost: bool = False,
    ) -> ev.Event:
        if self.is_whole:  # only what it cost was lost
            self.end = exchange.End(Outcome.DONE, "", -1, -1, -1, -1.0)
            return ev.AnswerEnded(self.key, self.attempt, None)
        return ev.AttemptFailed(
            self.key,
            self.attempt,
            detail,
            status,
            blameless=blameless,
            replica_lost=replica_lost,
        )

    def _progressed(self, now: float) -> ev.AttemptProgressed | None:
        if now < self._progress_due_at:
            return None
        self._progress_due_at = now + PROGRESS_S
        return ev.AttemptProgressed(self.key, self.attempt)


@lru_cache(HEADS_CACHED)
def _read_head(payload: bytes) -> tuple[exchange.Head, RegionId, ReplicaId, Mapping[str, str]]:
    """A HEAD frame and its sender. Nearly all of a replica's are equal.

    Raises WireError.
    """
    head = wire.decode_as(exchange.Head, payload)
    return head, *place_named(head.region, head.replica), as_mapping(head.headers)


def _events_bytes(data: bytes) -> int:
    """How many of the bytes end with an event's blank line; 0 if none does."""
    found = ((data.rfind(ending), len(ending)) for ending in EVENT_ENDS)
    return max(at + length if at >= 0 else 0 for at, length in found)


def _served(end: exchange.End) -> Served:
    prompt, cached, output = end.prompt_tokens, end.cached_tokens, end.completion_tokens
    return Served(*(None if count < 0 else count for count in (prompt, cached, output)))


def _digest(text: str) -> Digest | None:
    """A refusal counts without its digest; one that can't be read is ignored."""
    try:
        return decode_digest(text.encode()) if text else None
    except wire.WireError:
        return None


def region_named(region: str) -> RegionId:
    """A region that a frame names. Raises WireError for what can't be a token of subjects."""
    try:
        return RegionId(checked_name("region", region))
    except NameInvalid as error:
        raise wire.WireError(str(error)) from error


def place_named(region: str, replica: str) -> tuple[RegionId, ReplicaId]:
    """A replica that a frame names. Raises WireError for names that can't be tokens of subjects."""
    try:
        return region_named(region), ReplicaId(checked_name("replica", replica))
    except NameInvalid as error:
        raise wire.WireError(str(error)) from error
