"""The router process: who may run, and how it leaves."""

import asyncio

import pytest

from infra.bus import BusAddress, close, connect
from mesh.runtime.name_claim import NameTaken
from schemas import subjects
from tests.support.flushed import flushed
from tests.support.scripted_engine import event, opened, scripted_engine
from tests.support.small_mesh import chat, client, post, small_mesh
from tests.support.until import PATIENCE_S


async def test_a_second_router_of_one_name_is_refused_and_harms_nobody(nats_server, monkeypatch):
    """The first one's lease is renewed before it is refused: what followed from hearing that ended
    all streams of the first one."""
    gate = asyncio.Event()

    async def answer(request, body):
        stream = await opened(request)
        await stream.write(event("begins"))
        await gate.wait()
        await stream.write(event("ends") + b"data: [DONE]\n\n")
        return stream

    async def settle(claim):
        other = await connect(BusAddress(nats_server.url), name="t", inbox_prefix="_INBOX.us.t")
        renewed = await other.subscribe(subjects.leased("us"))
        for _ in range(2):
            await renewed.next_msg(timeout=PATIENCE_S)
        await close(other)
        monkeypatch.undo()
        monkeypatch.setattr("mesh.runtime.name_claim.SAME_NAME_S", 20.0)  # the first one answers
        await claim.settle()

    servers = {"us": nats_server, "eu": nats_server}  # with a peer a region has a lease
    async with scripted_engine() as engine, small_mesh(servers) as mesh:
        await mesh.router("us")
        engine.behaviour = answer
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        begun = asyncio.create_task(post(mesh, chat(stream=True)))
        await mesh.until(
            lambda: mesh.sample("us", "mesh_request_ttft_seconds_count", served="local") == 1,
            "an answer to have begun",
        )
        url = mesh.urls["us"]
        monkeypatch.setattr("mesh.runtime.name_claim.NameClaim.settle", settle)
        with pytest.raises(NameTaken, match="runs already"):
            await mesh.router("us")
        assert mesh.urls["us"] == url
        gate.set()
        status, body, _ = await begun
        assert (status, body) == (200, event("begins") + event("ends") + b"data: [DONE]\n\n")
        assert (await post(mesh, chat()))[0] == 200


async def test_a_second_router_leaves_too_when_the_first_answers_late(nats_server, monkeypatch):
    monkeypatch.setattr("mesh.runtime.name_claim.SAME_NAME_S", 0.0)  # the first one is suspended
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us")
        await mesh.router("us")
        with pytest.raises(NameTaken, match="runs already"):
            async with asyncio.timeout(PATIENCE_S):
                await mesh.routers["us"].until_broken()


@pytest.mark.parametrize("skew_ms", [0, -1000], ids=["later epoch", "earlier epoch"])
async def test_of_two_routers_of_one_name_that_start_at_once_one_stays(nats_server, skew_ms):
    """Whether or not the first one's question was heard by the second, which has that epoch."""
    async with small_mesh({"us": nats_server}) as mesh:
        for n in range(6):

            async def begins(after_s: float, skew_ms: int) -> bool:
                await asyncio.sleep(after_s)
                try:
                    await mesh.router("us", f"x{n}", skew_ms=skew_ms)  # noqa: B023 - in its turn
                except NameTaken:
                    return False
                return True

            assert sum(await asyncio.gather(begins(0.0, 0), begins(n / 100, skew_ms))) == 1, n


async def test_who_has_not_received_its_question_keeps_no_router_from_starting(
    nats_server, monkeypatch
):
    monkeypatch.setattr("mesh.runtime.name_claim.SAME_NAME_S", 0.5)
    agent = await connect(BusAddress(nats_server.url), name="t", inbox_prefix="_INBOX.eu.r1")
    asked = await agent.subscribe("_INBOX.us.r1.who")  # here only to know when to speak
    await flushed(agent)

    async def speak():
        who = (await asked.next_msg(timeout=PATIENCE_S)).data
        for data in (b"", b"x", who[:8], bytes(8), bytes(len(who)), who[:8] + bytes(16)):
            await agent.publish("_INBOX.us.r1.here", data)
            await agent.publish("_INBOX.us.r1.who", data)

    speaking = asyncio.create_task(speak())
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us")
        await speaking
        assert not mesh.routers["us"]._bus.sending.done()
    await close(agent)


async def test_a_router_leaves_quietly_when_its_bus_has_gone(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us")
        await nats_server.stop()
        async with asyncio.timeout(PATIENCE_S):
            await mesh.routers["us"].drain()
            await mesh.routers["us"].close()


async def test_ready_says_whether_anybody_could_answer_now(nats_server):
    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        url = await mesh.router("us", hold_s_max=0.5)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        await mesh.kill_agent("us-0")
        router = mesh.routers["us"]
        await mesh.until(lambda: not router.core.models(), "the replica to be lost")
        async with client() as session:
            async with session.get(f"{url}/ready") as answer:
                assert answer.status == 503
            async with session.post(f"{url}/v1/chat/completions", json=chat()) as answer:
                assert answer.status == 503  # held for its return, then told: not 404
                assert answer.headers["retry-after"]
