"""One region's nats-server: its settings, made from the topology.

Regions are joined pairwise by leaf links, and each link ends, on both sides, in an account that
holds nothing else (`LINK-<peer>`). What of it reaches the region's own account `MESH`, and what
goes out, is listed there as stream exports and imports, one for each pattern that
`permissions.spoken` gives. So each side guards itself with a list of what is allowed, whatever the
other side sends or asks for, and nothing can pass from one peer to the next. The accepting side
says the same once more as the permissions of the user that the peer logs in as: a peer that
ignores them is cut off.

Two more accounts keep answers of the server apart. JetStream answers whatever reply subject a
request names, and asks nobody's permissions: a request could have it write where its sender may
not. So the streams are in an account of their own, `STATE`, and people who look on are in
`OBSERVE`. Between these and `MESH` requests are *services*: the server replaces the reply subject,
and brings the answer back to the account that asked, and nowhere else. Peers write a lease this
way too. Streams can be made, altered and removed inside `STATE` only, where nobody but the user
`setup` logs in.

Rejected:
- every link in the one account `MESH`, with the accepting user's permissions alone. The soliciting
  side has then only deny lists, and a subject that it denies to come in may not go out either:
  once a wildcard subscription meets a `deny_imports`, the server applies that list to deliveries
  *to* the peer too [tried, 2.15.1]. A region could forge its peers' own digests.
- a hub that all regions join: its loss parts them all, and two hops cost two round trips.
- gateways: one interest graph over all regions, and no permissions per region.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.address import Address
from infra.nats import permissions
from infra.nats.conf import Value
from infra.nats.permissions import Permissions
from infra.topology import Topology
from schemas import subjects
from schemas.catalog import CHANNELS, Carrier, Role
from schemas.ids import RegionId, ReplicaId

ACCOUNT = "MESH"
STATE_ACCOUNT = "STATE"
OBSERVE_ACCOUNT = "OBSERVE"
SYSTEM_ACCOUNT = "SYS"
MEBIBYTE = 1024 * 1024

# A lost peer or process is noticed after ping_max unanswered pings: 4 to 6 s. Heartbeats and
# digests notice sooner; this ends the connection itself.
PING_INTERVAL = "2s"
PING_MAX = 2
WRITE_DEADLINE = "5s"  # a client that takes nothing for longer is a slow consumer, and cut off
LEAF_RECONNECT = "1s"

PREFIX_KEY = "mesh/prefix-key"  # kept beside the passwords: of the hashes that cross regions

LeafAddresses = Mapping[tuple[RegionId, RegionId], Address]


@dataclass(frozen=True, slots=True)
class User:
    """Someone who logs in at one region's server. `key` names the password, and no other's."""

    key: str
    name: str


@dataclass(frozen=True, slots=True)
class Site:
    """What a region's server needs besides the topology.

    `leaf_addresses`: (solicitor, acceptor) → where to dial instead of the acceptor's own address,
    when something stands between (a delaying proxy, a tunnel).
    """

    passwords: Mapping[str, str]
    state_directory: Path
    leaf_addresses: LeafAddresses = field(default_factory=dict)


def router_user(region: RegionId) -> User:
    """Who a region's routers log in as."""
    return User(f"{region}/router", "router")


def observer_user(region: RegionId) -> User:
    """Who people and dashboards log in as to see a region's state."""
    return User(f"{region}/observer", "observer")


def setup_user(region: RegionId) -> User:
    """Who makes a region's streams, and puts them right."""
    return User(f"{region}/setup", "setup")


def operator_user(region: RegionId) -> User:
    """Who people log in as to examine a region."""
    return User(f"{region}/operator", "operator")


def system_user(region: RegionId) -> User:
    """Who people log in as to inspect a region's server itself."""
    return User(f"{region}/system", "system")


def agent_user(region: RegionId, replica: ReplicaId) -> User:
    """Who one replica's agent logs in as."""
    return User(f"{region}/agent-{replica}", f"agent-{replica}")


def link_user(acceptor: RegionId, solicitor: RegionId) -> User:
    """Who the soliciting region's server logs in as at the accepting region's server."""
    return User(f"{acceptor}/link-{solicitor}", f"link-{solicitor}")


def link_account(peer: RegionId) -> str:
    """The account that holds nothing but the link to one peer."""
    return f"LINK-{peer}"


