"""One region's nats-server, or each of three: its settings, made from the topology.

Regions are joined pairwise by leaf links, and each link ends, on both sides, in an account that
holds nothing else (`LINK-<peer>`). What of it reaches the region's own account `MESH`, and what
goes out, is listed there as stream exports and imports, one for each pattern that
`permissions.allowed_across` gives. So each side allows what it lists, whatever the other side
sends, and nothing can pass from one peer to the next. The accepting side gives the same as
permissions of the peer's user: a peer that ignores them is cut off.

More accounts keep answers of the server apart. JetStream answers to any reply subject that a
request names, without a check of permissions: a request could make it publish where its sender may
not. So the streams are in an account of their own, `STATE`, and so is each user of people:
`observer` in `OBSERVE`, `operator` in `OPERATE`, `admin` in `ADMIN`. An account imports what its
user may receive and request and nothing else, and its user's inboxes are read by nobody else.
Between these and `MESH` requests are *services*: the server replaces the reply subject, and brings
the answer back to the account of the request, and nowhere else. Peers write a lease this way too.
Only the user `setup`, who logs in to `STATE`, can make, alter and remove streams.

Files and batch jobs are in one more account, `BATCH`, of regions with batch runners. Nothing of it
crosses a link or into `MESH`. Its readers (`batch-observer`) are in `BATCH-OBSERVE`, for the same
reason as observers: in `BATCH` itself their requests' reply subjects could write lines and results.
`batch-setup` is in `BATCH-SETUP`: who alters a stream can have it republish what it takes to any
subject of its account, so in `BATCH` to an inbox of its own.

Three nats-servers are a NATS cluster, whose streams have three replicas. Where their region dials a
link, each of them does: a dialling server passes on over its link what its own clients say and
take, and nothing of the others' [2.15.1]. Where it accepts, any one does for all. So a message
crosses once, and a dialling server that loses its acceptor dials that one's neighbour.
"""

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeAlias

import bcrypt

from infra.address import Address
from infra.nats import permissions
from infra.nats.permissions import Permissions
from infra.topology import BusServer, Topology
from schemas import subjects
from schemas.catalog import CHANNELS, Carrier, Role
from schemas.ids import RegionId, ReplicaId

Value: TypeAlias = "str | int | bool | Sequence[Value] | Mapping[str, Value]"

ACCOUNT = "MESH"
STATE_ACCOUNT = "STATE"
OBSERVE_ACCOUNT = "OBSERVE"
ADMIN_ACCOUNT = "ADMIN"
OPERATE_ACCOUNT = "OPERATE"
SYSTEM_ACCOUNT = "SYS"
BATCH_ACCOUNT = "BATCH"
BATCH_OBSERVE_ACCOUNT = "BATCH-OBSERVE"
BATCH_SETUP_ACCOUNT = "BATCH-SETUP"
MEBIBYTE = 1024 * 1024

TLS_TIMEOUT_S = 5  # of a handshake: several round trips, and a server that is busy
CA_FILE = "ca.pem"  # beside a server's own files
# Our processes begin with the handshake; the `nats` command waits for a greeting. A process on a
# busy machine must not be taken for it: NATS' own "auto" is 50 ms.
GREETING_AFTER = "500ms"

