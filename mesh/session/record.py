"""One request that is open at this router, and what the session needs of its host.

A client's request and a peer's are the same record: a peer's has `answer_inbox` in its
`request`, so that its answer goes straight to the asking router.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Request
from mesh.core.model.served_names import model_of
from mesh.session.answer import AnswerReceiver, EngineError, Held
from mesh.session.body_model import ModelPlace, with_model
from mesh.session.cost import NOTHING, Cost
from mesh.session.said import Said, Splice
from schemas import exchange
from schemas.decision import Decision
from schemas.engine_routes import PLAIN_PATHS
from schemas.held import PromptBlocks
from schemas.http import CHAT, Fault
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.residency import OPEN_GROUND, Ground
from schemas.response_calls import ResponseCall


class Trace:
    """The spans of one request; this one is in no trace.

    Its methods are called where it `is_traced`. A request that `is_recording` is sampled: its
    receipts are to have their candidates.
    """

    __slots__ = ()
    is_traced = False
    is_recording = False
    quiet_s: float = 0.0  # `end` has nothing to do for a request that ended well and sooner
    trace_id = ""  # in hexadecimal

    def dispatched(self, effect: fx.Dispatch | fx.Forward, headers: dict[str, str]) -> None:
        """An attempt leaves for the bus; the trace context is added to `headers`."""

    def prefill_dispatched(self, effect: fx.Dispatch, headers: dict[str, str]) -> None:
        """An attempt's prefill stage leaves for the bus; `headers` as above."""

    def prefill_ended(self, attempt: int, event: ev.Event | None) -> None:
        """An attempt's prefill stage ended so; None: it was cancelled."""

    def end(self, record: "OpenRequest", ending: "Ending") -> None:
        """The request is over."""


NO_TRACE = Trace()


class DirectWriter(Protocol):
    """Writes frames of an answer that has begun to its client."""

    def pass_on(self, frame: bytes) -> bool:
        """Write what a frame brings. False: feed it to the answer, and call `changed`."""


def nobody_waits() -> None:
    """The `changed` and `fell_silent` of a request that no client of this router sent."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer, or no more of it. `held_since`: if it ended in the hold queue."""

    fault: Fault
    message: str
    retry_after_s: float | None = None
    held_since: float | None = None


# Of one request: attempts are bounded, each is held at most once before it, and on a pair it has
# the end of its prefill stage.
STEPS_MAX = 32
StepKind = fx.Decided | ev.AttemptRefused | ev.AttemptFailed | ev.PrefillEnded | exchange.Placed


class Step(NamedTuple):
    """Something that happened to a request, by the event loop's clock.

    `outcome`: of an attempt that failed, as its agent named it; empty where none did.
    """

    at: float
    what: StepKind
    outcome: str = ""


Numbers = tuple[int, int, int, float]  # prompt, cached and output tokens, TTFT at the agent
UNKNOWN: Numbers = -1, -1, -1, -1.0


class Ending(NamedTuple):
    """How a request ended, and all that is told of it afterwards: no prompt, and no key.

    It is set once, by `Session.end`, of a peer's request where it is placed or refused; whoever
    tells of the request reads it: the access log, metrics, spans and the requests that are kept.
    Those refused before they are admitted have one by `EndedRequests.refused`. Times are seconds on
    the event loop's clock; -1 and "" where unknown.
    """

    outcome: str
    status: int = 0  # of HTTP; 0 of a peer's request, which this router does not answer
    error_type: str = ""  # the kind of error where it is one, of a few
    detail: str = ""  # for people
    ended_at: float = 0.0
    request: str = ""
    trace: str = ""
    method: str = ""
    route: str = ""
    model: str = ""
    asked: str = ""  # what its client asked for, if that is not `model`
    tenant: str = ""
    origin: str = ""  # the region that asked; "" for a client of this router
    region: str = ""  # that served
    replica: str = ""
    peer_held_s: float = 0.0
    numbers: Numbers = UNKNOWN
    cost: Cost = NOTHING  # of a client's request, where it was asked
    sent_bytes: int = 0
    is_stream: bool = False
    is_copy: bool = False
    fault: str = ""  # code of the error that the router answered with
    arrived_at: float = 0.0
    started_at: float | None = None  # its first byte
    decided: fx.Decided | None = None  # the last one
    steps: tuple[Step, ...] = ()


