"""One region's nats-server: its settings, made from the topology.

Regions are joined pairwise by leaf links, and each link ends, on both sides, in an account that
holds nothing else (`LINK-<peer>`). What of it reaches the region's own account `MESH`, and what
goes out, is listed there as stream exports and imports, one for each pattern that
`permissions.spoken` gives. So each side guards itself with a list of what is allowed, whatever the
other side sends or asks for, and nothing can pass from one peer to the next. The accepting side
says the same once more as the permissions of the user that the peer logs in as: a peer that
ignores them is cut off.

Rejected:
- every link in the one account `MESH`, with the accepting user's permissions alone. The soliciting
  side has then only deny lists, and a subject that it denies to come in may not go out either:
  once a wildcard subscription meets a `deny_imports`, the server applies that list to deliveries
  *to* the peer too [tried, 2.15.1]. A region could forge its peers' own digests.
- a hub that all regions join: its loss parts them all, and two hops cost two round trips.
- gateways: one interest graph over all regions, and no permissions per region.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.address import Address
from infra.nats import permissions
from infra.nats.conf import Value
from infra.nats.permissions import Permissions
from infra.topology import Topology
from schemas.ids import RegionId, ReplicaId

ACCOUNT = "MESH"
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


def operator_user(region: RegionId) -> User:
    """Who people log in as to inspect a region."""
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


def users(topology: Topology) -> Iterator[User]:
    """Everyone who needs a password."""
    for name, region in topology.regions.items():
        yield from (router_user(name), operator_user(name), system_user(name))
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


def _accounts(topology: Topology, name: RegionId, site: Site) -> dict[str, Value]:
    peers = topology.peers(name)
    ground = topology.ground
    said_to = {peer: permissions.spoken(name, peer, ground) for peer in peers}
    heard_from = {peer: permissions.spoken(peer, name, ground) for peer in peers}
    links: dict[str, Value] = {
        link_account(peer): {
            "users": _link_users(topology, name, peer, site),
            "exports": [_export(subject, [ACCOUNT]) for subject in heard_from[peer]],
            "imports": [_import(subject, ACCOUNT) for subject in said_to[peer]],
        }
        for peer in peers
    }
    listeners: dict[str, list[str]] = {}
    for peer, said in said_to.items():
        for subject in said:
            listeners.setdefault(subject, []).append(link_account(peer))
    mesh: dict[str, Value] = {
        "jetstream": "enabled",
        "users": [*_client_users(topology, name, site)],
        "exports": [_export(subject, to) for subject, to in sorted(listeners.items())],
        "imports": [
            _import(subject, link_account(peer))
            for peer, heard in heard_from.items()
            for subject in heard
        ],
    }
    system = {"users": [_user(system_user(name), permissions.system(), site)]}
    return {ACCOUNT: mesh, **links, SYSTEM_ACCOUNT: system}


def _export(subject: str, to: list[str]) -> Value:
    return {"stream": subject, "accounts": to}


def _import(subject: str, account: str) -> Value:
    return {"stream": {"account": account, "subject": subject}}


def _client_users(topology: Topology, name: RegionId, site: Site) -> Iterator[Value]:
    yield _user(router_user(name), permissions.router(name, topology.ground), site)
    yield _user(operator_user(name), permissions.operator(name), site)
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
            "subscribe": {
                "allow": allowed.subscribe,
                **({"deny": allowed.never_heard} if allowed.never_heard else {}),
            },
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
