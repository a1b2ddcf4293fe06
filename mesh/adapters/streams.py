"""The JetStream streams that a region's routers keep, as settings.

Heartbeats are in memory: only the last of each replica counts, and the next comes in 100 ms. The
lease is on disk, a few bytes over and over, because its numbers must go on when the server was
restarted, and because its stream must be there when no router is left to make it.
"""

from nats.js.api import DiscardPolicy, RePublish, RetentionPolicy, StorageType, StreamConfig

from schemas import subjects
from schemas.ids import RegionId

LEASE_BYTES_MAX = 4096
# A write that names the last one it knows; and what nats-server says, "wrong last sequence: 17",
# with this code, where it is not the last any more.
H_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
WRONG_LAST_SEQUENCE = 10071


def heartbeats(region: RegionId) -> StreamConfig:
    """The last heartbeat of every replica. Nobody waits for an acknowledgement."""
    return StreamConfig(
        name=subjects.STREAM_HEARTBEATS,
        subjects=[subjects.heartbeat(region, subjects.ANY)],
        storage=StorageType.MEMORY,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        no_ack=True,
        allow_direct=True,
    )


def lease(region: RegionId) -> StreamConfig:
    """The last write of the region's lease; each one taken is said again, with its number."""
    return StreamConfig(
        name=subjects.STREAM_LEASES,
        subjects=[subjects.lease(region)],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        max_msg_size=LEASE_BYTES_MAX,
        republish=RePublish(src=subjects.lease(region), dest=subjects.leased(region)),
        allow_direct=True,
    )
