"""Who may say and hear what, made from the channel table (`schemas.catalog`) and nothing else.

Two questions are answered here: what a *role* may do on its own region's server (agent, router,
observer, operator, setup), and what region X may say *into* region Y over their leaf link
(`spoken`). Into Y, X may put requests to Y, answers to Y's inboxes, and what X says of itself to
its peers. Everything else would be X speaking in another's name.

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
Where a server answers by itself (JetStream), or for a tool, the request crosses from one account
into another, and its answer can reach nobody but the account that asked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from infra.nats.pattern import widest
from schemas import subjects
from schemas.catalog import CHANNELS, Carrier, Channel, Role, channel
from schemas.ids import RegionId, ReplicaId
from schemas.residency import OPEN_GROUND, Ground

PEERS = frozenset({Role.PEER_AGENT, Role.PEER_ROUTER})
INBOX, INGRESS, INGRESS_WITHIN = map(channel, ("inbox", "ingress", "ingress_within"))
STREAMS = (subjects.STREAM_HEARTBEATS, subjects.STREAM_LEASES)

ALL_INBOXES = f"{subjects.INBOX_ROOT}.>"
# Where the server takes replies to requests that cross from one account into another.
ACROSS_ACCOUNTS = f"{subjects.SERVICE_REPLY_ROOT}.>"

SERVICE_VERBS = ("PING", "INFO", "STATS")
SERVICES = (subjects.SERVICE_AGENT, subjects.SERVICE_ROUTER)

# JetStream's API (docs.nats.io, "NATS API reference"), `{}` for a stream's name. `API_INFO` is
# asked for by no process: an account that does not import it gets an API of its own, which knows
# no stream and answers in this one's place [tried, 2.15.1].
API_INFO = "$JS.API.INFO"
STREAM_INFO = "$JS.API.STREAM.INFO.{}"
LAST_BY_SUBJECT = "$JS.API.DIRECT.GET.{}.>"
STREAM_READS = (
    STREAM_INFO,
    LAST_BY_SUBJECT,
    "$JS.API.STREAM.MSG.GET.{}",
    "$JS.API.DIRECT.GET.{}",
)
STREAM_WRITES = tuple(f"$JS.API.STREAM.{verb}.{{}}" for verb in ("CREATE", "UPDATE", "DELETE"))
ACCOUNT_READS = (API_INFO, "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST")
STREAM_EVENTS = "$JS.EVENT.ADVISORY.>"  # who created, altered or deleted a stream


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one user of a nats-server may publish and subscribe to.

    `subscribe`: a pattern, or a pattern and a queue group behind a space, which allows no
    subscription but in that group.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def agent(region: RegionId, replica: ReplicaId) -> Permissions:
    """One replica's agent: its own heartbeat and answers out, its own work in."""
    own = {"region": region, "replica": replica}
    return Permissions(
        publish=widest([*_rows("publish", Role.AGENT, Role.PEER_AGENT, own), ACROSS_ACCOUNTS]),
        subscribe=widest(
            [
                *_rows("subscribe", Role.AGENT, Role.PEER_AGENT, own),
                *service(subjects.SERVICE_AGENT),
            ]
        ),
    )


def router(region: RegionId, ground: Ground = OPEN_GROUND) -> Permissions:
    """A region's routers: they own its inboxes, and read its streams."""
    own = {"region": region}
    return Permissions(
        publish=widest([*_router_says(region, ground), *router_reads(), ACROSS_ACCOUNTS]),
        subscribe=widest(
            [
                *_rows("subscribe", Role.ROUTER, Role.PEER_ROUTER, own),
                # Replies to its own requests (JetStream) come to inboxes below its prefix.
                subjects.inboxes(region),
                *service(subjects.SERVICE_ROUTER),
            ]
        ),
    )


def router_reads() -> tuple[str, ...]:
    """Of JetStream, what routers ask: how both streams are set, and the last heartbeats.

    Not the lease itself. Whoever may write it chooses its bytes, and who reads it chooses where the
    answer is published: both together would publish anything as anybody.
    """
    last_heartbeats = LAST_BY_SUBJECT.format(subjects.STREAM_HEARTBEATS)
    return (*(STREAM_INFO.format(name) for name in STREAMS), last_heartbeats)


def observer_reads() -> tuple[str, ...]:
    """Of JetStream, what people and tools ask: everything that is in a stream, and its settings."""
    return (*ACCOUNT_READS, *(call.format(name) for call in STREAM_READS for name in STREAMS))


def observed(role: Role, home: RegionId, speaker: RegionId) -> tuple[str, ...]:
    """What that role sees of a region in its own region `home`: of others, what crosses anyway."""
    return tuple(
        row.subject(region=speaker)
        for row in CHANNELS
        if role in row.subscribe and (speaker == home or row.carrier is not Carrier.LAST_VALUE)
    )


def observer() -> Permissions:
    """Dashboards and people who look on: state, services and streams, and nothing that clients say.

    They have an account of their own (`region_config`), into which nothing else comes.
    """
    return _looking_on(Role.OBSERVER)


def operator() -> Permissions:
    """An observer who examines: which prefixes are told here, and who alters a stream."""
    return _looking_on(Role.OPERATOR, STREAM_EVENTS)


def _looking_on(role: Role, *more: str) -> Permissions:
    seen = [row.subject() for row in CHANNELS if role in row.subscribe]
    return Permissions(
        publish=widest([*observer_reads(), *services()]),
        subscribe=widest([*seen, *more, ALL_INBOXES]),
    )


def setup() -> Permissions:
    """Who makes the streams and puts them right; no process of the mesh has this login."""
    calls = (*STREAM_WRITES, *STREAM_READS)
    own = [call.format(name) for call in calls for name in STREAMS]
    return Permissions(publish=widest([*own, *ACCOUNT_READS]), subscribe=(ALL_INBOXES,))


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
        group = f" {row.queue}" if row.queue is not None and side == "subscribe" else ""
        if own_role in roles:
            yield row.subject(**own) + group
        if peer_role in roles:
            yield row.subject() + group


def service(name: str) -> Iterator[str]:
    """What a NATS micro service of that name answers."""
    for verb in SERVICE_VERBS:
        yield from (f"$SRV.{verb}", f"$SRV.{verb}.{name}", f"$SRV.{verb}.{name}.*")


def services() -> tuple[str, ...]:
    """The same of all services of the mesh."""
    return widest(subject for name in SERVICES for subject in service(name))