# A lost peer or process is noticed after ping_max unanswered pings: 4 to 6 s. Heartbeats and
# digests notice sooner; this ends the connection itself.
PINGS: Mapping[str, Value] = {"ping_interval": "2s", "ping_max": 2}
LEAF_RECONNECT = "1s"
# Where a region of the mesh has three servers there is another one to go to, over links too: one
# that hangs is left after 1.4 to 1.6 s, and the next one is dialled at once, so that streams pause
# for two at most. The intervals are short: what is only slow has nearly as long to answer. Of dials
# that fail, of which there are ten times as many, each tenth is logged.
PINGS_AMONG_SEVERAL: Mapping[str, Value] = {
    "ping_interval": "200ms",
    "ping_max": 7,
    "reconnect_error_reports": 10,
}
LEAF_RECONNECT_AMONG_SEVERAL = "100ms"
# Between those of a region, whose clients have left one that hangs by then: 1.05 to 1.2 s.
CLUSTER_PING_INTERVAL = "150ms"
WRITE_DEADLINE = "5s"  # a client that takes nothing for longer is a slow consumer, and cut off
# Links of up to 10 ms are not compressed, others at S2's fastest. NATS' own choice rises with the
# round trip, to "best" beyond 100 ms: a third of the CPU of a server whose region is idle.
LINK_COMPRESSION: Mapping[str, Value] = {"mode": "s2_auto", "rtt_thresholds": ["10ms", "50ms"]}
# Of connections between servers: each shows a certificate.
OTHERS_ARE_CHECKED: Mapping[str, Value] = {"ca_file": CA_FILE, "verify": True}
NO_ADDRESS = "no address:1"  # a space can't be in a URL's host: the dialling server logs that
# Before the server acknowledges a message of a stream on disk, it is there: a job, a file or an
# order that was confirmed survives a power cut. NATS' own default is two minutes later. The stream
# of heartbeats, which nobody needs then, is exempt by its `persist_mode`.
SYNC_INTERVAL = "always"

# Logins of every region's server: of its routers; of people who watch the region's state, who
# examine it, who drain replicas, who create and repair its streams, and who inspect the server
# itself.
REGION_USERS = ROUTER, OBSERVER, OPERATOR, ADMIN, SETUP, SYSTEM = (
    *("router", "observer", "operator", "admin", "setup", "system"),
)
# And where it has batch runners: of runners and routers, of who makes the streams, of who watches.
BATCH_USERS = BATCH, BATCH_SETUP, BATCH_OBSERVER = ("batch", "batch-setup", "batch-observer")
# log2 of bcrypt's rounds, its least: a millisecond at each login. More would only help against
# guessing passwords that people choose; these are random (`bundle.PASSWORD_BYTES`).
BCRYPT_COST = 4
_BCRYPT_BASE64 = bytes.maketrans(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/",
    b"./ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789",
)
_SALT_BYTES, _SALT_CHARS = 16, 22
# Of people who look on: each has an account of its own.
WATCHERS = {OBSERVER: (Role.OBSERVER, OBSERVE_ACCOUNT), OPERATOR: (Role.OPERATOR, OPERATE_ACCOUNT)}
PREFIX_KEY = "mesh/prefix-key"  # kept beside the passwords: of the hashes that cross regions

CLUSTER = "cluster"  # the login of a region's nats-servers among themselves

LeafAddresses = Mapping[tuple[RegionId, RegionId], Sequence[Address]]


class User(NamedTuple):
    """A login at one region's server."""

    region: RegionId
    name: str

    @property
    def key(self) -> str:
        """What its password is kept under."""
        return f"{self.region}/{self.name}"


class OldLogins(NamedTuple):
    """What is taken besides, while passwords change under traffic. A nats-server has one password
    for a name, so names change with passwords: `router`, `router.1`, `router.2`.

    `generation`: of the logins that are handed out. `passwords`: of the one before; empty where
    that is taken no more.
    """

    generation: int = 0
    passwords: Mapping[str, str] = {}


NO_OLD_LOGINS = OldLogins()


@dataclass(frozen=True, slots=True)
class Site:
    """What a region's server needs besides the topology.

    `leaf_addresses`: (solicitor, acceptor) → where to dial instead of each of the acceptor's own
    addresses, when something is between (a delaying proxy, a tunnel). `tls`: all its connections
    are encrypted, with the files of `certificates`, which lie where the server is started.
    """

    passwords: Mapping[str, str]
    state_directory: Path
    leaf_addresses: LeafAddresses = field(default_factory=dict)
    tls: bool = False
    old: OldLogins = NO_OLD_LOGINS

    def login(self, user: User) -> str:
        """The name by which the user logs in."""
        return login_name(user, self.old.generation)


def login_name(user: User, generation: int) -> str:
    return f"{user.name}.{generation}" if generation else user.name


def agent_user(region: RegionId, replica: ReplicaId) -> User:
    return User(region, f"agent-{replica}")


def link_user(acceptor: RegionId, solicitor: RegionId) -> User:
    """The login of the soliciting region's server at the accepting region's."""
    return User(acceptor, f"link-{solicitor}")


