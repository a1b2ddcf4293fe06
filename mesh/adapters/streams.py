"""The JetStream streams that a region keeps: how they are set, made, and found to be altered.

Who alters a stream can have it publish whatever it takes in elsewhere, so routers may not: the user
`setup` makes both streams once, with `mesh infra streams` or by `mesh up`, and routers look every
CHECK_S whether they are as they should be. What is compared is everything that the server says of
a stream: a setting that is not wanted and is there all the same counts as well, also one that this
program does not know yet.

Both are on disk, so that nobody has to make them anew when nats-server was restarted. For the
heartbeats' that costs the server 7.5 µs of CPU a heartbeat instead of 6.2 in memory, and 600 bytes
written; the rejected alternative is a process that has the setup user's password all the time.
Of a heartbeat only the last of each replica counts. The lease's numbers must go on, and its stream
must be there when no router is left.
"""

import json
from collections.abc import Mapping
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, RePublish, RetentionPolicy, StorageType, StreamConfig

from infra import bus
from schemas import subjects
from schemas.ids import RegionId

LEASE_BYTES_MAX = 4096
CHECK_S = 30.0  # between two looks of a router at its streams
REQUEST_S = 5.0
# A write that names the last one it knows; and what nats-server says, "wrong last sequence: 17",
# with this code, where it is not the last any more.
H_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
WRONG_LAST_SEQUENCE = 10071
MADE, PUT_RIGHT, AS_IT_SHOULD_BE = "made", "put right", "as it should be"  # what `set_up` did
_NAME_IN_USE = 10058  # by a stream with other settings
_INFO = "$JS.API.STREAM.INFO."
# What the server fills in where nothing was asked for; all else must be unset.
_FILLED_IN: Mapping[str, object] = {
    "num_replicas": 1,
    "duplicate_window": 120_000_000_000,
    "compression": "none",
}
_SERVERS_OWN = "_nats."  # keys of metadata


class StreamsUnusable(Exception):
    """A stream could not be made, or not be put right; the message says what to do."""


def heartbeats(region: RegionId) -> StreamConfig:
    """The last heartbeat of every replica. Nobody waits for an acknowledgement."""
    return StreamConfig(
        name=subjects.STREAM_HEARTBEATS,
        subjects=[subjects.heartbeat(region, subjects.ANY)],
        storage=StorageType.FILE,
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


def kept(region: RegionId, *, has_peers: bool) -> tuple[StreamConfig, ...]:
    """Those that a region keeps. Without peers nobody keeps leases."""
    return (heartbeats(region), lease(region)) if has_peers else (heartbeats(region),)


def differences(wanted: StreamConfig, found: Mapping[str, Any]) -> list[str]:
    """What is otherwise than it is made. `found`: its settings, as the server's JSON has them."""
    asked = {name: value for name, value in wanted.as_dict().items() if _plain(name, value)}
    should = {**_FILLED_IN, **asked}
    return [
        f"{name} is {json.dumps(found.get(name))}"
        for name in sorted({*should, *found})
        if _plain(name, found.get(name)) != _plain(name, should.get(name))
    ]


def _plain(name: str, value: object) -> object:
    """What it means: a setting that is off or without a limit is none."""
    if name == "metadata" and isinstance(value, Mapping):
        value = {key: one for key, one in value.items() if not str(key).startswith(_SERVERS_OWN)}
    if isinstance(value, Mapping):
        value = {key: one for key, one in value.items() if one not in (None, "", False, 0)}
    return None if value in (None, False, 0, -1, "") or value == {} or value == [] else value


async def altered(client: Client, wanted: StreamConfig) -> list[str]:
    """What is otherwise than it should be with a stream on the server, or that there is none.

    Raises nats.errors.Error if JetStream can't be asked.
    """
    answer = await client.request(f"{_INFO}{wanted.name}", b"", timeout=REQUEST_S)
    try:
        told = json.loads(answer.data)
        error = told.get("error")
        if error is not None:
            return [str(error.get("description"))]
        return differences(wanted, told["config"])
    except (ValueError, KeyError, AttributeError):
        return [f"its settings can't be read: {answer.data[:200]!r}"]


async def set_up(address: bus.BusAddress, region: RegionId, *, has_peers: bool) -> dict[str, str]:
    """Make a region's streams, or put them right; what was done, by stream.

    `address`: as the setup user. Raises infra.bus.BusUnreachable, StreamsUnusable.
    """
    client = await bus.connect(address, name="mesh setup", inbox_prefix=subjects.INBOX_ROOT)
    try:
        wanted = kept(region, has_peers=has_peers)
        return {str(config.name): await _set_up(client, config) for config in wanted}
    finally:
        await bus.close(client)


async def _set_up(client: Client, config: StreamConfig) -> str:
    stream = client.jetstream(timeout=REQUEST_S)
    done = AS_IT_SHOULD_BE
    try:
        try:
            if await altered(client, config):
                await stream.add_stream(config)
                done = MADE
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            await stream.update_stream(config)
            done = PUT_RIGHT
        left = await altered(client, config)
    except (nats.js.errors.Error, nats.errors.Error, TimeoutError) as error:
        left = [str(error) or type(error).__name__]
    if left:
        raise StreamsUnusable(
            f"stream {config.name}: {', '.join(left)}; if this can't be changed, remove the stream "
            f"as the user setup (`nats stream rm {config.name}`) and run this again"
        )
    return done
