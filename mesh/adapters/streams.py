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
from dataclasses import dataclass, replace
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
    StoreCompression,
    StreamConfig,
)

from infra import bus
from infra.batch_table import BatchTable
from infra.topology import Topology
from mesh.batch import streams as batch_streams
from schemas import subjects
from schemas.control import CONTROL_BYTES_MAX, HISTORY_MAX
from schemas.ids import RegionId
from schemas.keys import HISTORY_MAX as KEY_RECORDS_MAX
from schemas.keys import KEYS_BYTES_MAX
from schemas.usage import DAYS_KEPT, PAGE_BYTES_MAX

LEASE_BYTES_MAX = 4096
DAY_S = 86_400.0
USAGE_BYTES_MAX = 256 * 1024 * 1024  # a quarter of what the server may take on disk
CHECK_S = 30.0  # between two checks of a router
REQUEST_S = 5.0
LEADER_S = 15.0  # that three servers may take to find each other and to vote: 9 s at most
LEADER_TRY_S = 0.5
MADE, PUT_RIGHT, AS_IT_SHOULD_BE = "made", "put right", "as it should be"  # what `set_up` did
_NAME_IN_USE = 10058  # by a stream with other settings
_INVALID_SETTINGS = 10052  # or, of a stream that is there, what can't be changed
AGAIN = "try again once its nats-server answers and has room; `mesh up` does so by itself"
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


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do where the server refuses a stream, and where one that is there stays otherwise.

    Only the second may speak of removing: a server that is silent or full has not lost the stream.
    """

    refused: str
    altered: str


def _kept(**settings: Any) -> StreamConfig:
    """A stream on disk whose oldest messages go where there are too many."""
    limits, old = RetentionPolicy.LIMITS, DiscardPolicy.OLD
    common: dict[str, Any] = {"storage": StorageType.FILE, "retention": limits, "discard": old}
    return StreamConfig(**common, allow_direct=True, **settings)


def heartbeats(region: RegionId) -> StreamConfig:
    """The last heartbeat of every replica. Publishers wait for no acknowledgement."""
    return _kept(
        name=subjects.STREAM_HEARTBEATS,
        description=f"The last heartbeat of every replica of {region}",
        subjects=[subjects.heartbeat(region, subjects.ANY)],
        max_msgs_per_subject=1,
        no_ack=True,
        persist_mode=PersistMode.ASYNC,
    )


def lease(region: RegionId) -> StreamConfig:
    """The last write of the region's lease; accepted writes are republished with their number."""
    return _kept(
        name=subjects.STREAM_LEASES,
        description=f"The lease of {region}: which region's routers own its replicas",
        subjects=[subjects.lease(region)],
        max_msgs_per_subject=1,
        max_msg_size=LEASE_BYTES_MAX,
        republish=RePublish(src=subjects.lease(region), dest=subjects.leased(region)),
    )


def control(region: RegionId) -> StreamConfig:
    """What operators ordered, and what they had ordered before; republished with its number."""
    return _kept(
        name=subjects.STREAM_CONTROL,
        description=f"What operators ordered in {region}: which replicas are drained, who, why",
        subjects=[subjects.control(region)],
        max_msgs=HISTORY_MAX,
        max_msg_size=CONTROL_BYTES_MAX,
        republish=RePublish(src=subjects.control(region), dest=subjects.controlled(region)),
    )


def keys(region: RegionId) -> StreamConfig:
    """The API keys that routers take, and the records before; republished with its number."""
    return replace(
        control(region),
        name=subjects.STREAM_KEYS,
        description=f"The API keys that routers of {region} take, by their SHA-256",
        subjects=[subjects.keys(region)],
        max_msgs=KEY_RECORDS_MAX,
        max_msg_size=KEYS_BYTES_MAX,
        republish=RePublish(src=subjects.keys(region), dest=subjects.keyed(region)),
    )


def usage(region: RegionId) -> StreamConfig:
    """Accounts of tokens: the last writing of each page. What is older, or too much, is dropped."""
    return _kept(
        name=subjects.STREAM_USAGE,
        description=f"Tokens that clients of {region} used: each page of accounts as last written",
        subjects=[subjects.usage(region, subjects.ANY, subjects.ANY, subjects.ANY)],
        max_msgs_per_subject=1,
        max_msg_size=PAGE_BYTES_MAX,
        max_age=DAYS_KEPT * DAY_S,
        max_bytes=USAGE_BYTES_MAX,
        compression=StoreCompression.S2,
    )


