"""Who may say and hear what, made from the channel table (`schemas.catalog`) and nothing else.

Two questions are answered here: what a *role* may do on its own region's server (agent, router,
operator), and what region X may say *into* region Y over their leaf link (`spoken`). Into Y, X may
put requests to Y, answers to Y's inboxes, and what X says of itself to its peers. Everything else
would be X speaking in another's name.

Residency is enforced here a second time, so that a router that is wrong, or not ours any more,
can't send a prompt where it may not be. A server reads subjects and no bodies, so what it enforces
stands in subjects: whose region it is, and under which label. Prompts of a confined region cross
only to regions that carry one of its labels, and only under such a label; its prefixes are told to
these regions alone. Of other regions prompts cross unlabelled, or under a label that the listener
carries. What no server can see is a router of a region that is *not* confined taking a label off:
who must be sure of a prompt sends it to a confined region.

Rejected: permissions written by hand beside the table (the first subject added to one and not to
the other is either a hole or an outage), and `allow_responses` (a request whose reply subject is
no inbox would lend its sender the answerer's voice: whatever is answered goes to inboxes only).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from infra.nats.pattern import widest
from schemas import subjects
from schemas.catalog import CHANNELS, Channel, Role, channel
from schemas.ids import RegionId, ReplicaId
from schemas.residency import OPEN_GROUND, Ground

PEERS = frozenset({Role.PEER_AGENT, Role.PEER_ROUTER})
INBOX, INGRESS, INGRESS_WITHIN = map(channel, ("inbox", "ingress", "ingress_within"))
STREAMS = (subjects.STREAM_HEARTBEATS, subjects.STREAM_LEASES)

# The inboxes that the `nats` command makes for its own requests: `_INBOX.<id>`, `_INBOX.<id>.<n>`.
# Answers to clients lie one token deeper (`schemas.subjects.inbox`).
TOOL_INBOXES = (
    f"{subjects.INBOX_ROOT}.{subjects.ANY}",
    f"{subjects.INBOX_ROOT}.{subjects.ANY}.{subjects.ANY}",
)
CLIENT_INBOXES = f"{TOOL_INBOXES[-1]}.>"
ALL_INBOXES = f"{subjects.INBOX_ROOT}.>"

SERVICE_VERBS = ("PING", "INFO", "STATS")

# JetStream's API per stream (docs.nats.io, "NATS API reference"), `{}` for the stream's name.
STREAM_READS = (
    "STREAM.INFO.{}",
    "STREAM.MSG.GET.{}",
    "DIRECT.GET.{}",
    "DIRECT.GET.{}.>",
    "CONSUMER.NAMES.{}",
    "CONSUMER.LIST.{}",
    "CONSUMER.INFO.{}.*",
)
STREAM_WRITES = (
    "STREAM.CREATE.{}",
    "STREAM.UPDATE.{}",
    "CONSUMER.CREATE.{}",
    "CONSUMER.CREATE.{}.>",
    "CONSUMER.DELETE.{}.*",
    "CONSUMER.MSG.NEXT.{}.*",
)
ACCOUNT_READS = ("INFO", "STREAM.NAMES", "STREAM.LIST")


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one user of a nats-server may publish and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    # What a wildcard subscription must not bring in all the same. To the server, a permission
    # that ends in `*` also admits a subscription that ends in `>` there [tried, 2.15.1]; what
    # lies deeper is kept out by a deny, which is checked at each delivery.
    never_heard: tuple[str, ...] = ()


def agent(region: RegionId, replica: ReplicaId) -> Permissions:
    """One replica's agent: its own heartbeat and answers out, its own work in."""
    own = {"region": region, "replica": replica}
    return Permissions(
        publish=widest([*_rows("publish", Role.AGENT, Role.PEER_AGENT, own), *TOOL_INBOXES]),
        subscribe=widest(
            [
                *_rows("subscribe", Role.AGENT, Role.PEER_AGENT, own),
                *_service(subjects.SERVICE_AGENT),
            ]
        ),
    )


def router(region: RegionId, ground: Ground = OPEN_GROUND) -> Permissions:
    """A region's routers: they own its inboxes, and keep its streams."""
    own = {"region": region}
    return Permissions(
        publish=widest(
            [
                *_router_says(region, ground),
                ALL_INBOXES,  # a peer's ping is answered deeper than a client's request
                *_jetstream(region, ACCOUNT_READS),
                *_jetstream(region, _of_streams((*STREAM_READS, *STREAM_WRITES), STREAMS)),
                *(f"$JS.{kind}.{stream}.>" for kind in ("ACK", "FC") for stream in STREAMS),
            ]
        ),
        subscribe=widest(
            [
                *_rows("subscribe", Role.ROUTER, Role.PEER_ROUTER, own),
                # Replies to its own requests (ping, JetStream) come to inboxes below its prefix.
                subjects.inboxes(region),
                *_service(subjects.SERVICE_ROUTER),
            ]
        ),
    )