def link_account(peer: RegionId) -> str:
    """The account that holds nothing but the link to one peer."""
    return f"LINK-{peer}"


def region_users(topology: Topology, name: RegionId) -> tuple[User, ...]:
    batch = BATCH_USERS if topology.region(name).batch_runners else ()
    return tuple(User(name, each) for each in (*REGION_USERS, *batch))


def users(topology: Topology) -> Iterator[User]:
    """All logins that need a password."""
    for name, region in topology.regions.items():
        yield from region_users(topology, name)
        yield from (agent_user(name, replica) for replica in region.replicas)
        if region.cluster:
            yield User(name, CLUSTER)
    yield from (link_user(link.acceptor, link.solicitor) for link in topology.links)


def settings(topology: Topology, name: RegionId, site: Site, number: int = 0) -> dict[str, Value]:
    """The whole configuration of a region's nats-server; `number`: which, of several."""
    limits, server = topology.nats, topology.region(name).servers[number]
    monitor: dict[str, Value] = {"http": str(server.monitor.listen)} if server.monitor else {}
    return {
        "server_name": f"{topology.mesh.name}-{name}{server.suffix}",
        "listen": str(server.nats.listen),
        **_tls(site, server, handshake_first=GREETING_AFTER),
        **monitor,
        **_cluster(topology, name, site, server),
        "max_payload": limits.max_payload_mib * MEBIBYTE,
        "max_pending": limits.max_pending_mib * MEBIBYTE,
        "write_deadline": WRITE_DEADLINE,
        **(PINGS_AMONG_SEVERAL if _has_several(topology) else PINGS),
        "jetstream": {
            "domain": name,
            "store_dir": str(site.state_directory / server.suffix.removeprefix("-")),
            "sync_interval": SYNC_INTERVAL,
            "max_memory_store": limits.jetstream_memory_mib * MEBIBYTE,
            "max_file_store": topology.jetstream_disk_mib(name) * MEBIBYTE,
        },
        "accounts": _accounts(topology, name, site),
        "system_account": SYSTEM_ACCOUNT,
        **_leafnodes(topology, name, site, number),
    }


def certificate_files(suffix: str) -> tuple[str, str]:
    """The names of a server's certificate and key; `suffix`: of its name."""
    return f"nats{suffix}.pem", f"nats{suffix}.key"


def server_hosts(
    topology: Topology, name: RegionId, number: int, leaf_addresses: LeafAddresses
) -> tuple[str, ...]:
    """All hosts by which a region's server of that number is dialled."""
    server = topology.region(name).servers[number]
    between = (way[number] for (_, acceptor), way in leaf_addresses.items() if acceptor == name)
    dialled = (server.nats, server.leaf, server.cluster, *between)
    return tuple(dict.fromkeys(each.host for each in dialled if each is not None))


def _tls(site: Site, server: BusServer, **more: Value) -> dict[str, Value]:
    """How connections of one kind are encrypted; nothing where they are not."""
    if not site.tls:
        return {}
    cert, key = certificate_files(server.suffix)
    return {"tls": {"cert_file": cert, "key_file": key, "timeout": TLS_TIMEOUT_S, **more}}


def _has_several(topology: Topology) -> bool:
    return any(region.cluster for region in topology.regions.values())


def _cluster(topology: Topology, name: RegionId, site: Site, server: BusServer) -> dict[str, Value]:
    """How it is joined with the region's other nats-servers; nothing where it is the only one."""
    if server.cluster is None:
        return {}
    user = User(name, CLUSTER)
    password = site.passwords[user.key]
    others = (each.cluster for each in topology.region(name).servers if each != server)
    return {
        "cluster": {
            "name": f"{topology.mesh.name}-{name}",
            "listen": str(server.cluster.listen),
            "advertise": str(server.cluster),
            "no_advertise": True,  # to clients, which know the addresses of mesh.toml
            "authorization": {"user": user.name, "password": password_hash(user, password)},
            **_tls(site, server, **OTHERS_ARE_CHECKED),
            "ping_interval": CLUSTER_PING_INTERVAL,
            "routes": [f"nats-route://{user.name}:{password}@{other}" for other in others],
        }
    }