def region_users(name: RegionId) -> tuple[User, ...]:
    """Everyone of a region beside its agents."""
    makers = (router_user, observer_user, operator_user, setup_user, system_user)
    return tuple(make(name) for make in makers)


def users(topology: Topology) -> Iterator[User]:
    """Everyone who needs a password."""
    for name, region in topology.regions.items():
        yield from region_users(name)
        yield from (agent_user(name, replica) for replica in region.replicas)
    yield from (link_user(link.acceptor, link.solicitor) for link in topology.links)


def settings(topology: Topology, name: RegionId, site: Site) -> dict[str, Value]:
    """The whole configuration of one region's nats-server."""
    region, limits = topology.region(name), topology.nats
    monitor: dict[str, Value] = {"http": str(region.monitor.listen)} if region.monitor else {}
    return {
        "server_name": f"{topology.mesh.name}-{name}",
        "listen": str(region.nats.listen),
        **monitor,
        "max_payload": limits.max_payload_mib * MEBIBYTE,
        "max_pending": limits.max_pending_mib * MEBIBYTE,
        "write_deadline": WRITE_DEADLINE,
        "ping_interval": PING_INTERVAL,
        "ping_max": PING_MAX,
        "jetstream": {
            "domain": name,
            "store_dir": str(site.state_directory),
            "max_memory_store": limits.jetstream_memory_mib * MEBIBYTE,
            "max_file_store": limits.jetstream_disk_mib * MEBIBYTE,
        },
        "accounts": _accounts(topology, name, site),
        "system_account": SYSTEM_ACCOUNT,
        **_leafnodes(topology, name, site),
    }


@dataclass(frozen=True, slots=True)
class _Flow:
    """What one account lets another have. `kind`: stream (messages) or service (requests)."""

    kind: str
    subject: str
    exporter: str
    importer: str


def _accounts(topology: Topology, name: RegionId, site: Site) -> dict[str, Value]:
    logins: dict[str, list[Value]] = {
        ACCOUNT: [*_client_users(topology, name, site)],
        STATE_ACCOUNT: [_user(setup_user(name), permissions.setup(), site)],
        OBSERVE_ACCOUNT: [
            _user(observer_user(name), permissions.observer(), site),
            _user(operator_user(name), permissions.operator(), site),
        ],
    }
    for peer in topology.peers(name):
        logins[link_account(peer)] = _link_users(topology, name, peer, site)
    flows = [*_state_flows(name), *_observe_flows(topology, name)]
    for peer in topology.peers(name):
        flows += _link_flows(topology, name, peer)
    accounts: dict[str, Value] = {
        account: {
            **({"jetstream": "enabled"} if account == STATE_ACCOUNT else {}),
            "users": users,
            "exports": _exports(flows, account),
            "imports": [_import(flow) for flow in flows if flow.importer == account],
        }
        for account, users in logins.items()
    }
    system = {"users": [_user(system_user(name), permissions.system(), site)]}
    return accounts | {SYSTEM_ACCOUNT: system}


def _state_flows(name: RegionId) -> Iterator[_Flow]:
    """Between the region's routers and agents, and its streams."""
    for row in CHANNELS:
        if row.carrier is Carrier.LAST_VALUE:
            yield _Flow("stream", row.subject(region=name), ACCOUNT, STATE_ACCOUNT)
        elif row.carrier is Carrier.COMPARE_AND_SET:
            yield _Flow("service", row.subject(region=name), STATE_ACCOUNT, ACCOUNT)
        elif row.carrier is Carrier.REPUBLISHED:
            yield _Flow("stream", row.subject(region=name), STATE_ACCOUNT, ACCOUNT)
    for call in (permissions.API_INFO, *permissions.router_reads()):
        yield _Flow("service", call, STATE_ACCOUNT, ACCOUNT)


def _observe_flows(topology: Topology, name: RegionId) -> Iterator[_Flow]:
    """What people who look on may have: operators all that observers have."""
    for subject in permissions.observed(Role.OPERATOR, name, name):
        yield _Flow("stream", subject, _source(subject, name, ACCOUNT), OBSERVE_ACCOUNT)
    for peer in topology.peers(name):
        spoken = permissions.spoken(peer, name, topology.ground)
        for subject in permissions.observed(Role.OPERATOR, name, peer):
            if subject in spoken:
                yield _Flow("stream", subject, link_account(peer), OBSERVE_ACCOUNT)
    for subject in permissions.services():
        yield _Flow("service", subject, ACCOUNT, OBSERVE_ACCOUNT)
    for call in permissions.observer_reads():
        yield _Flow("service", call, STATE_ACCOUNT, OBSERVE_ACCOUNT)
    yield _Flow("stream", permissions.STREAM_EVENTS, STATE_ACCOUNT, OBSERVE_ACCOUNT)