@dataclass(slots=True, kw_only=True)
class OpenRequest:
    """From its arrival at this router to its end. Hosts derive theirs.

    `received`: a peer's headers, which go on to the agent. `body`: empty where a peer's comes in
    parts, and once nobody needs it any more.
    """

    request: Request
    path: str = CHAT  # the HTTP path that is requested of the engine
    adds_usage: bool = False  # an agent may add `stream_options` to its body
    for_engine: Mapping[str, str] | None = None  # of its headers, by their names on the bus
    keeper: ReplicaId | None = None  # the replica that has what it goes on with, or is about
    call: ResponseCall | None = None  # what is asked about it, without model and body
    body: bytes = b""
    model_place: ModelPlace | None = None  # in its body, if it was mapped to another model
    tenant: str | None = None  # whose API key it has; empty: nobody's; None: no keys are listed
    spans: Trace = NO_TRACE
    received: Mapping[str, str] = field(default_factory=dict)
    kept_bytes: int = 0  # that its body takes of the memory for bodies
    answer: AnswerReceiver | None = None  # of the attempt under way
    said: Said | None = None  # of a stream that may go on elsewhere if it breaks
    why_not: str = ""  # for people, of a stream that may not
    splice: Splice | None = None  # once it broke: joins the next answers to what was said
    decided: fx.Decided | None = None  # the last one
    steps: tuple[Step, ...] = ()  # the first STEPS_MAX, as its observer notes
    failure: Failure | None = None
    engine_error: EngineError | None = None  # of the last attempt that had one
    pass_engine_error: bool = False
    changed: Callable[[], None] = nobody_waits  # call it when there may be more for the client
    fell_silent: Callable[[], None] = nobody_waits  # call it when its stream is silent for long
    direct_writer: DirectWriter | None = None  # while it may write what comes at once
    stage_of: "OpenRequest | None" = None  # this is a prefill stage of that request
    kv_room: int = 0  # of its attempt on a pair
    kv_params: str = ""  # what the prefill engine of its attempt handed out, as JSON
    ending: Ending | None = None  # once it is over

    @property
    def method(self) -> str:
        """Of HTTP."""
        return "POST" if self.call is None else self.call.method

    def retarget(self, model: ModelId) -> None:
        """That model serves it, by its served name; the body says so."""
        self.request = replace(self.request, model=model)
        if self.model_place is not None:
            name = model if self.path in PLAIN_PATHS else model_of(model)
            self.body, self.model_place = with_model(self.body, self.model_place, name)

    @property
    def decision(self) -> Decision | None:
        """The receipt of the last placement."""
        return None if self.decided is None else self.decided.decision

    def ending_at(
        self, at: float, outcome: str, status: int = 0, error_type: str = "", detail: str = ""
    ) -> Ending:
        """What is told of it if it ends so, at that time; a peer's is placed here, or refused."""
        request, decision = self.request, self.decision
        replica = "" if decision is None else decision.replica or ""
        return Ending(
            outcome,
            status,
            error_type,
            detail,
            at,
            request=request.request_id,
            trace=self.spans.trace_id,
            route="ingress",
            model=model_of(request.model),
            origin=request.origin,
            region="" if decision is None or not replica else decision.region,
            replica=replica,
            # Its own arrival was at home; it is decided on as soon as it is here.
            arrived_at=self.steps[0].at if self.steps else at,
            decided=self.decided,
            steps=self.steps,
        )


class Home(NamedTuple):
    """Whose session it is: one router, or batch runner, of a region. `ground`: of all regions."""

    region: RegionId
    router: RouterId
    ground: Ground = OPEN_GROUND


class Identifiers(NamedTuple):
    """`secret` makes tokens that nobody can guess, `keys` numbers that no request has had."""

    secret: Callable[[], str]
    keys: Iterator[int]


class Bus(Protocol):
    """Messages out, in order and without waiting. False: the message is not sent."""

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached at this moment."""

    def send_work(
        self,
        record: OpenRequest,
        region: RegionId,
        replica: ReplicaId,
        inbox: str,
        headers: dict[str, str],
    ) -> bool:
        """The request to an agent, which answers to `inbox`."""

    def send_ingress(
        self, record: OpenRequest, peer: RegionId, inbox: str, headers: dict[str, str]
    ) -> bool:
        """The request to a peer region, to be placed there."""

    def send_body(
        self,
        record: OpenRequest,
        region: RegionId,
        replica: ReplicaId,
        inbox: str,
        is_wanted: Callable[[], bool],
    ) -> bool:
        """Its body in parts, as the agent requested them, while it `is_wanted`: until its attempt
        is over. False if that region is neither home nor a peer."""

    def send_blocks(self, region: RegionId, replica: ReplicaId, blocks: PromptBlocks) -> None:
        """Block hashes of a prompt that was sent there."""

    def send_cancel(self, region: RegionId, replica: ReplicaId, inbox: str) -> None:
        """The answer to that inbox is not wanted any more."""

    def send_credit(self, region: RegionId, replica: ReplicaId, credit: exchange.Credit) -> None:
        """How far an answer's client has got, or from which frame on it is to be sent again."""

    def link_returned(self, region: RegionId) -> None:
        """The link to that region was lost for a moment."""

    def answer_peer(
        self, inbox: str, message: exchange.Placed | exchange.Lost | exchange.Refused | Held
    ) -> None:
        """What has become of a peer's request."""


class Observer:
    """Counts and logs; this one does nothing. Called for what clients and operators can see."""

    def decided(self, record: OpenRequest, effect: fx.Decided) -> None:
        """A placement was made."""

    def handed_out(self, key: int, region: RegionId) -> None:
        """A request of this host's own goes out, to a replica here or to that peer."""

    def body_dropped(self, kept_bytes: int) -> None:
        """A request's body of that size is no longer kept."""

    def placed_by_peer(self, record: OpenRequest, answer: AnswerReceiver) -> None:
        """A peer found a place for a forwarded request, and `answer` names it."""

    def refused(self, record: OpenRequest, event: ev.AttemptRefused) -> None:
        """An attempt was not taken."""

    def attempt_failed(self, record: OpenRequest, event: ev.AttemptFailed) -> None:
        """An attempt was lost, or failed."""

    def prefill_ended(self, record: OpenRequest, event: ev.PrefillEnded) -> None:
        """The prefill replica of an attempt on a pair has computed the prompt."""

    def served(self, record: OpenRequest, end: exchange.End) -> None:
        """An engine's whole answer is here, with its counts of tokens."""

    def frames_missing(self) -> None:
        """Frames of an answer were lost, and are requested again."""

    def residency_refused(self, asker: str) -> None:
        """A request may not go where it would have to: of a `client`, a `peer`, or its `body`."""

    def request_ended(self, record: OpenRequest, ending: Ending) -> None:
        """A request is over. A peer's: it is placed here, or refused, with the reason as detail."""

    def unreadable(self, what: str, text: str, *args: object) -> None:
        """A message can't be read."""


# A router's core, or a batch runner's, which has more events and effects.
Decide = Callable[[Any, float], Sequence[object]]
