"""What a router answers about requests that it has, or had, to people who look into one: as JSON.

A question names one request, by its id or its trace's, or wants the slowest or the latest ones.
Every router that is asked answers with what it still keeps; none of it holds a prompt or a key.
Times are seconds since 1970 by that router's host's clock: between hosts they differ by as much as
the clocks do.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import orjson
from pydantic import Field, JsonValue

from schemas.control import DRAINED_MAX
from schemas.decision import Decision
from schemas.ids import ValidRegionId, ValidRouterId
from schemas.json_messages import STATE_BYTES_MAX, decoder
from schemas.numbers import Count, Seconds

ID_CHARS_MAX = 128
QUESTION_BYTES_MAX = 1024
ANSWER_BYTES_MAX = STATE_BYTES_MAX
LIVES_MAX = 8  # of one id: clients may use one again
SLOWEST_MAX = 50
RECENT_MAX = 50
COUNTED_S = 60.0  # back to which the latest requests are counted
COUNTED_MAX = 2000  # requests, of one router; that many TTFTs are some 12 KB
FLOWS_MAX = 257  # places that serve: regions, and none
TENANTS_MAX = 16
OTHERS = "*"  # tenants that are not named; no tenant's name
REFUSED_CHARS_MAX = 500
OPEN = "open"  # the outcome of a request that is under way

Text = Annotated[str, Field(max_length=256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestQuestion:
    """What a person asks about: exactly one of these is given."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    request: Annotated[str, Field(min_length=1, max_length=ID_CHARS_MAX)] | None = None
    """The id in `x-request-id`, or a trace id."""
    slowest: Annotated[int, Field(ge=1, le=SLOWEST_MAX)] | None = None
    """So many of the clients' requests that failed, whose stream broke and went on elsewhere, or
    that had to wait longest."""
    recent: Annotated[int, Field(ge=1, le=RECENT_MAX)] | None = None
    """So many of the clients' requests that ended last, without their steps, and counts of all
    those of the last minute. Routers of the version before do not answer it."""
    routing: Literal[True] | None = None
    """No requests, but by which choices the router places them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeStep:
    """Something that happened to a request at this router."""

    at: Seconds
    """When, in seconds since 1970."""
    what: Literal["decided", "refused", "failed", "placed"]
    """A decision of this router; an attempt that was refused or failed; a peer's placement."""
    decision: Decision | None = None
    """The receipt, of a decision."""
    region: Text | None = None
    """Who refused it, or placed it."""
    replica: Text | None = None
    """Who refused it, or answers."""
    held_s: Seconds | None = None
    """Seconds in that peer's hold queue."""
    detail: Text | None = None
    """Why it was refused or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLife:
    """One request at one router, from its arrival to its end."""

    request: Text
    """The id in `x-request-id`."""
    trace: Text | None = None
    """The id of its trace."""
    region: ValidRegionId
    """The router's region."""
    router: ValidRouterId
    origin: Text | None = None
    """The region that forwarded it here; null of a client of this router."""
    method: Text | None = None
    route: Text
    status: Count | None = None
    """The answer's HTTP status; 499: the client left before its end. Null of a peer's request."""
    outcome: Text
    """ok, failed, shed, refused, client_gone, engine_failed; of a peer's placed or refused; open
    while it is under way."""
    model: Text | None = None
    asked_model: Text | None = None
    """What the client asked for, where mesh.toml maps that to another model."""
    is_copy: bool = False
    """Whether it is a copy whose answer was dropped."""
    tenant: Text | None = None
    served_by_region: Text | None = None
    served_by_replica: Text | None = None
    peer_held_s: Seconds = 0.0
    """In the hold queue of the peer that placed it, by that peer's claim, in seconds."""
    agent_ttft_s: Seconds | None = None
    """From the work's arrival at the agent to the answer's first byte there, in seconds."""
    prefill_replica: Text | None = None
    """The replica that computed the prompt for the one that answers; null where that one did."""
    prefill_s: Seconds | None = None
    """From the last dispatch to the end of the prompt's computation at `prefill_replica`, seconds.
    Null where there is no such replica, or it had not ended before the first byte."""
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    output_tokens: Count | None = None
    sent_bytes: Count = 0
    """Of the answer's body."""
    is_stream: bool = False
    fault: Text | None = None
    """The code of the error that this router answered with."""
    detail: Text | None = None
    """Why it failed or was refused."""
    arrived_at: Seconds
    started_at: Seconds | None = None
    """When its client was sent the first byte."""
    ended_at: Seconds | None = None
    steps: tuple[LifeStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFlow:
    """Clients' requests of one router that ended lately and were served in one region."""

    served_by_region: Text | None = None
    """Null of those that no region served."""
    requests: Count
    failed: Count
    """Of them: shed, refused, failed; not those whose client left."""
    ttft_s: Annotated[tuple[Seconds, ...], Field(max_length=COUNTED_MAX)] = ()
    """Of each streamed answer, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantWork:
    """What waits at one router of one tenant, and what was computed lately for it there."""

    tenant: Text
    """Empty: of requests that have none; `*`: of all that are not named."""
    waiting: Count = 0
    """Requests in the router's hold queue, at this moment."""
    tokens: Count = 0
    """Of requests of its clients that ended within `counted_s`: prompt tokens that were not cached,
    and twice the answers' tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingInForce:
    """By which choices a router places requests now."""

    orders: Annotated[int, Field(ge=-1)]
    """Number of the operators' record that it has read last; 0: there is none, -1: none was read
    yet."""
    ordered: dict[str, JsonValue] = field(default_factory=dict)
    """The keys of `[routing]` that it follows by an operator's order."""
    in_force: dict[str, JsonValue] = field(default_factory=dict)
    """All that can be ordered, as it holds now: by order, command line, mesh.toml or default."""
    refused: Annotated[str, Field(max_length=REFUSED_CHARS_MAX)] | None = None
    """Why it does not follow the routing of that record; null if it does."""
    drained: Annotated[tuple[str, ...], Field(max_length=DRAINED_MAX)] = ()
    """Replicas that it holds for drained by orders; `*` alone: all of the region."""
    orders_lost: bool = False
    """Whether the stream has these orders no longer, and this router keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRequests:
    """What one router has of the requests that were asked for."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    region: ValidRegionId
    router: ValidRouterId
    kept: Count
    """How many ended requests it keeps at present."""
    since: Seconds | None = None
    """When the oldest of them ended, in seconds since 1970; null while there is none."""
    requests: tuple[RequestLife, ...] = ()
    left_out: Count = 0
    """Found, and left out because the answer would be too large."""
    flows: Annotated[tuple[RequestFlow, ...], Field(max_length=FLOWS_MAX)] = ()
    """The requests of the last `counted_s` by where they were served; for the latest ones only."""
    routing: RoutingInForce | None = None
    """How it places requests; for that question only."""
    counted_s: Seconds | None = None
    """How far back `flows` count, in seconds; null where they were not asked for."""
    tenants: Annotated[tuple[TenantWork, ...], Field(max_length=TENANTS_MAX)] = ()
    """Tenants with most requests waiting, then with most work; for the latest requests only."""


def encode_question(question: RequestQuestion) -> bytes:
    return orjson.dumps(question)


def encode_answer(answer: RouterRequests, bytes_max: int = ANSWER_BYTES_MAX) -> bytes:
    """Its JSON, of at most `bytes_max`: what does not fit is left out, the first ones first."""
    while len(data := orjson.dumps(answer)) > bytes_max and answer.requests:
        kept = answer.requests[(len(answer.requests) + 1) // 2 :]
        left_out = answer.left_out + len(answer.requests) - len(kept)
        answer = replace(answer, requests=kept, left_out=left_out)
    return data


decode_question = decoder(RequestQuestion)
decode_answer = decoder(RouterRequests)