def _link_flows(topology: Topology, name: RegionId, peer: RegionId) -> Iterator[_Flow]:
    """What passes between the region and one peer."""
    link = link_account(peer)
    for subject in permissions.spoken(peer, name, topology.ground):
        if subject == subjects.lease(name):  # the stream answers: to the link alone
            yield _Flow("service", subject, STATE_ACCOUNT, link)
        else:
            yield _Flow("stream", subject, link, ACCOUNT)
    for subject in permissions.spoken(name, peer, topology.ground):
        yield _Flow("stream", subject, _source(subject, name, ACCOUNT), link)


def _source(subject: str, name: RegionId, otherwise: str) -> str:
    """The account that a subject of the region is published in: imports are not passed on."""
    return STATE_ACCOUNT if subject == subjects.leased(name) else otherwise


def _exports(flows: Iterable[_Flow], account: str) -> list[Value]:
    importers: dict[tuple[str, str], list[str]] = {}
    for flow in flows:
        if flow.exporter == account:
            importers.setdefault((flow.kind, flow.subject), []).append(flow.importer)
    return [
        # Of services that many answer, the first answer must not end the others' way.
        {kind: subject, "accounts": to}
        | ({"response_type": "stream"} if subject in permissions.services() else {})
        for (kind, subject), to in sorted(importers.items())
    ]


def _import(flow: _Flow) -> Value:
    return {flow.kind: {"account": flow.exporter, "subject": flow.subject}}


def _client_users(topology: Topology, name: RegionId, site: Site) -> Iterator[Value]:
    yield _user(router_user(name), permissions.router(name, topology.ground), site)
    for replica in topology.region(name).replicas:
        yield _user(agent_user(name, replica), permissions.agent(name, replica), site)


def _link_users(topology: Topology, name: RegionId, peer: RegionId, site: Site) -> list[Value]:
    """Whom the peer's server logs in as, if it is the one to dial."""
    if topology.link(name, peer).acceptor != name:
        return []
    # Seen from the server that accepts: what its user publishes comes in over the link.
    allowed = Permissions(
        publish=permissions.spoken(peer, name, topology.ground),
        subscribe=permissions.spoken(name, peer, topology.ground),
    )
    return [_user(link_user(name, peer), allowed, site, connection="LEAFNODE")]


def _user(
    user: User, allowed: Permissions, site: Site, *, connection: str = "STANDARD"
) -> dict[str, Value]:
    return {
        "user": user.name,
        "password": site.passwords[user.key],
        "allowed_connection_types": [connection],
        "permissions": {
            "publish": {"allow": allowed.publish},
            "subscribe": {"allow": allowed.subscribe},
        },
    }


def _leafnodes(topology: Topology, name: RegionId, site: Site) -> dict[str, Value]:
    links = [topology.link(name, peer) for peer in topology.peers(name)]
    acceptors = [link.acceptor for link in links if link.solicitor == name]
    listener: dict[str, Value] = {
        "listen": str(topology.region(name).leaf.listen),
        "no_advertise": True,
    }
    if not links:
        return {}
    return {
        "leafnodes": {
            **(listener if len(acceptors) < len(links) else {}),
            # Accounts keep links apart already. This, and request_isolation, keeps one copy of a
            # message one copy even where somebody binds two links to one account by hand.
            "isolate_leafnode_interest": True,
            "reconnect": LEAF_RECONNECT,
            "remotes": [_remote(topology, name, acceptor, site) for acceptor in acceptors],
        }
    }


def _remote(
    topology: Topology, solicitor: RegionId, acceptor: RegionId, site: Site
) -> dict[str, Value]:
    user = link_user(acceptor, solicitor)
    address = site.leaf_addresses.get((solicitor, acceptor), topology.region(acceptor).leaf)
    return {
        "url": f"nats-leaf://{user.name}:{site.passwords[user.key]}@{address}",
        "account": link_account(acceptor),
        "request_isolation": True,
    }
