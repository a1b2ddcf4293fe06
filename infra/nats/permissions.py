"""Who may publish and subscribe to what, made from the channel table (`schemas.catalog`) alone.

There are permissions of a *role* on its own region's server (agent, router, observer, operator,
setup), and those of region X over its leaf link into region Y (`allowed_across`). Into Y, X may
publish requests to Y, answers to Y's inboxes, and its own state for its peers.

Residency is enforced here a second time, so that a faulty or compromised router can't send a prompt
where it may not be. A server reads subjects and no bodies, so subjects hold the region and the
label. Prompts of a confined region cross only to regions that carry one of its labels, and only
under such a label; its prefixes are published to these regions alone. Prompts of other regions
cross unlabelled, or under a label that the receiver carries. No server can see a router of a region
that is *not* confined removing a label: a client that needs the guarantee sends its request to a
confined region. Where a server answers by itself (JetStream), or for a tool, the request crosses
from one account into another, and its answer reaches only the account of the request.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from schemas import subjects
from schemas.batch import (
    BUCKET_FILES,
    BUCKET_JOBS,
    STREAM_FILE_RECORDS,
    STREAM_FILES,
    STREAM_JOBS,
    STREAM_LINES,
    STREAM_RESULTS,
    STREAM_TASKS,
    line_subject,
    result_subject,
    task_subject,
)
from schemas.catalog import CHANNELS, Carrier, Channel, Role, channel
from schemas.ids import RegionId, ReplicaId
from schemas.residency import OPEN_GROUND, Ground

PEERS = frozenset({Role.PEER_AGENT, Role.PEER_ROUTER})
INBOX = channel("inbox")
# What peers ask a region to place: unlabelled, and under a residency label.
UNLABELLED = frozenset({"ingress", "offline"})
LABELLED = frozenset({"ingress_within", "offline_within"})
STREAMS = (subjects.STREAM_HEARTBEATS, subjects.STREAM_LEASES, subjects.STREAM_CONTROL)
# What admins alone write; KEYS is read by nobody but them and routers.
ADMIN_STREAMS = (subjects.STREAM_CONTROL, subjects.STREAM_KEYS)
ALL_STREAMS = (*STREAMS, subjects.STREAM_KEYS, subjects.STREAM_USAGE)
BACKED_UP = (*ADMIN_STREAMS, subjects.STREAM_USAGE)

ALL_INBOXES = f"{subjects.INBOX_ROOT}.>"
# Where the server takes replies to requests that cross from one account into another.
ACROSS_ACCOUNTS = f"{subjects.SERVICE_REPLY_ROOT}.>"

SERVICE_VERBS = ("PING", "INFO", "STATS")
SERVICES = (subjects.SERVICE_AGENT, subjects.SERVICE_ROUTER)

# JetStream's API (docs.nats.io, "NATS API reference"), `{}` for a stream's name. `API_INFO` is
# requested by no process: an account that does not import it gets an API of its own, which has
# no stream and answers in this one's place [tried, 2.15.1].
API_INFO = "$JS.API.INFO"
STREAM_INFO = "$JS.API.STREAM.INFO.{}"
LAST_BY_SUBJECT = "$JS.API.DIRECT.GET.{}.>"
MESSAGE_GET = "$JS.API.STREAM.MSG.GET.{}"
STREAM_READS = (
    STREAM_INFO,
    LAST_BY_SUBJECT,
    MESSAGE_GET,
    "$JS.API.DIRECT.GET.{}",
)
STREAM_WRITES = tuple(f"$JS.API.STREAM.{verb}.{{}}" for verb in ("CREATE", "UPDATE", "DELETE"))
# Of `nats stream backup` and `restore`: the calls, and the acknowledgements and parts that follow.
# Of operators' orders, keys and accounts alone: all else comes again by itself, and an old lease
# must not come back.
STREAM_BACKUPS = (
    "$JS.API.STREAM.SNAPSHOT.{}",
    "$JS.SNAPSHOT.ACK.{}.*",
    "$JS.API.STREAM.RESTORE.{}",
    "$JS.SNAPSHOT.RESTORE.{}.*",
)
ACCOUNT_READS = (API_INFO, "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST")
STREAM_EVENTS = "$JS.EVENT.ADVISORY.>"  # who created, altered or deleted a stream


# What routers and batch runners call in the account of batch jobs, `{}` for a stream's name. They
# may empty streams, since they delete files and jobs, and neither make nor alter one.
BATCH_STREAMS = (
    *(STREAM_FILES, STREAM_FILE_RECORDS, STREAM_JOBS),
    *(STREAM_TASKS, STREAM_LINES, STREAM_RESULTS),
)
BATCH_CALLS = (
    *STREAM_READS,
    "$JS.API.STREAM.PURGE.{}",
    "$JS.API.CONSUMER.CREATE.{}",
    "$JS.API.CONSUMER.CREATE.{}.>",
    "$JS.API.CONSUMER.INFO.{}.*",
    "$JS.API.CONSUMER.DELETE.{}.*",
    "$JS.API.CONSUMER.MSG.NEXT.{}.*",
)
BATCH_ACKS = ("$JS.ACK.{}.>", "$JS.FC.{}.>")  # the second: of `nats object get`
BATCH_WRITES = (
    f"$O.{BUCKET_FILES}.C.*",
    f"$O.{BUCKET_FILES}.M.*",
    f"$KV.{BUCKET_FILES}.*",
    f"$KV.{BUCKET_JOBS}.*",
    task_subject("*", "*"),
    line_subject("*", "*"),
    result_subject("*", "*"),
)
BATCH_VIEWS = (
    STREAM_INFO,
    "$JS.API.CONSUMER.NAMES.{}",
    "$JS.API.CONSUMER.LIST.{}",
    "$JS.API.CONSUMER.INFO.{}.*",
)


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
        publish=widest([*_router_publishes(region, ground), *router_reads(), ACROSS_ACCOUNTS]),
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
    """What routers request of JetStream: the streams' settings, the last heartbeats and orders,
    and, when they start, accounts of tokens, in answers that wrap them.

    Not the lease itself. Its writer chooses the bytes, and its reader the subject that the answer
    is published to: both together could publish anything in any name.
    """
    last = (subjects.STREAM_HEARTBEATS, *ADMIN_STREAMS)
    return (
        *(STREAM_INFO.format(name) for name in ALL_STREAMS),
        *(LAST_BY_SUBJECT.format(name) for name in last),
        MESSAGE_GET.format(subjects.STREAM_USAGE),
    )


def observer_reads(role: Role) -> tuple[str, ...]:
    """What people and tools request of JetStream: all that is in a stream, and its settings. Of
    that with the keys its settings alone, and observers of that with accounts too: who has used
    how much is for operators."""
    read = (*STREAMS, subjects.STREAM_USAGE) if role is Role.OPERATOR else STREAMS
    contents = (call.format(name) for call in STREAM_READS for name in read)
    settings = (STREAM_INFO.format(name) for name in ALL_STREAMS if name not in read)
    return (*ACCOUNT_READS, *contents, *settings)


def visible_to(role: Role, home: RegionId, sender: RegionId) -> tuple[str, ...]:
    """What that role in region `home` receives of a region; of others, what crosses anyway."""
    return tuple(
        row.subject(region=sender)
        for row in CHANNELS
        if role in row.subscribe and (sender == home or row.carrier is not Carrier.LAST_VALUE)
    )


def watcher(role: Role) -> Permissions:
    """Observers (dashboards, people, monitoring) read state, services and streams, nothing that
    clients send; operators also read prefix gossip, and events of altered streams.

    Each has an account of its own (`region_config`), which imports nothing else and exports
    nothing: what an observer writes to INBOX_CHECK nobody but observers can receive.
    """
    seen = [row.subject() for row in CHANNELS if role in row.subscribe]
    events = [STREAM_EVENTS] if role is Role.OPERATOR else []
    checks = [f"{subjects.INBOX_CHECK}.>"] if role is Role.OBSERVER else []
    return Permissions(
        publish=widest([*observer_reads(role), *services(), *checks]),
        subscribe=widest([*seen, *events, ALL_INBOXES, *checks]),
    )


def admin_reads() -> tuple[str, ...]:
    """What admins request of JetStream: all orders and keys that a region's streams keep."""
    calls = (call.format(name) for call in STREAM_READS for name in ADMIN_STREAMS)
    return (API_INFO, *calls)