def kept(region: RegionId, *, has_peers: bool, servers: int = 1) -> tuple[StreamConfig, ...]:
    """Those that a region keeps, on each of so many servers; leases only if it has peers."""
    leases = (lease(region),) if has_peers else ()
    found = (
        *(_on_all(heartbeats(region), servers), *leases),
        *(control(region), keys(region), usage(region)),
    )
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


async def altered(client: Client, wanted: StreamConfig) -> list[str]:
    """What differs in a stream on the server, or that there is none.

    Raises nats.errors.Error if JetStream does not answer.
    """
    found = await _settings(client, wanted)
    if isinstance(found, str):
        return [found]
    # Without it the stream of the version before is slower, and no worse.
    return differences(wanted, {_PERSIST: wanted.persist_mode, **found})


async def _settings(client: Client, wanted: StreamConfig) -> Mapping[str, Any] | str:
    """The stream's, as the server's JSON has them; or why there are none to compare."""
    answer = await client.request(f"{_INFO}{wanted.name}", b"", timeout=REQUEST_S)
    try:
        reply = json.loads(answer.data)
        error = reply.get("error")
        return str(error.get("description")) if error is not None else {**reply["config"]}
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"its settings can't be read: {answer.data[:200]!r}"


def _unlike(wanted: StreamConfig, found: Mapping[str, Any] | str) -> list[str]:
    """What differs, its description and what a stream of the version before lacks included."""
    if isinstance(found, str):
        return [found]
    other = found.get(_TEXT) != wanted.description
    return [*differences(wanted, found), *[f"{_TEXT} is {found.get(_TEXT)!r}"] * other]


async def set_up(
    address: bus.BusAddress, region: RegionId, *, has_peers: bool, servers: int = 1
) -> dict[str, str]:
    """Make a region's streams, or repair them; what was done, by stream.

    `address`: as the setup user; it may name fewer than the `servers` that the region has. Raises
    infra.bus.BusUnreachable, StreamsUnusable.
    """
    removing = "remove the stream as the user setup (`nats stream rm {}`) and run this again"
    advice = Advice(refused=AGAIN, altered=f"if this can't be changed, {removing}")
    wanted = kept(region, has_peers=has_peers, servers=servers)
    return await _set_up_all(address, subjects.INBOX_ROOT, wanted, advice)


async def set_up_batch(
    address: bus.BusAddress, limits: BatchTable, servers: int = 1
) -> dict[str, str]:
    """The same for the streams of its batch jobs. `address`: as the user batch-setup."""
    refused = (
        "if [batch] of mesh.toml was changed, run `mesh infra nats`, reload nats-server, and run "
        "this again"
    )
    removing = (
        f"to remove the stream (`nats --inbox-prefix {subjects.INBOX_BATCH_SETUP} stream rm {{}}`, "
        "as the user batch-setup) loses what it holds"
    )
    advice = Advice(refused, f"{refused}; {removing}")
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
    address: bus.BusAddress, inbox: str, wanted: Sequence[StreamConfig], advice: Advice
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


async def _set_up(client: Client, config: StreamConfig, advice: Advice) -> str:
    stream = client.jetstream(timeout=REQUEST_S)
    done, what_now = AS_IT_SHOULD_BE, AGAIN
    found: Mapping[str, Any] | str = ""
    try:
        found = await _settings(client, config)
        try:
            if _unlike(config, found):
                await stream.add_stream(config)
                done = MADE
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            is_fixed = any(one.startswith((_PERSIST, _STORAGE)) for one in _unlike(config, found))
            if config.name == subjects.STREAM_HEARTBEATS and is_fixed:
                # The server does not change that. What such a stream holds is sent again anyway.
                await stream.delete_stream(str(config.name))
                await stream.add_stream(config)
            else:
                await stream.update_stream(config)
            done = PUT_RIGHT
        found = await _settings(client, config)
        left, is_other = _unlike(config, found), not isinstance(found, str)
    except (nats.js.errors.Error, nats.errors.Error, TimeoutError) as error:
        left, is_other = [str(error) or type(error).__name__], False
        if isinstance(error, nats.js.errors.APIError):
            is_other = error.err_code == _INVALID_SETTINGS and not isinstance(found, str)
            is_passing = isinstance(error, nats.js.errors.ServiceUnavailableError)
            what_now = AGAIN if is_passing else advice.refused
    if left:
        what_now = advice.altered.format(config.name) if is_other else what_now
        raise StreamsUnusable(f"stream {config.name}: {', '.join(left)}; {what_now}")
    return done
