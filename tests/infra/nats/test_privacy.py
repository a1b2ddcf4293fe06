"""Who looks on receives state, and no body that a client or an engine sent: on any subject of the
catalog, at home and from a peer, and out of no stream."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from infra.nats.permissions import covers, watcher
from mesh.batch import streams as batch_streams
from schemas import subjects
from schemas.catalog import CHANNELS, Channel, Role
from tests.infra.nats.test_roles import logged_in
from tests.support.batch_regions import batch_toml
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, running_regions
from tests.support.taps import Taps, add_tap
from tests.support.until import PATIENCE_S

SECRET = b"what a client asked"
# Written out: a row that gains one of these readers is looked at here too.
STATE = {"heartbeat", "offline_state", "digest", "leased", "controlled"}
SEEN = {"observer": STATE, "operator": STATE | {"trie", "alive"}}
WRITES_STATE = {"lease", "control"}  # into a stream that is read
NAMES = {"replica": "us-0", "router": "r1", "stream": "7", "label": "any", "asker": "eu"}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory) -> Iterator[NatsRegions]:
    """As rendered, but for the tap."""
    directory, toml = tmp_path_factory.mktemp("mesh"), batch_toml(("us", "eu"))
    with running_regions(directory, toml=toml, edit=lambda _, tree: add_tap(tree)) as regions:
        yield regions


def bodies(user: str) -> list[Channel]:
    """All channels but those of state that the user receives."""
    return [row for row in CHANNELS if row.name not in SEEN[user] | WRITES_STATE]


@pytest.mark.parametrize("user", SEEN)
def test_what_each_receives(user: str):
    assert {row.name for row in CHANNELS if Role(user) in row.subscribe} == SEEN[user]
    assert not any(row.prompts for row in CHANNELS if row.name in SEEN[user])
    assert not any(row.messages == () for row in CHANNELS if row.name in SEEN[user])


@pytest.mark.parametrize("user", SEEN)
async def test_no_body_on_any_subject(mesh: NatsRegions, user: str):
    received: list[tuple[str, bytes]] = []
    fences: asyncio.Queue[str] = asyncio.Queue()

    async def note(msg: Msg) -> None:
        received.append((msg.subject, msg.data))
        if msg.data == b"fence":
            fences.put_nowait(msg.subject)

    async with Taps(mesh) as taps, logged_in(mesh, user) as looking:
        for pattern in watcher(Role(user)).subscribe:
            await looking.client.subscribe(pattern, cb=note)
        await looking.allowed()
        tried = [row.subject(region=region) for row in bodies(user) for region in ("us", "*")]
        tried += [row.subject(**NAMES, region="us") for row in bodies(user)]
        tried += ["mesh.us.>", "mesh.>", ">", "*.>", "$JS.>", "batch.>", "$O.>", "$KV.>"]
        for pattern in dict.fromkeys(tried):
            if not any(covers(one, pattern) for one in watcher(Role(user)).subscribe):
                await looking.client.subscribe(pattern, cb=note)
                await flushed(looking.client)
                assert f'subscription to "{pattern}"'.lower() in await looking.refusal()
        for region in ("us", "eu"):
            for row in bodies(user):
                said = {row.subject(**NAMES, region=of) for of in ("us", "eu")}
                for subject in said:
                    await taps.clients[region].publish(subject, SECRET, reply="_INBOX.eu.r1.7")
        for region, client in taps.clients.items():
            await until_fenced(client, subjects.digest(region), fences)
    assert {subject for subject, body in received if body == SECRET} == set()
    assert {subject for subject, body in received if body == b"fence"} == {
        subjects.digest("us"),
        subjects.digest("eu"),
    }


async def until_fenced(client: Client, subject: str, fences: asyncio.Queue[str]) -> None:
    """What `client` published before has arrived or never will; repeated while a link comes up."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await client.publish(subject, b"fence")
            await flushed(client)
            try:
                async with asyncio.timeout(0.2):
                    while await fences.get() != subject:
                        continue
                return
            except TimeoutError:
                continue


@pytest.mark.parametrize("user", SEEN)
async def test_nothing_out_of_the_streams_of_batch_jobs(mesh: NatsRegions, user: str):
    async with logged_in(mesh, user) as looking, logged_in(mesh, "batch-observer") as counting:
        for config in batch_streams.kept(mesh.topology.batch):
            for call in ("STREAM.MSG.GET", "DIRECT.GET", "CONSUMER.CREATE", "STREAM.INFO"):
                await looking.refuses_publish(f"$JS.API.{call}.{config.name}")
                if call != "STREAM.INFO":
                    await counting.refuses_publish(f"$JS.API.{call}.{config.name}")


async def test_replies_to_one_user_are_received_by_no_other(mesh: NatsRegions):
    """Users of one account have inboxes apart, the others accounts apart."""
    users = {
        **dict.fromkeys(("observer", "operator", "system", "setup"), "_INBOX"),
        "router": "_INBOX.us.r1",
        "batch": "_INBOX",
        "batch-observer": "_INBOX",
        "batch-setup": subjects.INBOX_BATCH_SETUP,
    }
    received: list[tuple[str, str]] = []
    sessions = {}
    async with contextlib.AsyncExitStack() as stack:
        for user, prefix in users.items():
            session = sessions[user] = await stack.enter_async_context(
                logged_in(mesh, user, prefix)
            )

            async def note(msg: Msg, user: str = user) -> None:
                received.append((user, msg.subject))

            wildcard = "_INBOX.us.>" if user == "router" else f"{prefix}.>"
            await session.client.subscribe(wildcard, cb=note)
            await session.allowed()
        asked = {
            "observer": "$JS.API.STREAM.INFO.HEARTBEATS",
            "operator": "$JS.API.STREAM.INFO.HEARTBEATS",
            "setup": "$JS.API.STREAM.INFO.HEARTBEATS",
            "router": "$JS.API.STREAM.INFO.HEARTBEATS",
            "system": "$SYS.REQ.SERVER.PING.VARZ",
            "batch": "$JS.API.STREAM.INFO.BATCH_LINES",
            "batch-setup": "$JS.API.STREAM.INFO.BATCH_LINES",
            "batch-observer": "$JS.API.STREAM.INFO.BATCH_LINES",
        }
        for user, subject in asked.items():
            received.clear()
            answer = await sessions[user].client.request(subject, b"", timeout=PATIENCE_S)
            assert answer.data
            for session in sessions.values():
                await flushed(session.client)
            assert {who for who, _ in received} <= {user}, subject
        await sessions["batch-setup"].refuses_subscribe("_INBOX.>")
        await sessions["observer"].refuses_subscribe(">")