@dataclass(frozen=True, slots=True)
class _Flow:
    """What one account exports to another. `kind`: stream (messages) or service (requests)."""

    kind: str
    subject: str
    exporter: str
    importer: str


def _accounts(topology: Topology, name: RegionId, site: Site) -> dict[str, Value]:
    logins: dict[str, list[Value]] = {
        ACCOUNT: [*_client_users(topology, name, site)],
        STATE_ACCOUNT: [*_user(User(name, SETUP), permissions.setup(), site)],
        ADMIN_ACCOUNT: [*_user(User(name, ADMIN), permissions.admin(), site)],
    }
    for user, (role, account) in WATCHERS.items():
        logins[account] = [*_user(User(name, user), permissions.watcher(role), site)]
    for peer in topology.peers(name):
        logins[link_account(peer)] = _link_users(topology, name, peer, site)
    flows = [*_state_flows(name), *_admin_flows(name)]
    for role, account in WATCHERS.values():
        flows += _watched_flows(topology, name, role, account)
    jetstream: dict[str, Value] = {STATE_ACCOUNT: "enabled"}
    if topology.region(name).batch_runners:
        logins |= _batch_logins(name, site)
        callers = (
            (BATCH_OBSERVE_ACCOUNT, permissions.batch_observer()),
            (BATCH_SETUP_ACCOUNT, permissions.batch_setup()),
        )
        flows += [
            _Flow("service", call, BATCH_ACCOUNT, account)
            for account, allowed in callers
            for call in allowed.publish
        ]
        # What it may take is kept free for it, and the region's state never has to do without. An
        # account's limit counts each copy.
        copies = len(topology.region(name).servers)
        jetstream[BATCH_ACCOUNT] = {"max_file": topology.batch.disk_mib * MEBIBYTE * copies}
    for peer in topology.peers(name):
        flows += _link_flows(topology, name, peer)
    accounts: dict[str, Value] = {
        account: {
            **({"jetstream": jetstream[account]} if account in jetstream else {}),
            "users": users,
            "exports": _exports(flows, account),
            "imports": [_import(flow) for flow in flows if flow.importer == account],
        }
        for account, users in logins.items()
    }
    system = {"users": [*_user(User(name, SYSTEM), permissions.system(), site)]}
    return accounts | {SYSTEM_ACCOUNT: system}


def _batch_logins(name: RegionId, site: Site) -> dict[str, list[Value]]:
    return {
        BATCH_ACCOUNT: [*_user(User(name, BATCH), permissions.batch(), site)],
        BATCH_SETUP_ACCOUNT: [*_user(User(name, BATCH_SETUP), permissions.batch_setup(), site)],
        BATCH_OBSERVE_ACCOUNT: [
            *_user(User(name, BATCH_OBSERVER), permissions.batch_observer(), site)
        ],
    }


def _state_flows(name: RegionId) -> Iterator[_Flow]:
    """Between the region's routers and agents, and its streams."""
    for row in CHANNELS:
        if row.carrier is Carrier.LAST_VALUE:
            yield _Flow("stream", row.subject(region=name), ACCOUNT, STATE_ACCOUNT)
        elif row.carrier is Carrier.COMPARE_AND_SET and Role.ROUTER in row.publish:
            yield _Flow("service", row.subject(region=name), STATE_ACCOUNT, ACCOUNT)
        elif row.carrier is Carrier.REPUBLISHED:
            yield _Flow("stream", row.subject(region=name), STATE_ACCOUNT, ACCOUNT)
    for call in (permissions.API_INFO, *permissions.router_reads()):
        yield _Flow("service", call, STATE_ACCOUNT, ACCOUNT)


def _watched_flows(topology: Topology, name: RegionId, role: Role, account: str) -> Iterator[_Flow]:
    """What people who look on with that role may receive, and request."""
    for subject in permissions.visible_to(role, name, name):
        yield _Flow("stream", subject, _source(subject, name, ACCOUNT), account)
    for peer in topology.peers(name):
        crossing = permissions.allowed_across(peer, name, topology.ground)
        for subject in permissions.visible_to(role, name, peer):
            if subject in crossing:
                yield _Flow("stream", subject, link_account(peer), account)
    for subject in permissions.services():
        yield _Flow("service", subject, ACCOUNT, account)
    for call in permissions.observer_reads(role):
        yield _Flow("service", call, STATE_ACCOUNT, account)
    if role is Role.OPERATOR:
        yield _Flow("stream", permissions.STREAM_EVENTS, STATE_ACCOUNT, account)


