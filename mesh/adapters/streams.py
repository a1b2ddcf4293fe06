"""The JetStream streams that a region keeps: how they are set, made, and found to be altered.

A user that may alter a stream can have it republish its messages on any subject, so routers may
not: the user `setup` makes them once, with `mesh infra streams` or by `mesh up`, and
routers check them every CHECK_S. Every setting that the server reports is compared: one that is set
and should not be counts as a difference too, even one that this program does not know yet. The
user `batch-setup` makes those of batch jobs (`mesh.batch.streams`) in the same way.

All are on disk, so that they outlive a restart of nats-server. For the heartbeats' that costs the
server 7.5 µs of CPU a heartbeat instead of 6.2 in memory, and 600 bytes written; the rejected
alternative is a process that has the setup user's password all the time. Only the last heartbeat of
each replica counts. The lease's sequence numbers must continue, and its stream must exist when no
router is left.

What the server acknowledges has been synced to disk (`infra.nats.region_config.SYNC_INTERVAL`), but
for heartbeats, one every 0.1 s of each replica: with `persist_mode: async` the server syncs none of
them [tried, 2.12.7, 2.14.0, 2.15.1]. It is given only as a stream is made, so one of an earlier
version is made anew: its last heartbeats come again within 0.1 s. So is one of a region that has
three servers now: there it is in memory.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import (
    DiscardPolicy,
    PersistMode,
    RePublish,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from infra import bus
from infra.batch_table import BatchTable
from infra.topology import Topology
from mesh.batch import streams as batch_streams
from schemas import subjects
from schemas.control import CONTROL_BYTES_MAX, HISTORY_MAX
from schemas.ids import RegionId

LEASE_BYTES_MAX = 4096
CHECK_S = 30.0  # between two checks of a router
REQUEST_S = 5.0
LEADER_S = 15.0  # that three servers may take to find each other and to vote: 9 s at most
LEADER_TRY_S = 0.5
# A write that names the last one it knows; and what nats-server says, "wrong last sequence: 17",
# with this code, where it is not the last any more. A stream with copies may use the other code,
# which comes without the number, while a write before it is still being copied.
H_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
WRONG_LAST_SEQUENCE, WRONG_LAST_UNNUMBERED = 10071, 10164
WRONG_LAST = (WRONG_LAST_SEQUENCE, WRONG_LAST_UNNUMBERED)
MADE, PUT_RIGHT, AS_IT_SHOULD_BE = "made", "put right", "as it should be"  # what `set_up` did
_NAME_IN_USE = 10058  # by a stream with other settings
_INFO = "$JS.API.STREAM.INFO."
# What the server fills in by default; all else must be unset.
_FILLED_IN: Mapping[str, object] = {
    "num_replicas": 1,
    "duplicate_window": 120_000_000_000,
    "compression": "none",
}
_SERVERS_OWN = "_nats."  # keys of metadata
_PERSIST, _STORAGE = "persist_mode", "storage"
_TEXT = "description"  # for people: streams of the version before have none, and are no worse


class StreamsUnusable(Exception):
    """A stream could not be made or repaired; the message says what to do."""


def heartbeats(region: RegionId) -> StreamConfig:
    """The last heartbeat of every replica. Publishers wait for no acknowledgement."""
    return StreamConfig(
        name=subjects.STREAM_HEARTBEATS,
        description=f"The last heartbeat of every replica of {region}",
        subjects=[subjects.heartbeat(region, subjects.ANY)],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        no_ack=True,
        allow_direct=True,
        persist_mode=PersistMode.ASYNC,
    )


def lease(region: RegionId) -> StreamConfig:
    """The last write of the region's lease; accepted writes are republished with their number."""
    return StreamConfig(
        name=subjects.STREAM_LEASES,
        description=f"The lease of {region}: which region's routers own its replicas",
        subjects=[subjects.lease(region)],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        max_msg_size=LEASE_BYTES_MAX,
        republish=RePublish(src=subjects.lease(region), dest=subjects.leased(region)),
        allow_direct=True,
    )


def control(region: RegionId) -> StreamConfig:
    """What operators ordered, and what they had ordered before; republished with its number."""
    return StreamConfig(
        name=subjects.STREAM_CONTROL,
        description=f"What operators ordered in {region}: which replicas are drained, who, why",
        subjects=[subjects.control(region)],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_msgs=HISTORY_MAX,
        max_msg_size=CONTROL_BYTES_MAX,
        republish=RePublish(src=subjects.control(region), dest=subjects.controlled(region)),
        allow_direct=True,
    )


def kept(region: RegionId, *, has_peers: bool, servers: int = 1) -> tuple[StreamConfig, ...]:
    """Those that a region keeps, on each of so many servers; leases only if it has peers."""
    leases = (lease(region),) if has_peers else ()
    found = (_on_all(heartbeats(region), servers), *leases, control(region))
    return tuple(replace(config, num_replicas=servers) for config in found)


def _on_all(beats: StreamConfig, servers: int) -> StreamConfig:
    """Of several servers each keeps heartbeats in memory: a replicated stream on disk is synced for
    each message, `persist_mode: async` is refused [2.15.1]."""
    if servers == 1:
        return beats
    return replace(beats, storage=StorageType.MEMORY, persist_mode=None)


def differences(wanted: StreamConfig, found: Mapping[str, Any]) -> list[str]:
    """Settings that differ from `wanted`. `found`: the server's, as its JSON has them."""
    asked = {name: value for name, value in wanted.as_dict().items() if _plain(name, value)}
    should = {**_FILLED_IN, **asked}
    return [
        f"{name} is {json.dumps(found.get(name))}"
        for name in sorted({*should, *found} - {_TEXT})
        if _plain(name, found.get(name)) != _plain(name, should.get(name))
    ]


