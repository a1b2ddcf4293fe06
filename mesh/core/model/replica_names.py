"""What a replica is called in a router's own tables.

Replica names are unique inside a region only, and a router that has adopted a region has replicas
of several. So an adopted one is known as `<region>/<replica>`; a slash is in no name.
"""

from typing import NamedTuple

from schemas.ids import RegionId, ReplicaId

SLASH = "/"


class RegionAndReplica(NamedTuple):
    """A known name taken apart; `region` is None for a replica of this region."""

    region: RegionId | None
    replica: ReplicaId


def replica_name_at(region: RegionId, replica: ReplicaId, home: RegionId) -> ReplicaId:
    """The name in the tables of a router of `home`."""
    return replica if region == home else ReplicaId(f"{region}{SLASH}{replica}")


def is_adopted(name: ReplicaId) -> bool:
    """Whether that is a replica of another region."""
    return SLASH in name


def split_replica_name(name: ReplicaId) -> RegionAndReplica:
    """The name on the bus."""
    region, slash, replica = name.rpartition(SLASH)
    return RegionAndReplica(RegionId(region) if slash else None, ReplicaId(replica))