def _admin_flows(name: RegionId) -> Iterator[_Flow]:
    """What people who drain replicas may do."""
    for call in (subjects.control(name), subjects.keys(name), *permissions.admin_reads()):
        yield _Flow("service", call, STATE_ACCOUNT, ADMIN_ACCOUNT)
    for subject in permissions.visible_to(Role.ADMIN, name, name):
        yield _Flow("stream", subject, _source(subject, name, ACCOUNT), ADMIN_ACCOUNT)


def _link_flows(topology: Topology, name: RegionId, peer: RegionId) -> Iterator[_Flow]:
    """What passes between the region and one peer."""
    link = link_account(peer)
    for subject in permissions.allowed_across(peer, name, topology.ground):
        if subject == subjects.lease(name):  # the stream answers: to the link alone
            yield _Flow("service", subject, STATE_ACCOUNT, link)
        else:
            yield _Flow("stream", subject, link, ACCOUNT)
    for subject in permissions.allowed_across(name, peer, topology.ground):
        yield _Flow("stream", subject, _source(subject, name, ACCOUNT), link)


def _source(subject: str, name: RegionId, otherwise: str) -> str:
    """The account that a subject of the region is published in: imports are not passed on."""
    republished = (subjects.leased(name), subjects.controlled(name), subjects.keyed(name))
    return STATE_ACCOUNT if subject in republished else otherwise


def _exports(flows: Iterable[_Flow], account: str) -> list[Value]:
    importers: dict[tuple[str, str], list[str]] = {}
    for flow in flows:
        if flow.exporter == account:
            importers.setdefault((flow.kind, flow.subject), []).append(flow.importer)
    return [
        # Many answer these services: the first answer must not close the way of the others.
        {kind: subject, "accounts": to}
        | ({"response_type": "stream"} if subject in permissions.services() else {})
        for (kind, subject), to in sorted(importers.items())
    ]


def _import(flow: _Flow) -> Value:
    return {flow.kind: {"account": flow.exporter, "subject": flow.subject}}


def _client_users(topology: Topology, name: RegionId, site: Site) -> Iterator[Value]:
    yield from _user(User(name, ROUTER), permissions.router(name, topology.ground), site)
    for replica in topology.region(name).replicas:
        yield from _user(agent_user(name, replica), permissions.agent(name, replica), site)


def _link_users(topology: Topology, name: RegionId, peer: RegionId, site: Site) -> list[Value]:
    """The login of the peer's server, if it is the one that dials."""
    if topology.link(name, peer).acceptor != name:
        return []
    # Seen from the server that accepts: what its user publishes comes in over the link.
    allowed = Permissions(
        publish=permissions.allowed_across(peer, name, topology.ground),
        subscribe=permissions.allowed_across(name, peer, topology.ground),
    )
    return [*_user(link_user(name, peer), allowed, site, connection="LEAFNODE")]


def _user(
    user: User, allowed: Permissions, site: Site, *, connection: str = "STANDARD"
) -> Iterator[dict[str, Value]]:
    """The user's login, and the old one while that is taken."""
    logins = [(site.login(user), site.passwords[user.key])]
    if (password := site.old.passwords.get(user.key)) is not None:
        logins.append((login_name(user, site.old.generation - 1), password))
    for name, password in logins:
        yield {
            "user": name,
            "password": password_hash(user, password),
            "allowed_connection_types": [connection],
            "permissions": {
                "publish": {"allow": allowed.publish},
                "subscribe": {"allow": allowed.subscribe},
            },
        }


def password_hash(user: User, password: str) -> str:
    """What the server's file holds in place of the password: who reads the file can't log in.

    The salt is the user's, so that the same password gives the same bytes; it need be no secret.
    """
    digest = blake2b(user.key.encode(), digest_size=_SALT_BYTES).digest()
    salt = base64.b64encode(digest).translate(_BCRYPT_BASE64)[:_SALT_CHARS]
    return bcrypt.hashpw(password.encode(), b"$2a$%02d$%b" % (BCRYPT_COST, salt)).decode()


