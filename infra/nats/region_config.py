"""One region's nats-server: its settings, made from the topology.

Leaf links are pairwise. Two halves keep a full mesh of them from echoing, and each alone fails
(with isolation alone one message circles for ever; with permissions alone the servers see a loop
and cut the links): the accepting server gives each peer a user that may speak only for itself,
and both sides keep their other peers' interest out of the link (`isolate_leafnode_interest`,
`request_isolation`).

Each side also guards itself, for the other may be broken or bought. The acceptor's guard is its
allow-list; a remote can only deny, so the solicitor denies everything the mesh has a name for and
the peer no right to say (`deny_imports`) or hear (`deny_exports`).

Rejected: a hub that all regions join (its loss parts them all, and two hops cost two round trips),
and gateways (they need TLS or shared cluster credentials and know no per-region permissions).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.address import Address
from infra.nats import permissions
from infra.nats.conf import Value
from infra.nats.permissions import Permissions
from infra.topology import Region, Topology
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
        "accounts": {
            ACCOUNT: {
                "jetstream": "enabled",
                "users": [
                    *_client_users(name, region, site),
                    *_link_users(topology, name, site),
                ],
            },
            SYSTEM_ACCOUNT: {"users": [_user(system_user(name), permissions.system(), site)]},
        },
        "system_account": SYSTEM_ACCOUNT,
        **_leafnodes(topology, name, site),
    }


def _client_users(name: RegionId, region: Region, site: Site) -> Iterator[Value]:
    yield _user(router_user(name), permissions.router(name), site)
    yield _user(operator_user(name), permissions.operator(name), site)
    for replica in region.replicas:
        yield _user(agent_user(name, replica), permissions.agent(name, replica), site)


def _link_users(topology: Topology, acceptor: RegionId, site: Site) -> Iterator[Value]:
    for solicitor in _solicitors(topology, acceptor):
        # Seen from the server that accepts: what its user publishes comes in over the link.
        allowed = Permissions(
            publish=permissions.spoken(solicitor, acceptor),
            subscribe=permissions.spoken(acceptor, solicitor),
        )
        yield _user(link_user(acceptor, solicitor), allowed, site, connection="LEAFNODE")


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
    accepts = any(_solicitors(topology, name))
    remotes = [_remote(topology, name, acceptor, site) for acceptor in _acceptors(topology, name)]
    if not accepts and not remotes:
        return {}
    listener: dict[str, Value] = {
        "listen": str(topology.region(name).leaf.listen),
        "no_advertise": True,
    }
    return {
        "leafnodes": {
            **(listener if accepts else {}),
            "isolate_leafnode_interest": True,
            "reconnect": LEAF_RECONNECT,
            "remotes": remotes,
        }
    }


def _remote(
    topology: Topology, solicitor: RegionId, acceptor: RegionId, site: Site
) -> dict[str, Value]:
    user = link_user(acceptor, solicitor)
    address = site.leaf_addresses.get((solicitor, acceptor), topology.region(acceptor).leaf)
    regions = topology.regions.keys()
    return {
        "url": f"nats-leaf://{user.name}:{site.passwords[user.key]}@{address}",
        "account": ACCOUNT,
        "request_isolation": True,
        "deny_imports": permissions.unspoken(acceptor, solicitor, regions),
        "deny_exports": permissions.unspoken(solicitor, acceptor, regions),
    }


def _solicitors(topology: Topology, acceptor: RegionId) -> list[RegionId]:
    return [
        peer
        for peer in topology.peers(acceptor)
        if topology.link(acceptor, peer).acceptor == acceptor
    ]


def _acceptors(topology: Topology, solicitor: RegionId) -> list[RegionId]:
    return [
        peer
        for peer in topology.peers(solicitor)
        if topology.link(solicitor, peer).solicitor == solicitor
    ]
