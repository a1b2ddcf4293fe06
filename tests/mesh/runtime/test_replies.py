"""What routers, batch runners and agents can be made to publish by a message's reply subject.

On a server without users and rules, so that nothing but the processes themselves refuses: every
channel that a role receives is sent every body, with every reply subject that may get no answer.
"""

import asyncio
import itertools

import orjson
import pytest
from nats.js.api import StreamConfig

from infra.batch_table import BatchTable
from infra.bus import BusAddress, close, connect
from mesh.adapters import streams
from mesh.core.offline.settings import OfflineSettings
from mesh.runtime.batch_runner import BatchRunner, RunnerConfig
from schemas import exchange, subjects, wire
from schemas.catalog import CHANNELS, Role
from schemas.gossip import TrieAsk, TrieDelta
from schemas.ids import RegionId, RouterId
from schemas.state import OfflineCapacity, OfflineState, encode_state
from tests.support.batch_store import make_streams
from tests.support.flushed import flushed
from tests.support.small_mesh import PATIENT, chat, one_replica
from tests.support.until import PATIENCE_S

NAMES = {"region": "us", "replica": "us-0", "router": "r1", "asker": "eu", "label": "any"}
UPDATE = "$JS.API.STREAM.UPDATE.HEARTBEATS"
# Nobody else says anything there, or what he says is not among the bodies below.
HOSTILE = (
    UPDATE,
    "mesh.us.gossip.digest",
    "mesh.us.gossip.trie",
    "mesh.us.gossip.lease",
    "mesh.us.lease.owner",
    "mesh.us.heartbeat.us-0",
    "mesh.us.replica.us-0.body",
    "mesh.eu.ingress",
    "mesh.eu.lease.owner",
    "_INBOX.us.r1.here",
    "_INBOX.us.r1.ping-eu",
    "_INBOX.us.r1.ping-us",
    "_INBOX.eu.r1.who",
    "_INBOX.eu.r1.lease-1-0a",
    "_INBOX.eu.r1.parcel",
    "_INBOX.eu.r1.7.8",
    "_INBOX.eu.r1",
    "somewhere.else",
)
OWN_REGION = "_INBOX.us.r9.7"  # a client's answer of ours: no peer may have it written
STRANGER = "_INBOX.ap.r9.7"  # of a region that is no peer
TAP = streams.heartbeats("us").as_dict() | {"subjects": ["mesh.us.>"]}
ASKED = {
    exchange.H_REQUEST: "request-1",
    exchange.H_MODEL: "none",
    exchange.H_PATH: "/v1/chat/completions",
    exchange.H_ATTEMPT: "1",
    exchange.H_DEADLINE_MS: "60000",
    exchange.H_HOPS: "1",
    exchange.H_ORIGIN: "eu",
}
BODIES = (
    b"",
    b"12345678",
    orjson.dumps(StreamConfig.from_response(TAP).as_dict()),
    orjson.dumps(chat()),
    wire.encode(TrieAsk("r1", 1, 0)),
    wire.encode(exchange.Cancel("_INBOX.eu.r1.7")),
)
SERVICES = ("$SRV.PING", "$SRV.INFO", "$SRV.STATS.mesh-router", "$SRV.STATS.mesh-agent")


@pytest.fixture
async def mesh(nats_server):
    """A router and an agent of us, to whom eu is a peer that is silent."""
    async with one_replica(nats_server, peers=("us", "eu"), **PATIENT) as mesh:
        yield mesh


@pytest.fixture
async def runner(mesh, nats_server):
    """A batch runner of us, which receives what peers' runners ask of it."""
    limits = BatchTable(files_mib=16, results_mib=16, lines_mib=16, jobs_mib=16, file_mib_max=1)
    await make_streams(nats_server.url, limits)
    config = RunnerConfig(
        region=RegionId("us"),
        router=RouterId("batch-0"),
        peers=(RegionId("eu"),),
        bus=BusAddress(nats_server.url),
        store=BusAddress(nats_server.url),
        limits=limits,
        settings=OfflineSettings(),
        hash_key="test",
        epoch=1,
        seed=7,
    )
    started = BatchRunner(config)
    mesh.stack.push_async_callback(started.close)
    await started.open()
    return started


