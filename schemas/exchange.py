"""One request's life on the bus: work out, frames back, cancel, credit, body parts.

A router publishes the client's body, untouched, on a replica's work subject with the headers
named here and its answer inbox as reply subject. The agent streams *frames* to that inbox:

    byte 0       kind, one of `Frame`
    bytes 1..4   number of the frame within this answer, big-endian, from 0
    bytes 5..    DATA: the engine's bytes as they came; other kinds: one `schemas.wire` message

Frames are numbered because core NATS may drop messages when a reader is slow, and links and
servers fail: no client may receive a text with a gap. A router that finds a gap requests with a
Credit what it misses, and ignores numbers that it has had.

A normal answer is HEAD DATA* END. Before HEAD there may be one BODY_WANTED (the agent asks for a
body too large for one message). REFUSED ends it at once: place the request elsewhere. WORKING,
which names the agent (nothing, from older agents), breaks a silence of WORKING_S: a router that
receives nothing for SILENCE_S_MAX gives the answer up, so a lost END or a hung agent can't hold a
client. DATA breaks it only once the router has sent a credit: one that lost what named the agent
learns whom to cancel.
PLACED, HELD, REFUSED and LOST may also come from a peer's router, outside the numbering: which
replica answers a forwarded request, that it waits there (again every HELD_S), that none will, or
that the replica that answered is gone. Their number is 0; HELD's is how many regions the request
has passed (1; more only where an older router forwarded a peer's request). The inbox subject is the
name of the answer in `Cancel`, `Credit` and `BodyPart`. Frames that an agent has for several
answers of one router at one moment share a message: `schemas.parcels`.
"""

import struct
from enum import IntEnum, StrEnum
from typing import NamedTuple

from schemas.wire import WireError, WireMessage, wire_message

# Headers of work and ingress messages.
H_REQUEST = "Mesh-Request"  # request id
H_MODEL = "Mesh-Model"  # encoded by subjects.encode_model: header values must be plain ASCII
H_PATH = "Mesh-Path"  # HTTP path at the engine, e.g. /v1/chat/completions
H_ATTEMPT = "Mesh-Attempt"  # 1 for the first placement
H_FROM = "Mesh-From"  # the router that handed off, a router of the region that owns the replica
H_HANDOFF = "Mesh-Handoff"  # its number, rising for each replica: see Heartbeat.taken
H_PREFILL_TOKENS = "Mesh-Prefill-Tokens"  # of the prompt, to be computed, by the router's estimate
H_DEADLINE_MS = "Mesh-Deadline-Ms"  # time left when sent; clocks of two hosts never meet
H_WINDOW = "Mesh-Window"  # how far its answer may run ahead at first; WINDOW_BYTES when missing
H_BODY_BYTES = "Mesh-Body-Bytes"  # set when the body is to be fetched in parts
H_WAITED_MS = "Mesh-Waited-Ms"  # since it arrived: decides its place in a peer's queue
H_HELD_MS = "Mesh-Held-Ms"  # of those, in other regions' queues: attempts that failed don't count
H_HOPS = "Mesh-Hops"  # regions passed so far: 1; more only from an older router
H_ORIGIN = "Mesh-Origin"  # region whose client asks
H_PRIORITY = "Mesh-Priority"  # a Priority; normal when missing
H_SLO_TTFT_MS = "Mesh-Slo-Ttft-Ms"  # after it the client has no use for a first token
H_TENANT = "Mesh-Tenant"  # by its API key: it shares prefixes with no other tenant's prompts
H_KEY_ID = "Mesh-Key-Id"  # of that key: not the key, which never leaves its router
H_SESSION = "Mesh-Session"  # the conversation that it is part of, if the client names one
H_TERM = "Mesh-Term"  # of the lease by which the router's region owns the replica
H_OWNER = "Mesh-Owner"  # the region that hands off a replica's work when it is not the replica's
H_MAY_QUEUE = "Mesh-May-Queue"  # "1": take it though other work is pending, up to the agent's cap
H_ADD_USAGE = "Mesh-Add-Usage"  # "1": a stream without token counts: the agent may ask for them
H_OFFLINE = "Mesh-Offline"  # "1": a line of a batch job: takes only what online work leaves
H_KEEPER = "Mesh-Keeper"  # the replica that keeps what the request goes on with: it alone can
H_CONTINUES = "Mesh-Continues"  # "1": its last message is to be gone on with, not answered
H_CALL = "Mesh-Call"  # about a response that the keeper keeps, e.g. "GET /v1/responses/resp_…"
H_RESIDENCY = "Mesh-Residency"  # labels, comma-separated: only where one of them is carried
H_STAGE = "Mesh-Stage"  # "prefill" or "decode": the agent's engine computes one stage of a pair
H_KV_PARAMS = "Mesh-Kv-Params"  # of the decode stage: what the prefill engine answered, as JSON
H_KV_ROOM = "Mesh-Kv-Room"  # a random number: both stages of one attempt have the same
H_KV_PREFILL = "Mesh-Kv-Prefill"  # host:port, where the prefill engine's cache is fetched
H_KV_DECODE = "Mesh-Kv-Decode"  # host:port, where the decode engine's cache is written
# W3C trace context travels as `traceparent` and `tracestate`.

