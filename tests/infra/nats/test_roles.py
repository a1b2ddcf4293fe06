"""What each user of a rendered region can do, asked of the real server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import nats
import pytest
from nats import micro
from nats.aio.client import Client
from nats.js.api import StorageType, StreamConfig

from infra import bus
from schemas import subjects
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, mesh_toml, running_regions

TIMEOUT_S = 20


@pytest.fixture(scope="module")
def us(tmp_path_factory) -> Iterator[NatsRegions]:
    with running_regions(tmp_path_factory.mktemp("us"), toml=mesh_toml(("us",))) as regions:
        yield regions


class Session:
    """A connection that remembers what the server forbade it."""

    def __init__(self) -> None:
        self.client: Client
        self._refusals: asyncio.Queue[str] = asyncio.Queue()

    def refused(self, problem: Exception) -> None:
        self._refusals.put_nowait(str(problem).lower())

    async def refusal(self) -> str:
        async with asyncio.timeout(TIMEOUT_S):
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


async def test_nobody_gets_in_without_a_password(us: NatsRegions, monkeypatch):
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


async def test_an_agent_hears_its_own_work_only(us: NatsRegions):
    async with logged_in(us, "agent-us-0") as agent:
        for builder in (subjects.work, subjects.cancel, subjects.credit, subjects.body):
            await agent.client.subscribe(builder("us", "us-0"), queue=subjects.QUEUE_AGENT)
        await agent.client.subscribe(subjects.alive("*", "*"))
        await agent.allowed()
        await agent.refuses_subscribe(subjects.work("us", "us-1"))
        await agent.refuses_subscribe(subjects.work("us", "*"))
        await agent.refuses_subscribe(subjects.body("us", "us-1"))
        await agent.refuses_subscribe(subjects.inboxes("us"))
        await agent.refuses_subscribe("_INBOX.>")
        await agent.refuses_subscribe(">")


async def test_an_agent_is_a_service_that_an_operator_finds(us: NatsRegions):
    async with logged_in(us, "agent-us-0") as agent, logged_in(us, "operator") as operator:
        config = micro.ServiceConfig(name=subjects.SERVICE_AGENT, version="0.1.0")
        service = await micro.add_service(agent.client, config)
        await agent.allowed()
        for verb in ("PING", "INFO", "STATS"):
            reply = await operator.client.request(f"$SRV.{verb}", timeout=TIMEOUT_S)
            assert service.id in reply.data.decode()
            one = f"$SRV.{verb}.{subjects.SERVICE_AGENT}.{service.id}"
            await operator.client.request(one, timeout=TIMEOUT_S)
        await service.stop()
        await operator.allowed()


async def test_a_request_whose_reply_is_no_inbox_lends_nobody_its_voice(us: NatsRegions):
    """An operator may ask services; the answer can't be aimed at another's subject."""
    async with logged_in(us, "agent-us-0") as agent, logged_in(us, "operator") as operator:
        config = micro.ServiceConfig(name=subjects.SERVICE_AGENT, version="0.1.0")
        service = await micro.add_service(agent.client, config)
        await agent.allowed()  # the server has the service's subscriptions: the ping will find it
        aimed_at = subjects.work("us", "us-1")
        await operator.client.publish("$SRV.PING", reply=aimed_at)
        assert f'publish to "{aimed_at}"' in await agent.refusal()
        await service.stop()


async def test_a_router_keeps_heartbeats_in_a_stream_of_its_own_domain(us: NatsRegions):
    subject = subjects.heartbeat("us", "us-1")
    async with (
        logged_in(us, "router", subjects.inbox_prefix("us", "r1")) as router,
        logged_in(us, "agent-us-1") as agent,
        logged_in(us, "operator") as operator,
    ):
        stream = router.client.jetstream(domain="us")
        await stream.add_stream(
            StreamConfig(
                name=subjects.STREAM_HEARTBEATS,
                subjects=[subjects.heartbeat("us", "*")],
                storage=StorageType.MEMORY,
                max_msgs_per_subject=1,
                no_ack=True,
            )
        )
        for number in range(3):
            await agent.client.publish(subject, b"%d" % number)
        await agent.allowed()
        plain = router.client.jetstream()
        heartbeats = await plain.subscribe(subjects.heartbeat("us", "*"), ordered_consumer=True)
        async with asyncio.timeout(TIMEOUT_S):
            while (await heartbeats.next_msg(timeout=TIMEOUT_S)).data != b"2":
                pass
        last = await stream.get_last_msg(subjects.STREAM_HEARTBEATS, subject)
        assert last.data == b"2"
        assert (await stream.account_info()).domain == "us"

        await router.allowed()

        seen = await operator.client.jetstream().get_last_msg(subjects.STREAM_HEARTBEATS, subject)
        assert seen.data == b"2"
        await operator.allowed()


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


async def test_an_operator_hears_the_mesh_and_says_nothing(us: NatsRegions):
    async with (
        logged_in(us, "operator") as operator,
        logged_in(us, "agent-us-0") as agent,
        logged_in(us, "router", subjects.inbox_prefix("us", "r1")) as router,
    ):
        tap = await operator.client.subscribe("mesh.>")
        await operator.allowed()
        await agent.client.publish(subjects.heartbeat("us", "us-0"), b"{}")
        assert (await tap.next_msg(timeout=TIMEOUT_S)).subject == subjects.heartbeat("us", "us-0")
        await router.client.publish(subjects.digest("us"), b"{}")
        assert (await tap.next_msg(timeout=TIMEOUT_S)).subject == subjects.digest("us")
        await operator.client.jetstream().account_info()
        await operator.allowed()
        await operator.refuses_publish(subjects.heartbeat("us", "us-0"))
        await operator.refuses_publish(subjects.work("us", "us-0"))
        await operator.refuses_publish(subjects.inbox("us", "r1", 7))
        await operator.refuses_publish("$JS.API.STREAM.CREATE.MINE")
        await operator.refuses_publish("$JS.API.STREAM.PURGE.HEARTBEATS")
        await operator.refuses_subscribe(subjects.inbox("us", "r1", "*"))


@pytest.mark.parametrize("wildcard", ["_INBOX.>", "_INBOX.us.>"])
async def test_an_operator_hears_no_answer_to_a_client(us: NatsRegions, wildcard: str):
    async with (
        logged_in(us, "operator") as operator,
        logged_in(us, "agent-us-0") as agent,
    ):
        tap = await operator.client.subscribe(wildcard)
        await flushed(operator.client)
        await agent.client.publish(subjects.inbox("us", "r1", 7), b"private")
        await agent.client.publish("_INBOX.us.tool", b"for a tool")
        assert (await tap.next_msg(timeout=TIMEOUT_S)).data == b"for a tool"


async def test_the_system_user_sees_the_server_and_not_the_mesh(us: NatsRegions):
    async with (
        logged_in(us, "system") as system,
        logged_in(us, "agent-us-0") as agent,
    ):
        reply = await system.client.request("$SYS.REQ.SERVER.PING.CONNZ", timeout=TIMEOUT_S)
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
        assert len((await got.next_msg(timeout=TIMEOUT_S)).data) == 8 * mib
        with pytest.raises(nats.errors.MaxPayloadError):
            await router.client.publish(subjects.inbox("us", "r1", 1), bytes(8 * mib + 1))