def _plain(name: str, value: object) -> object:
    """The value in one form: a setting that is off or unlimited is None."""
    if name == "metadata" and isinstance(value, Mapping):
        value = {key: one for key, one in value.items() if not str(key).startswith(_SERVERS_OWN)}
    if isinstance(value, Mapping):
        value = {key: one for key, one in value.items() if one not in (None, "", False, 0)}
    return None if value in (None, False, 0, -1, "") or value == {} or value == [] else value


async def altered(client: Client, wanted: StreamConfig, *, also_text: bool = False) -> list[str]:
    """What differs in a stream on the server, or that there is none. `also_text`: its description
    too, and what a stream of the version before lacks.

    Raises nats.errors.Error if JetStream does not answer.
    """
    answer = await client.request(f"{_INFO}{wanted.name}", b"", timeout=REQUEST_S)
    try:
        reply = json.loads(answer.data)
        error = reply.get("error")
        if error is not None:
            return [str(error.get("description"))]
        config = reply["config"]
        if not also_text:  # without it the stream of the version before is slower, and no worse
            config.setdefault(_PERSIST, wanted.persist_mode)
        other = also_text and config.get(_TEXT) != wanted.description
        return [*differences(wanted, config), *[f"{_TEXT} is {config.get(_TEXT)!r}"] * other]
    except (ValueError, KeyError, AttributeError):
        return [f"its settings can't be read: {answer.data[:200]!r}"]


async def set_up(
    address: bus.BusAddress, region: RegionId, *, has_peers: bool, servers: int = 1
) -> dict[str, str]:
    """Make a region's streams, or repair them; what was done, by stream.

    `address`: as the setup user; it may name fewer than the `servers` that the region has. Raises
    infra.bus.BusUnreachable, StreamsUnusable.
    """
    advice = (
        "if this can't be changed, remove the stream as the user setup (`nats stream rm {}`) and "
        "run this again"
    )
    wanted = kept(region, has_peers=has_peers, servers=servers)
    return await _set_up_all(address, subjects.INBOX_ROOT, wanted, advice)


async def set_up_batch(
    address: bus.BusAddress, limits: BatchTable, servers: int = 1
) -> dict[str, str]:
    """The same for the streams of its batch jobs. `address`: as the user batch-setup."""
    advice = (
        "if [batch] of mesh.toml was changed, run `mesh infra nats`, reload nats-server, and run "
        "this again; to remove the stream (`nats --inbox-prefix "
        f"{subjects.INBOX_BATCH_SETUP} stream rm {{}}`, as the user batch-setup) loses what it "
        "holds"
    )
    wanted = batch_streams.kept(limits, servers)
    return await _set_up_all(address, subjects.INBOX_BATCH_SETUP, wanted, advice)


async def set_up_region(
    topology: Topology,
    region: RegionId,
    setup: bus.BusAddress,
    batch_setup: bus.BusAddress | None,
) -> dict[str, str]:
    """All that mesh.toml wants there, likewise. `batch_setup`: None where there is no such user."""
    servers, has_peers = len(topology.region(region).servers), bool(topology.peers(region))
    done = await set_up(setup, region, has_peers=has_peers, servers=servers)
    if not topology.region(region).batch_runners:
        return done
    if batch_setup is None:
        raise StreamsUnusable(
            f"no batch-setup.env of {region}, which has batch runners: run `mesh infra nats`, and "
            "restart or reload its nats-server"
        )
    return done | await set_up_batch(batch_setup, topology.batch, servers)


async def _set_up_all(
    address: bus.BusAddress, inbox: str, wanted: Sequence[StreamConfig], advice: str
) -> dict[str, str]:
    client = await bus.connect(address, name="mesh setup", inbox_prefix=inbox)
    try:
        first = wanted[0]
        is_made = first.num_replicas != 1 and await _until_led(client, first)
        done = {str(config.name): await _set_up(client, config, advice) for config in wanted}
        return done | {str(first.name): MADE} if is_made else done
    finally:
        await bus.close(client)


async def _until_led(client: Client, first: StreamConfig) -> bool:
    """Wait until a cluster has chosen its leader and knows its servers, seconds after its start:
    until it has that stream. Not for longer than LEADER_S. Whether this made the stream."""
    stream = client.jetstream(timeout=LEADER_TRY_S)
    with suppress(TimeoutError):
        async with asyncio.timeout(LEADER_S):
            while True:
                try:
                    return bool((await stream.add_stream(first)).did_create)
                except nats.js.errors.BadRequestError as error:
                    if error.err_code == _NAME_IN_USE:
                        return False
                except (nats.js.errors.Error, nats.errors.Error):
                    pass  # no leader, no peers yet
                await asyncio.sleep(LEADER_TRY_S)
    return False


async def _set_up(client: Client, config: StreamConfig, advice: str) -> str:
    stream = client.jetstream(timeout=REQUEST_S)
    done = AS_IT_SHOULD_BE
    try:
        found = await altered(client, config, also_text=True)
        try:
            if found:
                await stream.add_stream(config)
                done = MADE
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            is_fixed = any(difference.startswith((_PERSIST, _STORAGE)) for difference in found)
            if config.name == subjects.STREAM_HEARTBEATS and is_fixed:
                # The server does not change that. What such a stream holds is sent again anyway.
                await stream.delete_stream(str(config.name))
                await stream.add_stream(config)
            else:
                await stream.update_stream(config)
            done = PUT_RIGHT
        left = await altered(client, config, also_text=True)
    except (nats.js.errors.Error, nats.errors.Error, TimeoutError) as error:
        left = [str(error) or type(error).__name__]
    if left:
        problem = f"stream {config.name}: {', '.join(left)}"
        raise StreamsUnusable(f"{problem}; {advice.format(config.name)}")
    return done