HOPS_MAX = 4  # the largest Mesh-Hops: older routers forwarded peers' requests to others
BODY_BYTES_MAX = 32 * 1024 * 1024
# Of a body that is read beside the event loop, and sent to other regions in parts. Up to that it
# is read at once: 0.1 ms of text, 8 ms of the worst JSON.
LARGE_BYTES = 256 * 1024
# An agent sends at most this much of one answer beyond the last Credit. Routers credit at half
# of it, so a short answer costs no credit message at all.
WINDOW_BYTES = 256 * 1024
WINDOW_BYTES_MIN = 1024  # the least that `H_WINDOW` may say
ALIVE_S = 0.5  # between a router's keepalives
ALIVE_REST_S = 2.0  # at rest
ALL_REPLICAS = "*"  # in `Alive.drained`; no replica has this name
WORKING_S = 5.0
HELD_S = 1.0  # half of what a router waits for a peer's PLACED
SILENCE_S_MAX = 16.0  # three of them missing
FRAME_HEADER = struct.Struct(">BI")
_HEADER_BYTES = FRAME_HEADER.size


def window_bytes(first: int, consumed: int) -> int:
    """How far an answer may run ahead of a client that has consumed so much of it: at first `first`
    bytes, later as many as were consumed. Both sides of a link count by this."""
    return min(WINDOW_BYTES, max(first, consumed))


class Priority(StrEnum):
    """Which requests go first when not all can."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


CLASSES_BEFORE = {priority: classes for classes, priority in enumerate(Priority)}

SLO_MS_MAX = 3_600_000
SESSION_PATTERN = r"^[!-~]{1,128}$"  # header values are plain ASCII


class Frame(IntEnum):
    PLACED = ord("P")
    HELD = ord("Q")
    REFUSED = ord("R")
    BODY_WANTED = ord("B")
    LOST = ord("L")
    WORKING = ord("W")
    HEAD = ord("H")
    DATA = ord("D")
    END = ord("E")


_KINDS: dict[int, Frame] = {int(kind): kind for kind in Frame}  # a third of an enum's own look-up


class FrameView(NamedTuple):
    """One frame taken apart."""

    kind: Frame
    number: int
    payload: bytes


def pack_frame(kind: Frame, number: int, payload: bytes = b"") -> bytes:
    return FRAME_HEADER.pack(kind, number) + payload


def unpack_frame(data: bytes) -> FrameView:
    """The frame in a bus message. Raises WireError if it is none."""
    try:
        code, number = FRAME_HEADER.unpack_from(data)
        kind = _KINDS[code]
    except (struct.error, KeyError) as error:
        raise WireError(f"no frame: {data[:_HEADER_BYTES]!r}") from error
    # Made past its own `__new__`, which takes twice as long: one of these for each token.
    return tuple.__new__(FrameView, (kind, number, data[_HEADER_BYTES:]))


class Refusal(StrEnum):
    """Why a replica or a region did not take work."""

    FULL = "full"
    DRAINING = "draining"
    WRONG_MODEL = "wrong_model"  # or not on that path
    ENGINE_DOWN = "engine_down"
    BAD_WORK = "bad_work"  # headers or body we could not read: placing it again won't help
    NOT_OWNER = "not_owner"  # another region owns this replica by now: see schemas.state.Lease
    NO_REPLICA = "no_replica"  # a peer region without a free replica for this model
    ELSEWHERE = "elsewhere"  # a peer region that held it: another serves it sooner by now
    NOT_KEPT = "not_kept"  # a peer region without the replica that kept the response; none has it
    KEEPER_DRAINS = "keeper_drains"  # a peer region whose replica that keeps it takes no work now
    OWN_WORK = "own_work"  # a peer region that needs its room for its own clients
    NO_OFFLINE_ROOM = "no_offline_room"  # offline work, and the replica or region takes no more now
    RESIDENCY = "residency"  # the replica, or all of the region, lacks a wanted label


class Outcome(StrEnum):
    """How an answer ended."""

    DONE = "done"
    ENGINE_LOST = "engine_lost"  # connection refused, reset, or cut inside the answer
    ENGINE_BROKEN = "engine_broken"  # answered, but not with what HTTP or SSE promise
    ENGINE_FAILED = "engine_failed"  # the stream ended with an error event of the engine's own
    BODY_LOST = "body_lost"  # the parts of the request's body never arrived
    DEADLINE = "deadline"
    CANCELLED = "cancelled"  # the router asked for it, or the router is gone
    PREEMPTED = "preempted"  # offline work given back, begun or not, for online requests


@wire_message(tag=1)
class Placed(WireMessage):
    """A peer's router found a place: this replica will stream the answer.

    `held_s`: seconds that the request was in that router's hold queue.
    """

    region: str
    replica: str
    held_s: float = 0.0


@wire_message(tag=10)
class Lost(WireMessage):
    """A peer's router has lost the replica that was answering: nothing more will come of it."""

    region: str
    replica: str