def _leafnodes(topology: Topology, name: RegionId, site: Site, number: int) -> dict[str, Value]:
    links = [topology.link(name, peer) for peer in topology.peers(name)]
    acceptors = [link.acceptor for link in links if link.solicitor == name]
    solicitors = [link.solicitor for link in links if link.acceptor == name]
    listener: dict[str, Value] = {
        "listen": str(topology.region(name).servers[number].leaf.listen),
        "advertise": _advertised(topology, name, solicitors, site, number),
        **_tls(site, topology.region(name).servers[number], **OTHERS_ARE_CHECKED),
    }
    if not links:
        return {}
    return {
        "leafnodes": {
            **(listener if solicitors else {}),
            # Accounts keep links apart already. This, and request_isolation, keeps one copy of a
            # message one copy even where two links are bound to one account by hand.
            "isolate_leafnode_interest": True,
            "reconnect": (
                LEAF_RECONNECT_AMONG_SEVERAL if _has_several(topology) else LEAF_RECONNECT
            ),
            "compression": LINK_COMPRESSION,
            "remotes": [_remote(topology, name, acceptor, site, number) for acceptor in acceptors],
        }
    }


def _advertised(
    topology: Topology, acceptor: RegionId, solicitors: Sequence[RegionId], site: Site, number: int
) -> str:
    """What the accepting server says of where it can be dialled.

    A server dials such addresses too, unless it is configured with the same one: so it is told
    that, or, where they are several, something that it can only leave out. None can't be said:
    under `no_advertise` servers up to 2.14 advertise all the same, and their like never connect to
    one of 2.15 ("attempted to connect to wrong port"), whose greeting has no such field then.
    [tried: every pair of 2.12.7, 2.12.8, 2.14.0, 2.14.6, 2.15.0, 2.15.1.] The dialling server's
    `ignore_discovered_servers` is an unknown field before 2.14.
    """
    dialled = {_dialled(topology, solicitor, acceptor, site)[number] for solicitor in solicitors}
    return str(dialled.pop()) if len(dialled) == 1 else NO_ADDRESS


def _dialled(
    topology: Topology, solicitor: RegionId, acceptor: RegionId, site: Site
) -> Sequence[Address]:
    """Where each of the accepting region's servers is dialled."""
    return site.leaf_addresses.get((solicitor, acceptor), topology.region(acceptor).leaf)


def _remote(
    topology: Topology, solicitor: RegionId, acceptor: RegionId, site: Site, number: int
) -> dict[str, Value]:
    """The link to that region. Each server begins with another one of its servers."""
    user = link_user(acceptor, solicitor)
    login = f"nats-leaf://{site.login(user)}:{site.passwords[user.key]}"
    addresses = _dialled(topology, solicitor, acceptor, site)
    first = number % len(addresses)
    urls = [f"{login}@{address}" for address in (*addresses[first:], *addresses[:first])]
    return {
        **({"url": urls[0]} if len(urls) == 1 else {"urls": urls, "no_randomize": True}),
        **_tls(site, topology.region(solicitor).servers[number], ca_file=CA_FILE),
        "account": link_account(acceptor),
        "compression": LINK_COMPRESSION,
        "request_isolation": True,
    }


def to_text(settings: Mapping[str, Value]) -> str:
    """nats-server's configuration file with these settings, in their order.

    The format (docs.nats.io, "Configuration") is nearly a superset of JSON: it writes control
    characters as `\\x01`.
    """
    texts = {
        key: _CONTROL.sub(_hex_escape, json.dumps(value, indent=2, ensure_ascii=False))
        for key, value in settings.items()
    }
    return "".join(f"{key}: {text}\n" for key, text in texts.items())


# Escapes of JSON that nats-server lacks; an escaped backslash is matched to be passed over.
_CONTROL = re.compile(r"\\(\\|b|f|u00([0-9a-f]{2}))")


def _hex_escape(escape: re.Match[str]) -> str:
    known = {"\\": r"\\", "b": r"\x08", "f": r"\x0c"}
    return known.get(escape[1]) or rf"\x{escape[2]}"