def heard_by(role: Role) -> list[str]:
    names = NAMES | {"stream": "7"}
    return [row.subject(**names) for row in CHANNELS if role in row.subscribe]


async def answered(client, subject, body, inbox, headers=None):
    """Whether an honest request there has its answer; then those before it were handled."""
    answers = await client.subscribe(inbox)
    await client.publish(subject, body, reply=inbox, headers=headers)
    await answers.next_msg(timeout=PATIENCE_S)
    await answers.unsubscribe()


async def test_no_reply_subject_makes_a_process_publish_where_it_may_not(mesh, runner, nats_server):
    client = await connect(BusAddress(nats_server.url), name="t", inbox_prefix="_INBOX.eu.r1")
    sent, reached = set(), []

    async def note(msg):
        no_responder = (msg.headers or {}).get("Status") == "503"  # the server's own answer
        if (msg.subject, msg.data) not in sent and not no_responder:
            reached.append((msg.subject, msg.data[:200]))

    for subject in HOSTILE:
        await client.subscribe(subject, cb=note)
    await flushed(client)
    asked = [*heard_by(Role.ROUTER), *heard_by(Role.AGENT), *SERVICES]
    requests = list(itertools.product(asked, HOSTILE, BODIES))
    requests += [(subjects.ping("us"), one, b"12345678") for one in (OWN_REGION, STRANGER)]
    requests += [(subjects.ingress("us"), one, BODIES[3]) for one in (OWN_REGION, STRANGER)]
    requests += [(subjects.ping("us"), "_INBOX.eu.r1.ping-us", b"nine byte")]
    await client.subscribe(OWN_REGION, cb=note)
    await client.subscribe(STRANGER, cb=note)
    sent |= {(subject, body) for subject, _, body in requests}
    for subject, reply, body in requests:
        await client.publish(subject, body, reply=reply, headers=ASKED)
    await answered(client, subjects.ping("us"), b"87654321", "_INBOX.eu.r1.ping-us")
    await answered(client, subjects.ingress("us"), BODIES[3], "_INBOX.eu.r1.7", ASKED)
    await answered(client, subjects.work("us", "us-0"), b"", "_INBOX.eu.r1.8", ASKED)
    offline = ASKED | {exchange.H_OFFLINE: "1"}
    await answered(client, subjects.offline("us"), BODIES[3], "_INBOX.eu.r1.9", offline)
    await flushed(client)
    own = own_words(reached)
    assert [one for one in reached if one not in own] == []
    assert await streams.altered(client, streams.heartbeats("us")) == []
    for channel in ("ping", "ingress", "ingress_within", "snapshot"):
        at_least = len(HOSTILE) * len(BODIES)
        counted = mesh.sample("us", "mesh_replies_dropped_total", channel=channel)
        assert counted >= at_least, (channel, counted)
    for channel in ("offline", "offline_within"):
        labels = {"channel": channel}
        name = "mesh_replies_dropped_total"
        counted = runner.metrics.registry.get_sample_value(name, labels) or 0.0
        assert counted >= at_least, (channel, counted)
    await close(client)


def own_words(reached):
    """What the router and the agent say there by themselves: state, in its own form."""
    own = ("mesh.us.gossip.digest", "mesh.us.heartbeat.us-0", "mesh.us.gossip.lease")
    own += ("mesh.us.lease.owner",)
    marks = (b'"replicas_ready"', b'"engine"', b'"owner"')
    return [one for one in reached if one[0] in own and any(mark in one[1] for mark in marks)] + [
        one for one in reached if one[0] == "mesh.us.gossip.trie" and len(one[1]) < 60
    ]