@wire_message(tag=2)
class Refused(WireMessage):
    """Not taken, with the refuser's current load for the next choice.

    `pending`, `running`: requests, -1 when unknown. `digest`: a region's, as JSON, when its router
    refuses; empty when an agent does.
    """

    reason: str  # a Refusal
    region: str
    replica: str  # empty when a peer's router refuses for its region
    pending: int
    running: int
    digest: str = ""


@wire_message(tag=3)
class BodyWanted(WireMessage):
    """The agent is ready for the body's parts, at `schemas.subjects.body(region, replica)`."""

    region: str
    replica: str


@wire_message(tag=4)
class Head(WireMessage):
    """The engine's status line: sent with the first byte of its answer's body, not before.

    Engines send HTTP headers long before the first token; holding them back keeps the request
    placeable elsewhere until a client could have seen something.
    """

    status: int
    content_type: str
    region: str
    replica: str
    headers: tuple[str, ...] = ()  # those for the client, as schemas.passed_headers chose them
    doubted: int = 0  # 1: a client error, as its engine gave to each of its last requests


TOKENS_MAX = 1 << 31  # of a count: beyond any context. Larger ones are none


@wire_message(tag=5)
class End(WireMessage):
    """The last frame. Token counts are the engine's `usage`, at most TOKENS_MAX; -1 without one."""

    outcome: str  # an Outcome
    detail: str  # for people; empty when done
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float  # at the agent: work taken to first content; -1.0 when no head was sent


@wire_message(tag=6)
class Cancel(WireMessage):
    """Stop the answer that streams to `inbox`."""

    inbox: str


@wire_message(tag=7)
class Credit(WireMessage):
    """The client has received `consumed_bytes` of the answer to `inbox`, counted from its start.

    `missing_from`: the first frame of it that the router has not got though later ones came; they
    are sent again from there. -1: none is missing.
    """

    inbox: str
    consumed_bytes: int
    missing_from: int = -1


@wire_message(tag=8)
class Alive(WireMessage):
    """A router's keepalive; a new epoch means that it restarted and its old work is orphaned.

    `owned`: regions whose replicas it hands work to by a lease, and `terms`: the term of each.
    `drained`: the replicas of its own region that operators have drained, ALL_REPLICAS alone for
    all, by the record with the number `control_seq` in the region's stream; 0 where there is none,
    -1 while the router has not read the stream. `next_within_s`: of the next keepalive; the process
    reads the same field of heartbeats. 0 from one that knows of neither.
    """

    epoch: int
    owned: tuple[str, ...] = ()
    terms: tuple[int, ...] = ()
    control_seq: int = -1
    drained: tuple[str, ...] = ()
    next_within_s: float = 0.0

    def drains(self, replica: str) -> bool:
        return self.drained == (ALL_REPLICAS,) or replica in self.drained


# Parts of a body carry raw bytes, so they are framed by headers instead of msgpack.
H_BODY_INBOX = "Mesh-Inbox"  # the answer this part's request belongs to
H_BODY_OFFSET = "Mesh-Offset"  # byte position of this part in the body


@wire_message(tag=9)
class Sketch(WireMessage):
    """What a peer needs to place a request whose body is too large for the ingress message."""

    prompt_tokens: int
    block_hashes: tuple[int, ...]
