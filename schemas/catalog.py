"""Every channel of the bus in one table: who publishes what, who receives it, and how.

Three things are made from this table and from nowhere else: the AsyncAPI document, the
nats-server permissions of every role, and the allow-lists of the leaf links. To add a subject
to the mesh is to add a row here.
"""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from inspect import signature
from typing import Any

from schemas import control, exchange, explain, gossip, held, keys, limits, state, subjects, usage


class Role(StrEnum):
    """Who publishes and subscribes. A peer role is the same program in another region."""

    AGENT = "agent"  # only for its own replica
    ROUTER = "router"
    PEER_AGENT = "peer_agent"
    PEER_ROUTER = "peer_router"
    OBSERVER = "observer"  # people and tools: state only, as far as it reaches their region
    OPERATOR = "operator"  # an observer who examines with `mesh doctor`
    ADMIN = "admin"  # an operator who drains replicas
    STREAM = "stream"  # the region's own JetStream, for what it publishes by itself


class Carrier(StrEnum):
    """What of NATS carries a channel."""

    CORE = "core publish"
    REQUEST = "core request-reply"
    LAST_VALUE = "core publish, captured by a JetStream last-value stream"
    COMPARE_AND_SET = "compare-and-set by request to a JetStream stream"
    REPUBLISHED = "republished by that stream"