def admin() -> Permissions:
    """Admins order what replicas do, and make API keys: the only login that may write to the
    streams of both.

    They have an account of their own (`region_config`): in that of observers, an observer could
    have JetStream answer a request with an old order on the subject where orders are written.
    """
    return Permissions(
        publish=widest([channel("control").subject(), channel("keys").subject(), *admin_reads()]),
        subscribe=widest(
            [*(row.subject() for row in CHANNELS if Role.ADMIN in row.subscribe), ALL_INBOXES]
        ),
    )


@cache
def setup() -> Permissions:
    """Creates the streams, repairs them, backs up orders, keys and accounts; no process has this
    login."""
    calls = (*STREAM_WRITES, *STREAM_READS)
    own = [call.format(name) for call in calls for name in ALL_STREAMS]
    backups = [call.format(name) for call in STREAM_BACKUPS for name in BACKED_UP]
    return Permissions(publish=widest([*own, *backups, *ACCOUNT_READS]), subscribe=(ALL_INBOXES,))


@cache
def batch() -> Permissions:
    """Routers and batch runners in the account of batch jobs: what is in its streams."""
    calls = _of_batch_streams((*BATCH_CALLS, *BATCH_ACKS))
    publish = widest([*BATCH_WRITES, *calls, *ACCOUNT_READS])
    return Permissions(publish=publish, subscribe=(ALL_INBOXES,))