def operator(region: RegionId) -> Permissions:
    """People with the `nats` command: look at everything, ask services and streams, say nothing.

    What clients are answered stays private: only a tool's own inboxes can be heard.
    """
    reads = (*ACCOUNT_READS, *_of_streams(STREAM_READS, (subjects.ANY,)))
    return Permissions(
        publish=widest([*_jetstream(region, reads), "$SRV.>"]),
        subscribe=widest([f"{subjects.ROOT}.>", *TOOL_INBOXES, "$JS.EVENT.>"]),
        never_heard=(CLIENT_INBOXES,),
    )


def system() -> Permissions:
    """The server's own account: connections, health, who is linked to whom."""
    return Permissions(publish=("$SYS.>",), subscribe=("$SYS.>", ALL_INBOXES))


def spoken(speaker: RegionId, listener: RegionId, ground: Ground = OPEN_GROUND) -> tuple[str, ...]:
    """Everything that region `speaker` may say into region `listener`."""
    return widest(_spoken(speaker, listener, ground))


def _spoken(speaker: RegionId, listener: RegionId, ground: Ground) -> Iterator[str]:
    for row in CHANNELS:
        if row.publish & PEERS:  # requests to the listener, and answers to its inboxes
            if row.prompts:
                yield from _prompts(row, speaker, listener, ground)
            elif not row.prefixes or ground.may_send(listener, speaker):
                yield _across(row, listener, asker=speaker)
        # What the speaker tells of itself.
        if row.subscribe & PEERS and (not row.prefixes or ground.may_send(speaker, listener)):
            yield _across(row, speaker)


def _prompts(row: Channel, speaker: RegionId, listener: RegionId, ground: Ground) -> Iterator[str]:
    """Where the speaker's prompts may cross to the listener."""
    if row is INGRESS_WITHIN:
        for label in ground.sent(speaker, listener):
            yield row.subject(region=listener, label=label)
    elif row is INGRESS:
        if not ground.confined_to(speaker):
            yield row.subject(region=listener)
    elif ground.may_send(speaker, listener):
        yield _across(row, listener)


def _router_says(region: RegionId, ground: Ground) -> Iterator[str]:
    """What a region's routers may publish: prompts of a confined one not to everybody."""
    peers = [other for other, _ in ground.carried if other != region]
    for row in CHANNELS:
        if Role.ROUTER in row.publish:
            yield row.subject(region=region, asker=region)
        if Role.PEER_ROUTER not in row.publish:
            continue
        if row.prompts and (row is INGRESS_WITHIN or ground.confined_to(region)):
            for peer in peers:
                yield from _prompts(row, region, peer, ground)
        else:  # with any region's subjects, but in its own name
            yield row.subject(asker=region)


def _across(row: Channel, region: RegionId, **names: str) -> str:
    """A channel of a region as one pattern; its inboxes as one, whatever their depth."""
    return subjects.inboxes(region) if row is INBOX else row.subject(region=region, **names)


def _rows(side: str, own_role: Role, peer_role: Role, own: Mapping[str, str]) -> Iterator[str]:
    """Patterns of a role: as itself with its own names, as a peer with any region's."""
    for row in CHANNELS:
        roles: frozenset[Role] = getattr(row, side)
        if own_role in roles:
            yield row.subject(**own)
        if peer_role in roles:
            yield row.subject()


def _service(name: str) -> Iterator[str]:
    for verb in SERVICE_VERBS:
        yield from (f"$SRV.{verb}", f"$SRV.{verb}.{name}", f"$SRV.{verb}.{name}.*")


def _of_streams(calls: Iterable[str], streams: Iterable[str]) -> tuple[str, ...]:
    names = tuple(streams)
    return tuple(call.format(name) for call in calls for name in names)


def _jetstream(region: RegionId, calls: Iterable[str]) -> Iterator[str]:
    """API subjects under both prefixes: the plain one and that of the region's domain."""
    for call in calls:
        yield f"$JS.API.{call}"
        yield f"$JS.{region}.API.{call}"