async def test_nobody_speaks_for_another_replica_or_region(mesh, nats_server):
    """A login may say its own heartbeat and digest; what is in them may name no other."""
    client = await connect(BusAddress(nats_server.url), name="t", inbox_prefix="_INBOX.eu.r1")
    replica = mesh.routers["us"].core.replicas.get("us-0")
    beats = await client.subscribe(subjects.heartbeat("us", "us-0"))
    beat = orjson.loads((await beats.next_msg(timeout=PATIENCE_S)).data)
    forged = orjson.dumps(beat | {"epoch": 2**62, "seq": 2**62})
    await client.publish(subjects.heartbeat("us", "us-1"), forged)
    digests = await client.subscribe(subjects.digest("us"))
    digest = orjson.loads((await digests.next_msg(timeout=PATIENCE_S)).data) | {"seq": 2**62}
    await client.publish(subjects.digest("eu"), orjson.dumps(digest | {"region": "ap"}))
    await client.publish(subjects.digest("eu"), orjson.dumps(digest | {"region": "eu"}))
    peers = mesh.routers["us"].core.peers
    await mesh.until(lambda: peers.get("eu") is not None, "eu's own digest")
    assert peers.get("ap") is None
    seen = replica.heartbeat.seq
    await mesh.until(lambda: replica.heartbeat.seq > seen, "another heartbeat of us-0 itself")
    assert replica.heartbeat.epoch == beat["epoch"]
    await asyncio.sleep(0)
    await close(client)


async def test_what_a_stream_sends_to_a_reply_subject_is_nobody_s_word(mesh, nats_server):
    """An agent's heartbeat may hold any bytes; a router's login may read it out, to any subject."""
    client = await connect(BusAddress(nats_server.url), name="t", inbox_prefix="_INBOX.eu.r1")
    digests = await client.subscribe(subjects.digest("us"))
    digest = orjson.loads((await digests.next_msg(timeout=PATIENCE_S)).data) | {"region": "eu"}
    await client.publish(subjects.heartbeat("us", "us-1"), orjson.dumps(digest))
    asked = f"$JS.API.DIRECT.GET.HEARTBEATS.{subjects.heartbeat('us', 'us-1')}"
    arrived = await client.subscribe(subjects.digest("eu"))
    await flushed(client)
    await client.publish(asked, b"", reply=subjects.digest("eu"))
    assert orjson.loads((await arrived.next_msg(timeout=PATIENCE_S)).data)["region"] == "eu"
    delta = wire.encode(TrieDelta("eu", "r1", 1, 1, (1, 2), ()))
    await client.publish(subjects.trie("eu"), delta, headers={"Nats-Stream": "HEARTBEATS"})
    await client.publish(subjects.ping("us"), b"87654321", reply="_INBOX.eu.r1.ping-us")
    await mesh.until(lambda: mesh.sample("us", "mesh_gossip_dropped_total") >= 1, "the delta")
    await answered(client, subjects.ping("us"), b"87654321", "_INBOX.eu.r1.ping-us")
    assert mesh.routers["us"].core.peers.get("eu") is None
    await close(client)


async def test_nobody_speaks_for_another_regions_offline_work(mesh, runner, nats_server):
    client = await connect(BusAddress(nats_server.url), name="t", inbox_prefix="_INBOX.eu.r1")

    async def publish(region: str, model: str, headers: dict[str, str] | None = None) -> None:
        models = {model: OfflineCapacity(room_tokens=1)}
        said = OfflineState(
            region=region, router="batch-0", epoch=1, seq=1, accepting=True, models=models
        )
        subject = subjects.offline_state("eu")
        await client.publish(subject, encode_state(said), headers=headers)

    await client.publish(subjects.offline_state("eu"), b"{")
    await publish("us", "forged")
    await publish("ap", "forged")
    await publish("eu", "forged", {"Nats-Stream": "HEARTBEATS"})
    await publish("eu", "its own")
    await mesh.until(lambda: "its own" in runner.core.state.regions.models(), "eu's own state")
    assert "forged" not in runner.core.state.regions.models()
    await close(client)