class Encoding(StrEnum):
    JSON = "application/json"
    MSGPACK = "application/msgpack"
    FRAMES = "application/vnd.mesh.frame"
    RAW = "application/octet-stream"


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One kind of subject, which the builder of that name in `schemas.subjects` makes."""

    name: str
    carrier: Carrier = Carrier.CORE
    encoding: Encoding
    messages: tuple[type[Any], ...] = ()
    publish: Set[Role]
    subscribe: Set[Role]
    about: str
    queue: str | None = None
    prompts: bool = False  # it carries prompts: residency decides to which regions
    prefixes: bool = False  # it describes the beginnings of prompts: the same

    @cached_property
    def template(self) -> str:
        """The subject with `{region}`, `{replica}`, … where names go."""
        builder = getattr(subjects, self.name)
        return str(builder(*(f"{{{name}}}" for name in signature(builder).parameters)))

    def subject(self, **names: str) -> str:
        """The subject with its names filled in; a name not given matches any (`*`)."""
        known = ("region", "replica", "router", "stream", "label", "asker", "day", "page")
        return self.template.format(**{name: names.get(name, subjects.ANY) for name in known})


AGENT, ROUTER = Role.AGENT, Role.ROUTER
PEER_AGENT, PEER_ROUTER = Role.PEER_AGENT, Role.PEER_ROUTER
OBSERVER, OPERATOR, ADMIN = Role.OBSERVER, Role.OPERATOR, Role.ADMIN

CHANNELS: tuple[Channel, ...] = (
    Channel(
        name="heartbeat",
        carrier=Carrier.LAST_VALUE,
        encoding=Encoding.JSON,
        messages=(state.Heartbeat,),
        publish={AGENT},
        subscribe={ROUTER, PEER_ROUTER, OBSERVER, OPERATOR, ADMIN},
        about="A replica's state, every 100 ms (at rest 500 ms) and at once when it changes. Peers "
        "listen while they have adopted the region, and until what they placed there is over.",
    ),
    Channel(
        name="work",
        carrier=Carrier.REQUEST,
        encoding=Encoding.RAW,
        publish={ROUTER, PEER_ROUTER},
        subscribe={AGENT},
        queue=subjects.QUEUE_AGENT,
        prompts=True,
        about="One request: the client's body as it came, described by Mesh-* headers; "
        "the reply subject is the inbox its answer streams to.",
    ),
    Channel(
        name="cancel",
        encoding=Encoding.MSGPACK,
        messages=(exchange.Cancel,),
        publish={ROUTER, PEER_ROUTER},
        subscribe={AGENT},
        about="Stop one answer: its client hung up or its deadline passed.",
    ),
    Channel(
        name="credit",
        encoding=Encoding.MSGPACK,
        messages=(exchange.Credit,),
        publish={ROUTER, PEER_ROUTER},
        subscribe={AGENT},
        about="Flow control: how far the client has read one long answer.",
    ),
    Channel(
        name="body",
        encoding=Encoding.RAW,
        publish={ROUTER, PEER_ROUTER},
        subscribe={AGENT},
        prompts=True,
        about="A part of a request body too large for one message.",
    ),
    Channel(
        name="name",
        carrier=Carrier.REQUEST,
        encoding=Encoding.RAW,
        publish={AGENT},
        subscribe={AGENT},
        about="An agent that starts asks whether another one has its name: its epoch, as 8 bytes.",
    ),
    Channel(
        name="named",
        encoding=Encoding.RAW,
        publish={AGENT},
        subscribe={AGENT},
        about="The answer of the agent that has it: its own epoch. The one that asked ends.",
    ),
    Channel(
        name="prompt_blocks",
        encoding=Encoding.MSGPACK,
        messages=(held.PromptBlocks, held.HeldAsk),
        publish={ROUTER},
        subscribe={AGENT},
        prefixes=True,
        about="To an agent whose heartbeats have a `held_seq`: the block hashes of each prompt "
        "that is placed on its replica, and questions for its whole set. It crosses no link.",
    ),
    Channel(
        name="held",
        encoding=Encoding.MSGPACK,
        messages=(held.HeldDelta, held.HeldPart),
        publish={AGENT},
        subscribe={ROUTER},
        prefixes=True,
        about="Which of these blocks the engine holds, by its own KV events: numbered deltas, 50 a "
        "second at most, and the whole set when a router asks. It crosses no link.",
    ),
    Channel(
        name="ingress",
        carrier=Carrier.REQUEST,
        encoding=Encoding.RAW,
        messages=(exchange.Sketch,),
        publish={PEER_ROUTER},
        subscribe={ROUTER},
        queue=subjects.QUEUE_ROUTERS,
        prompts=True,
        about="A peer region asks this one to place a request; the agent chosen here streams "
        "the answer straight to the asking router's inbox.",
    ),
    Channel(
        name="ingress_within",
        carrier=Carrier.REQUEST,
        encoding=Encoding.RAW,
        messages=(exchange.Sketch,),
        publish={PEER_ROUTER},
        subscribe={ROUTER},
        queue=subjects.QUEUE_ROUTERS,
        prompts=True,
        about="The same for a request that wants residency: the label is one that this region "
        "carries and the request wants, and only such subjects cross a link.",
    ),
    Channel(
        name="offline",
        carrier=Carrier.REQUEST,
        encoding=Encoding.RAW,
        messages=(exchange.Sketch,),
        publish={PEER_ROUTER},
        subscribe={ROUTER},
        queue=subjects.QUEUE_BATCH,
        prompts=True,
        about="A peer region's batch runner asks this region's to give a line of a batch job to a "
        "replica with room for offline work, or to refuse it; the agent streams the answer "
        "straight to the asking runner's inbox.",
    ),
    Channel(
        name="offline_within",
        carrier=Carrier.REQUEST,
        encoding=Encoding.RAW,
        messages=(exchange.Sketch,),
        publish={PEER_ROUTER},
        subscribe={ROUTER},
        queue=subjects.QUEUE_BATCH,
        prompts=True,
        about="The same for a line that wants residency: the label is one that this region "
        "carries and the line wants, and only such subjects cross a link.",
    ),
    Channel(
        name="offline_state",
        encoding=Encoding.JSON,
        messages=(state.OfflineState,),
        publish={ROUTER},
        subscribe={ROUTER, PEER_ROUTER, OBSERVER, OPERATOR},
        about="What a region would take of offline work, now and in the next hours, and what its "
        "own jobs have left to do: by its batch runners, every second.",
    ),
    Channel(
        name="digest",
        encoding=Encoding.JSON,
        messages=(state.Digest,),
        publish={ROUTER},
        subscribe={ROUTER, PEER_ROUTER, OBSERVER, OPERATOR},
        about="A region's state in one message, every 100 ms (at rest 600 ms) and on change.",
    ),
    Channel(
        name="limits",
        encoding=Encoding.JSON,
        messages=(limits.LimitClaims,),
        publish={ROUTER},
        subscribe={ROUTER, PEER_ROUTER},
        about="What a router or batch runner has spent of tenants' and keys' limits since it "
        "started, four times a second where any are set.",
    ),
    Channel(
        name="trie",
        encoding=Encoding.MSGPACK,
        messages=(gossip.TrieDelta,),
        publish={ROUTER},
        subscribe={ROUTER, PEER_ROUTER, OPERATOR},
        prefixes=True,
        about="Which prompt prefixes the region's replicas came to hold and lost, as keyed "
        "hashes: numbered deltas four times a second while there are changes, and keepalives. "
        "Each of a region's routers publishes what no other has published.",
    ),
    Channel(
        name="siblings",
        encoding=Encoding.MSGPACK,
        messages=(gossip.TrieDelta,),
        publish={ROUTER},
        subscribe={ROUTER},
        prefixes=True,
        about="Which prompts a router has placed on which replica, and which turned out not to be "
        "there, for the other routers of its region; numbered like the deltas for peers. It "
        "crosses no link.",
    ),
    Channel(
        name="snapshot",
        carrier=Carrier.REQUEST,
        encoding=Encoding.MSGPACK,
        messages=(gossip.TrieAsk, gossip.TrieDelta, gossip.TriePart),
        publish={ROUTER, PEER_ROUTER},
        subscribe={ROUTER},
        prefixes=True,
        about="A listener that missed deltas asks the router that published them. What it missed "
        "comes, as TrieDelta or as the TrieParts of the whole set, to an inbox of the asking "
        "router, whose last token is random. A link lets its region ask in its own name only, so "
        "that none can spend another's share; a request in the region's own name is a sibling's.",
    ),
    Channel(
        name="lease",
        carrier=Carrier.COMPARE_AND_SET,
        encoding=Encoding.JSON,
        messages=(state.Lease,),
        publish={ROUTER, PEER_ROUTER},
        subscribe={Role.STREAM},
        about="A claim to own the region's replicas: by its own routers, or by a peer's that "
        "adopts them. The stream LEASES takes it only if nothing was written since "
        "(Nats-Expected-Last-Subject-Sequence).",
    ),
    Channel(
        name="leased",
        carrier=Carrier.REPUBLISHED,
        encoding=Encoding.JSON,
        messages=(state.Lease,),
        publish={Role.STREAM},
        subscribe={ROUTER, PEER_ROUTER, OBSERVER, OPERATOR},
        about="What that stream took, four times a second, with its Nats-Sequence: who owns the "
        "region's replicas.",
    ),
    Channel(
        name="control",
        carrier=Carrier.COMPARE_AND_SET,
        encoding=Encoding.JSON,
        messages=(control.RegionControl,),
        publish={ADMIN},
        subscribe={Role.STREAM},
        about="What operators order for a region: which of its replicas are drained. The stream "
        "CONTROL takes a record only if nothing was written since the one that it changes.",
    ),
    Channel(
        name="controlled",
        carrier=Carrier.REPUBLISHED,
        encoding=Encoding.JSON,
        messages=(control.RegionControl,),
        publish={Role.STREAM},
        subscribe={ROUTER, OBSERVER, OPERATOR, ADMIN},
        about="What that stream took, with its Nats-Sequence. The region's routers pass it on to "
        "agents in their keepalives.",
    ),
    Channel(
        name="keys",
        carrier=Carrier.COMPARE_AND_SET,
        encoding=Encoding.JSON,
        messages=(keys.RegionKeys,),
        publish={ADMIN},
        subscribe={Role.STREAM},
        about="The API keys that a region's routers take, by their SHA-256. The stream KEYS takes "
        "a record only if nothing was written since the one that it changes.",
    ),
    Channel(
        name="keyed",
        carrier=Carrier.REPUBLISHED,
        encoding=Encoding.JSON,
        messages=(keys.RegionKeys,),
        publish={Role.STREAM},
        subscribe={ROUTER, ADMIN},
        about="What that stream took, with its Nats-Sequence.",
    ),
    Channel(
        name="usage",
        carrier=Carrier.COMPARE_AND_SET,
        encoding=Encoding.JSON,
        messages=(usage.UsagePage,),
        publish={ROUTER},
        subscribe={Role.STREAM},
        about="Sums of tokens by key, tenant, model and region that served, of one router or batch "
        "runner since its start, one day's in pages: each a second after it has changed. The "
        "stream USAGE keeps the last writing of each for 400 days. It crosses no link.",
    ),
    Channel(
        name="ping",
        carrier=Carrier.REQUEST,
        encoding=Encoding.RAW,
        publish={PEER_ROUTER},
        subscribe={ROUTER},
        queue=subjects.QUEUE_ROUTERS,
        about="Round-trip probe of 8 bytes, echoed.",
    ),
    Channel(
        name="requests",
        carrier=Carrier.REQUEST,
        encoding=Encoding.JSON,
        messages=(explain.RequestQuestion, explain.RouterRequests),
        publish={OBSERVER, OPERATOR},
        subscribe={ROUTER},
        about="A person asks all routers of the region about one request, or for the slowest ones. "
        "Each answers with what it keeps of them: their decisions and times, no prompts. It "
        "crosses no link.",
    ),
    Channel(
        name="alive",
        encoding=Encoding.MSGPACK,
        messages=(exchange.Alive,),
        publish={ROUTER},
        subscribe={AGENT, PEER_AGENT, OPERATOR},
        about="A router's keepalive, every 500 ms: agents abort the work of a router that "
        "has been silent for 3 s, or for 7 s if it is of another region. It says which replicas "
        "of its own region an operator has drained.",
    ),
    Channel(
        name="inbox",
        encoding=Encoding.FRAMES,
        messages=(
            exchange.Placed,
            exchange.Refused,
            exchange.Lost,
            exchange.BodyWanted,
            exchange.Head,
            exchange.End,
        ),
        publish={AGENT, PEER_AGENT, ROUTER, PEER_ROUTER},
        subscribe={ROUTER},
        about="One answer, as numbered frames; the data frames hold the engine's bytes untouched. "
        "The stream `parcel` holds frames of several answers, each behind its stream and length.",
    ),
)


def channel(name: str) -> Channel:
    """The channel of that name. Raises KeyError if the table has none."""
    for row in CHANNELS:
        if row.name == name:
            return row
    raise KeyError(name)
