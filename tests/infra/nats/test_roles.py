"""What each user of a rendered region can do, asked of the real server."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import nats
import pytest
from nats import micro
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import RePublish

from infra import bus
from mesh.adapters import streams
from schemas import subjects
from schemas.catalog import CHANNELS, Role
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, mesh_toml, running_regions
from tests.support.until import PATIENCE_S


@pytest.fixture(scope="module")
def us(tmp_path_factory) -> Iterator[NatsRegions]:
    with running_regions(tmp_path_factory.mktemp("us"), toml=mesh_toml(("us",))) as regions:
        setup = regions.address("us", "setup")
        asyncio.run(streams.set_up(setup, "us", has_peers=True))  # with the lease's
        yield regions


class Session:
    """A connection that remembers what the server forbade it."""

    def __init__(self) -> None:
        self.client: Client
        self._refusals: asyncio.Queue[str] = asyncio.Queue()

    def refused(self, problem: Exception) -> None:
        self._refusals.put_nowait(str(problem).lower())

    async def refusal(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return await self._refusals.get()

    async def refuses_publish(self, subject: str) -> None:
        await self.client.publish(subject, b"forged")
        await flushed(self.client)
        assert f'permissions violation for publish to "{subject}"'.lower() in await self.refusal()

    async def refuses_subscribe(self, subject: str) -> None:
        await self.client.subscribe(subject)
        await flushed(self.client)
        expected = f'permissions violation for subscription to "{subject}"'.lower()
        assert expected in await self.refusal()

    async def allowed(self) -> None:
        """Whatever was asked before has been answered, and nothing was refused."""
        await flushed(self.client)
        assert self._refusals.empty(), self._refusals


@contextlib.asynccontextmanager
async def logged_in(us: NatsRegions, user: str, prefix: str = "_INBOX") -> AsyncIterator[Session]:
    session = Session()
    session.client = await us.connect("us", user, inbox_prefix=prefix, on_error=session.refused)
    try:
        yield session
    finally:
        await session.client.close()


async def test_the_server_does_not_warn_of_plain_passwords(us: NatsRegions):
    assert "plaintext" not in us.log("us").lower()
    assert "Server is ready" in us.log("us")


async def test_no_client_logs_in_without_a_password(us: NatsRegions, monkeypatch):
    monkeypatch.setattr(bus, "START_TIMEOUT_S", 1.0)
    url = us.address("us", "router").url
    for address in (bus.BusAddress(url), bus.BusAddress(url, "router", "wrong")):
        with pytest.raises(bus.BusUnreachable):
            await bus.connect(address, name="t", inbox_prefix="_INBOX")


async def test_an_agent_speaks_for_its_own_replica_only(us: NatsRegions):
    async with logged_in(us, "agent-us-0") as agent:
        await agent.client.publish(subjects.heartbeat("us", "us-0"), b"{}")
        await agent.client.publish(subjects.inbox("us", "r1", 7), b"answer")
        await agent.client.publish(subjects.inbox("eu", "r1", 7), b"answer to a peer's client")
        await agent.allowed()
        await agent.refuses_publish(subjects.heartbeat("us", "us-1"))
        await agent.refuses_publish(subjects.work("us", "us-1"))
        await agent.refuses_publish(subjects.digest("us"))
        await agent.refuses_publish(subjects.alive("us", "r1"))
        await agent.refuses_publish("$JS.API.INFO")


async def test_an_agent_receives_its_own_work_only(us: NatsRegions):
    async with logged_in(us, "agent-us-0") as agent:
        await agent.client.subscribe(subjects.work("us", "us-0"), queue=subjects.QUEUE_AGENT)
        for builder in (subjects.cancel, subjects.credit, subjects.body):
            await agent.client.subscribe(builder("us", "us-0"))
        await agent.client.subscribe(subjects.alive("*", "*"))
        await agent.allowed()
        await agent.refuses_subscribe(subjects.work("us", "us-1"))
        await agent.refuses_subscribe(subjects.work("us", "*"))
        await agent.refuses_subscribe(subjects.body("us", "us-1"))
        await agent.refuses_subscribe(subjects.inboxes("us"))
        await agent.refuses_subscribe("_INBOX.>")
        await agent.refuses_subscribe(">")


async def test_an_agent_is_a_service_that_watchers_find(us: NatsRegions):
    async with logged_in(us, "agent-us-0") as agent, logged_in(us, "observer") as observer:
        config = micro.ServiceConfig(name=subjects.SERVICE_AGENT, version="0.1.0")
        service = await micro.add_service(agent.client, config)
        await agent.allowed()
        for verb in ("PING", "INFO", "STATS"):
            reply = await observer.client.request(f"$SRV.{verb}", timeout=PATIENCE_S)
            assert service.id in reply.data.decode()
            one = f"$SRV.{verb}.{subjects.SERVICE_AGENT}.{service.id}"
            await observer.client.request(one, timeout=PATIENCE_S)
        await service.stop()
        await observer.allowed()


@pytest.mark.parametrize("user", ["observer", "operator"])
async def test_answers_of_services_and_streams_write_nowhere(us: NatsRegions, user: str):
    """The server answers whatever reply subject a request names; in another account, that is."""
    lease, inbox = subjects.lease("us"), subjects.inbox("us", "r1", 7)
    aimed_at = (lease, subjects.leased("us"), subjects.digest("us"), inbox)
    aimed_at += (subjects.heartbeat("us", "us-0"), "$JS.API.STREAM.DELETE.LEASES")
    requests = ("$SRV.PING", "$JS.API.INFO", f"$JS.API.DIRECT.GET.LEASES.{lease}")
    requests += ("$JS.API.STREAM.INFO.LEASES", "$JS.API.STREAM.MSG.GET.LEASES")
    asked = b'{"last_by_subj":"%b"}' % lease.encode()
    async with (
        logged_in(us, "agent-us-0") as agent,
        logged_in(us, "router", subjects.inbox_prefix("us", "r1")) as router,
        logged_in(us, user) as looking,
    ):
        service = await micro.add_service(
            agent.client, micro.ServiceConfig(name=subjects.SERVICE_AGENT, version="0.1.0")
        )
        await router.client.request(lease, b"last", timeout=PATIENCE_S)
        reached = []

        async def note(msg: Msg) -> None:
            reached.append((msg.subject, msg.data))

        for subject in (subjects.digest("*"), subjects.heartbeat("us", "*"), inbox):
            await router.client.subscribe(subject, cb=note)
        await router.client.subscribe(subjects.leased("*"), cb=note)
        await flushed(router.client)
        await flushed(agent.client)
        for request, reply in itertools.product(requests, aimed_at):
            body = asked if "MSG.GET" in request else b""
            await looking.client.publish(request, body, reply=reply)
        await looking.client.request("$SRV.PING", timeout=PATIENCE_S)
        await looking.client.jetstream().account_info()
        await flushed(agent.client)
        await flushed(router.client)
        last = await looking.client.jsm().get_last_msg(subjects.STREAM_LEASES, lease)
        assert (last.data, reached) == (b"last", [])
        await service.stop()


async def test_a_router_reads_streams_and_alters_none(us: NatsRegions):
    subject = subjects.heartbeat("us", "us-1")
    async with (
        logged_in(us, "router", subjects.inbox_prefix("us", "r1")) as router,
        logged_in(us, "agent-us-1") as agent,
        logged_in(us, "observer") as observer,
    ):
        for number in range(3):
            await agent.client.publish(subject, b"%d" % number)
        await agent.allowed()
        manager = router.client.jsm()
        async with asyncio.timeout(PATIENCE_S):
            while (await observer.client.jsm().stream_info("HEARTBEATS")).state.last_seq < 3:
                await asyncio.sleep(0.01)
        last = await manager.get_last_msg(subjects.STREAM_HEARTBEATS, subject, direct=True)
        assert last.data == b"2"
        await manager.stream_info(subjects.STREAM_LEASES)
        await router.allowed()
        for call in ("CREATE.HEARTBEATS", "UPDATE.HEARTBEATS", "DELETE.LEASES", "PURGE.LEASES"):
            await router.refuses_publish(f"$JS.API.STREAM.{call}")
        await router.refuses_publish(f"$JS.API.DIRECT.GET.LEASES.{subjects.lease('us')}")
        seen = await observer.client.jsm().get_last_msg(subjects.STREAM_HEARTBEATS, subject)
        assert seen.data == b"2"
        await observer.allowed()


async def test_setup_puts_an_altered_stream_right_and_routers_can_see_that(us: NatsRegions):
    async with (
        logged_in(us, "setup") as setup,
        logged_in(us, "router", subjects.inbox_prefix("us", "r1")) as router,
    ):
        heartbeats = streams.heartbeats("us")
        assert await streams.altered(router.client, heartbeats) == []
        stream = setup.client.jetstream()
        tapped = RePublish(src=">", dest="_INBOX.ap.x.>")
        everything = [*heartbeats.subjects, "mesh.us.replica.>"]
        await stream.update_stream(replace(heartbeats, subjects=everything, republish=tapped))
        found = await streams.altered(router.client, heartbeats)
        assert [one.split()[0] for one in found] == ["republish", "subjects"]
        assert (await us.set_up("us"))["HEARTBEATS"] == "put right"
        assert await streams.altered(router.client, heartbeats) == []
        assert (await us.set_up("us"))["HEARTBEATS"] == "as it should be"
        # One of the version before serves as well, until it is set up again.
        await stream.update_stream(replace(heartbeats, description=None))
        assert await streams.altered(router.client, heartbeats) == []
        assert (await us.set_up("us"))["HEARTBEATS"] == "put right"
        info = await setup.client.jsm().stream_info("HEARTBEATS")
        assert info.config.description == "The last heartbeat of every replica of us"
        await stream.delete_stream("HEARTBEATS")
        await stream.add_stream(replace(heartbeats, persist_mode=None))
        assert await streams.altered(router.client, heartbeats) == []
        assert (await us.set_up("us"))["HEARTBEATS"] == "put right"
        assert (await us.set_up("us"))["HEARTBEATS"] == "as it should be"
        await stream.delete_stream("HEARTBEATS")
        assert await streams.altered(router.client, heartbeats) == ["stream not found"]
        assert (await us.set_up("us"))["HEARTBEATS"] == "made"


async def test_orders_that_would_not_be_synced_are_named_and_not_thrown_away(us: NatsRegions):
    async with (
        logged_in(us, "setup") as setup,
        logged_in(us, "router", subjects.inbox_prefix("us", "r1")) as router,
    ):
        control, stream = streams.control("us"), setup.client.jetstream()
        await stream.delete_stream("CONTROL")
        made = await stream.add_stream(replace(control, persist_mode="async"))
        assert await streams.altered(router.client, control) == ['persist_mode is "async"']
        with pytest.raises(streams.StreamsUnusable, match=r"CONTROL.*persist mode"):
            await us.set_up("us")
        info = await setup.client.jsm().stream_info("CONTROL")
        assert info.created == made.created
        await stream.delete_stream("CONTROL")
        assert (await us.set_up("us"))["CONTROL"] == "made"


async def test_a_router_does_not_speak_for_agents_or_other_regions(us: NatsRegions):
    async with logged_in(us, "router", subjects.inbox_prefix("us", "r1")) as router:
        await router.client.publish(subjects.digest("us"), b"{}")
        await router.client.publish(subjects.work("us", "us-0"), b"{}")
        await router.client.publish(subjects.ingress("eu"), b"{}")
        await router.client.publish(subjects.cancel("eu", "eu-0"), b"")
        await router.client.subscribe(subjects.heartbeat("us", "*"))
        await router.client.subscribe(subjects.digest("*"))
        await router.allowed()
        await router.refuses_publish(subjects.heartbeat("us", "us-0"))
        await router.refuses_publish(subjects.digest("eu"))
        await router.refuses_subscribe(subjects.inboxes("eu"))
        await router.refuses_subscribe(subjects.work("us", "us-0"))
        await router.refuses_publish("$JS.API.STREAM.DELETE.HEARTBEATS")


@pytest.mark.parametrize("user", ["observer", "operator"])
async def test_watchers_receive_state_and_nothing_else(us: NatsRegions, user: str):
    hidden = [row.subject(region="us") for row in CHANNELS if Role(user) not in row.subscribe]
    hidden = [subject for subject in hidden if subject.startswith("mesh.")]
    async with (
        logged_in(us, user) as looking,
        logged_in(us, "agent-us-0") as agent,
        logged_in(us, "router", subjects.inbox_prefix("us", "r1")) as router,
    ):
        received = asyncio.Queue()

        async def note(msg: Msg) -> None:
            received.put_nowait(msg.subject)

        await looking.client.subscribe("mesh.us.heartbeat.>", cb=note)
        await looking.client.subscribe("mesh.*.gossip.digest", cb=note)
        await looking.client.subscribe("_INBOX.>", cb=note)
        await looking.allowed()
        await agent.client.publish(subjects.inbox("us", "r1", 7), b"private")
        await agent.client.publish(subjects.heartbeat("us", "us-0"), b"{}")
        await agent.allowed()
        await router.client.publish(subjects.digest("us"), b"{}")
        async with asyncio.timeout(PATIENCE_S):
            assert await received.get() == subjects.heartbeat("us", "us-0")
            assert await received.get() == subjects.digest("us")
        for subject in (*hidden, "mesh.>", ">"):
            await looking.refuses_subscribe(subject)
        for subject in (subjects.heartbeat("us", "us-0"), subjects.work("us", "us-0")):
            await looking.refuses_publish(subject)
        for call in ("CREATE.MINE", "PURGE.HEARTBEATS", "UPDATE.LEASES"):
            await looking.refuses_publish(f"$JS.API.STREAM.{call}")


@pytest.mark.parametrize("user", ["observer", "operator", "router", "agent-us-1"])
@pytest.mark.parametrize("queue", ["agent", "routers", "of-mine"])
async def test_no_other_user_takes_the_work_of_an_agent(us: NatsRegions, user: str, queue: str):
    async with logged_in(us, user) as other:
        for subject in (subjects.work("us", "us-0"), subjects.work("*", "*"), "mesh.>"):
            await other.client.subscribe(subject, queue=queue)
            await flushed(other.client)
            assert f'subscription to "{subject}"' in await other.refusal()


async def test_a_queue_group_is_joined_by_its_own_role_alone(us: NatsRegions):
    ingress, work = subjects.ingress("us"), subjects.work("us", "us-0")
    async with (
        logged_in(us, "router", subjects.inbox_prefix("us", "r1")) as router,
        logged_in(us, "agent-us-0") as agent,
    ):
        await router.client.subscribe(ingress, queue=subjects.QUEUE_ROUTERS)
        await agent.client.subscribe(work, queue=subjects.QUEUE_AGENT)
        await router.allowed()
        await agent.allowed()
        for session, subject in ((router, ingress), (agent, work)):
            for queue in ("", "another"):
                await session.client.subscribe(subject, queue=queue)
                await flushed(session.client)
                assert f'subscription to "{subject}"' in await session.refusal()


async def test_the_system_user_sees_the_server_and_not_the_mesh(us: NatsRegions):
    async with (
        logged_in(us, "system") as system,
        logged_in(us, "agent-us-0") as agent,
    ):
        reply = await system.client.request("$SYS.REQ.SERVER.PING.CONNZ", timeout=PATIENCE_S)
        assert b"agent-us-0" in reply.data
        await system.allowed()
        await system.refuses_subscribe("mesh.>")
        await system.refuses_publish(subjects.work("us", "us-0"))
        await agent.refuses_subscribe("$SYS.>")


async def test_a_long_prompt_fits_one_message_and_more_is_refused(us: NatsRegions):
    mib = 1024 * 1024
    async with logged_in(us, "router", subjects.inbox_prefix("us", "r1")) as router:
        assert router.client.max_payload == 8 * mib
        got = await router.client.subscribe(subjects.inbox("us", "r1", 1))
        await router.client.publish(subjects.inbox("us", "r1", 1), bytes(8 * mib))
        assert len((await got.next_msg(timeout=PATIENCE_S)).data) == 8 * mib
        with pytest.raises(nats.errors.MaxPayloadError):
            await router.client.publish(subjects.inbox("us", "r1", 1), bytes(8 * mib + 1))