def batch_setup() -> Permissions:
    """Creates the streams of batch jobs and repairs them; cannot read what is in them, as it has an
    account of its own (`region_config`), which receives answers to its calls and nothing else."""
    calls = _of_batch_streams((*STREAM_WRITES, STREAM_INFO))
    inboxes = f"{subjects.INBOX_BATCH_SETUP}.>"
    return Permissions(publish=widest([*calls, *ACCOUNT_READS]), subscribe=(inboxes,))


def batch_observer() -> Permissions:
    """People who watch batch jobs' streams: how many messages, and no message. They have an account
    of their own, as observers."""
    publish = widest([*_of_batch_streams(BATCH_VIEWS), *ACCOUNT_READS])
    return Permissions(publish=publish, subscribe=(ALL_INBOXES,))


def _of_batch_streams(calls: Iterable[str]) -> tuple[str, ...]:
    return tuple(call.format(stream) for call in calls for stream in BATCH_STREAMS)


def system() -> Permissions:
    """The server's own account: connections, health, who is linked to whom."""
    return Permissions(publish=("$SYS.>",), subscribe=("$SYS.>", ALL_INBOXES))


def allowed_across(
    sender: RegionId, receiver: RegionId, ground: Ground = OPEN_GROUND
) -> tuple[str, ...]:
    """All subjects that region `sender` may publish into region `receiver`."""
    return widest(_allowed_across(sender, receiver, ground))


def _allowed_across(sender: RegionId, receiver: RegionId, ground: Ground) -> Iterator[str]:
    for row in CHANNELS:
        if row.publish & PEERS:  # requests to the receiver, and answers to its inboxes
            if row.prompts:
                yield from _prompts(row, sender, receiver, ground)
            elif not row.prefixes or ground.may_send(receiver, sender):
                yield _across(row, receiver, asker=sender)
        # The sender's own state.
        if row.subscribe & PEERS and (not row.prefixes or ground.may_send(sender, receiver)):
            yield _across(row, sender)


def _prompts(row: Channel, sender: RegionId, receiver: RegionId, ground: Ground) -> Iterator[str]:
    """Where the sender's prompts may cross to the receiver."""
    if row.name in LABELLED:
        for label in ground.sent(sender, receiver):
            yield row.subject(region=receiver, label=label)
    elif row.name in UNLABELLED:
        if not ground.confined_to(sender):
            yield row.subject(region=receiver)
    elif ground.may_send(sender, receiver):
        yield _across(row, receiver)


def _router_publishes(region: RegionId, ground: Ground) -> Iterator[str]:
    """What a region's routers may publish: prompts of a confined one only to some peers."""
    peers = [other for other, _ in ground.carried if other != region]
    for row in CHANNELS:
        if Role.ROUTER in row.publish:
            yield row.subject(region=region, asker=region)
        if Role.PEER_ROUTER not in row.publish:
            continue
        if row.prompts and (row.name in LABELLED or ground.confined_to(region)):
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


@cache
def services() -> tuple[str, ...]:
    """The same of all services of the mesh, and what people ask routers."""
    asked = [row.subject() for row in CHANNELS if row.publish & {Role.OBSERVER, Role.OPERATOR}]
    return widest([*asked, *(subject for name in SERVICES for subject in service(name))])


def covers(wide: str, narrow: str) -> bool:
    """Whether every subject that pattern `narrow` matches is matched by `wide` too.

    `*` matches one token, a last `>` one or more. A pattern may have a queue group behind a
    space, as in permissions to subscribe: without one it is any.
    """
    wide, _, wide_group = wide.partition(" ")
    narrow, _, narrow_group = narrow.partition(" ")
    if wide_group and wide_group != narrow_group:
        return False
    wide_tokens, narrow_tokens = wide.split("."), narrow.split(".")
    for number, token in enumerate(wide_tokens):
        if token == ">":
            return number < len(narrow_tokens)
        if number == len(narrow_tokens) or narrow_tokens[number] == ">":
            return False
        if token not in ("*", narrow_tokens[number]):
            return False
    return len(wide_tokens) == len(narrow_tokens)


def widest(patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns without those that another one covers, sorted."""
    distinct = sorted(set(patterns))
    return tuple(
        pattern
        for pattern in distinct
        if not any(other != pattern and covers(other, pattern) for other in distinct)
    )
