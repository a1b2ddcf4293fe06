"""How an agent outlives what happens to it, and how it ends."""

import asyncio
import contextlib
import re
import time

import aiohttp
import orjson
import pytest
from nats.aio.msg import Msg

from agents.adapters.bus import AgentBus
from agents.adapters.name_guard import ReplicaNameTaken
from agents.adapters.outbox import Outbox
from agents.adapters.relay import Relay
from agents.config import AgentConfig
from agents.core.events import WorkArrived
from agents.runtime.agent import FAULT_OF_OURS, Agent
from agents.runtime.process import Stop, run
from infra import bus
from infra.bus import BusUnreachable
from infra.process import end_all
from schemas import exchange, subjects
from schemas.exchange import Frame, Outcome, Refusal
from schemas.state import ReplicaState, decode_heartbeat
from tests.agents.fake_router import MODEL, REGION, REPLICA, ROUTER
from tests.agents.scene import Gate, hello, scene
from tests.agents.scripted_engine import (
    CHUNKED,
    Conversation,
    chunk,
)
from tests.support.flushed import flushed
from tests.support.frames import frames_of
from tests.support.nats_server import running_nats_server
from tests.support.ports import free_ports
from tests.support.until import PATIENCE_S


async def test_an_engine_that_dies_and_returns_with_another_model(nats_server) -> None:
    async with scene(nats_server, hello) as on:
        await on.engine.stop()
        await on.router.state(state=ReplicaState.DOWN)
        refused = await on.router.refusal(await on.router.send_work(1))
        assert refused.reason == Refusal.ENGINE_DOWN
        on.engine.models = ["org/other"]
        await on.engine.start()
        beat = await on.router.state(state=ReplicaState.READY)
        assert beat.models == ("org/other",)
        refused = await on.router.refusal(await on.router.send_work(2))
        assert refused.reason == Refusal.WRONG_MODEL


async def test_a_restarted_bus_brings_the_agent_back(nats_server) -> None:
    async with scene(nats_server, hello) as on:
        await nats_server.restart()
        await on.router.state(state=ReplicaState.READY)
        inbox = await on.router.send_work(1)
        assert (await on.router.answer(inbox)).outcome == Outcome.DONE


async def test_an_answer_across_a_restart_of_the_bus_does_not_hang(
    nats_server, monkeypatch
) -> None:
    monkeypatch.setattr("agents.core.routers.SILENCE_S", 600.0)  # however long the server takes
    gate = Gate()
    async with scene(nats_server, gate) as on:
        inbox = await on.router.send_work(1)
        await on.router.until(lambda: on.router.text(inbox))
        await nats_server.restart()
        await on.router.state(outstanding=1)
        frames = on.router.frames[inbox]
        await on.router.until(lambda: frames[-1].kind is Frame.WORKING)
        gate.open.set()
        assert (await on.router.answer(inbox)).outcome == Outcome.DONE
        # With the keep-alive of its router it repeated its last frames, and work goes on.
        kinds = {frame.number: chr(frame.kind) for frame in on.router.frames[inbox]}
        assert re.fullmatch("HDW+DE", "".join(kinds[number] for number in sorted(kinds)))


async def test_draining_finishes_running_requests_refuses_others_and_publishes_gone(
    nats_server,
) -> None:
    gate = Gate()
    async with scene(nats_server, gate) as on:
        inbox = await on.router.send_work(1)
        await on.router.until(lambda: on.router.text(inbox))
        on.stop.request()
        await on.router.state(state=ReplicaState.DRAINING, outstanding=1)
        refused = await on.router.refusal(await on.router.send_work(2))
        assert refused.reason == Refusal.DRAINING
        gate.open.set()
        assert (await on.router.answer(inbox)).outcome == Outcome.DONE
        await on.task
        await on.router.until(lambda: on.router.beats[-1].state is ReplicaState.GONE)


@pytest.mark.parametrize("impatient", [True, False])
async def test_a_drain_that_takes_too_long_ends_the_answers(nats_server, impatient) -> None:
    gate = Gate()
    patience_s = 600.0 if impatient else 0.05
    async with scene(nats_server, gate, drain_timeout_s=patience_s) as on:
        inbox = await on.router.send_work(1)
        await on.router.until(lambda: on.router.text(inbox))
        on.stop.request()
        if impatient:
            await on.router.state(state=ReplicaState.DRAINING)
            on.stop.request()
        assert (await on.router.answer(inbox)).outcome == Outcome.ENGINE_LOST
        await gate.hung_up.wait()
        await on.task
        await on.router.until(lambda: on.router.beats[-1].state is ReplicaState.GONE)


@pytest.mark.parametrize("finished", [True, False])
async def test_every_answers_end_leaves_before_the_agents_own(
    nats_server, monkeypatch, finished
) -> None:
    """Even where frames wait for their turn on the bus until the agent waits for them."""
    send, flush = Outbox._publish_all, AgentBus.flush
    their_turn, gone = asyncio.Event(), asyncio.Event()
    their_turn.set()
    gate, numbers = Gate(), range(1, 11)
    heartbeats = subjects.heartbeat(REGION, REPLICA)
    said: list[str] = []

    async def send_late(self, posted) -> None:
        await their_turn.wait()
        await send(self, posted)

    async def flush_late(self, *timeout_s: float) -> None:
        their_turn.set()
        await flush(self, *timeout_s)

    monkeypatch.setattr(Outbox, "_publish_all", send_late)
    monkeypatch.setattr(AgentBus, "flush", flush_late)

    async def receive(msg: Msg) -> None:  # by one subscription, or there would be no order to see
        if msg.subject.startswith(subjects.INBOX_ROOT):  # a frame may come twice
            said.extend(msg.subject for _, frame in frames_of(msg) if frame.kind is Frame.END)
        elif msg.subject == heartbeats and decode_heartbeat(msg.data).state is ReplicaState.GONE:
            said.append("gone")
            gone.set()

    async with scene(nats_server, gate) as on:
        inboxes = [await on.router.send_work(number) for number in numbers]
        await on.router.until(lambda: all(map(on.router.text, inboxes)))
        await on.router.client.subscribe(">", cb=receive)
        await flushed(on.router.client)
        on.stop.request()
        await on.router.state(state=ReplicaState.DRAINING)
        their_turn.clear()
        gate.open.set() if finished else on.stop.request()
        async with asyncio.timeout(PATIENCE_S):
            await gone.wait()
        assert len({*said[: said.index("gone")]}) == len(numbers)


async def test_a_fault_of_ours_in_one_answer_ends_that_answer_alone(
    nats_server, monkeypatch, caplog
) -> None:
    pass_on = Relay._pass_on

    def fails(self, chunk: bytes) -> None:
        if b"poison" in chunk:
            raise RuntimeError("a bug of ours")
        pass_on(self, chunk)

    monkeypatch.setattr(Relay, "_pass_on", fails)
    gate = Gate()

    async def script(talk: Conversation) -> None:
        if talk.request.body == b"poison":
            await talk.send(CHUNKED + chunk(b"data: poison\n\n"))
            await talk.hung_up()
        else:
            await gate(talk)

    async with scene(nats_server, script) as on:
        other = await on.router.send_work(1)
        await on.router.until(lambda: on.router.text(other))
        inbox = await on.router.send_work(2, b"poison")
        end = await on.router.answer(inbox)
        assert (end.outcome, end.detail) == (Outcome.ENGINE_BROKEN, FAULT_OF_OURS)
        assert on.router.kinds(inbox) == "HE"
        await on.router.state(outstanding=1)
        gate.open.set()
        assert (await on.router.answer(other)).outcome == Outcome.DONE
    [record] = [
        record
        for record in caplog.records
        if record.name == "agents.runtime.agent" and record.exc_info
    ]
    assert inbox in record.getMessage()
    assert "a bug of ours" in record.exc_text


async def stubborn(self) -> None:
    """Loses one cancel, as Python 3.11's wait_for may."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    await asyncio.Event().wait()


async def test_a_task_that_loses_a_cancel_does_not_keep_a_stopped_agent(
    nats_server, monkeypatch
) -> None:
    monkeypatch.setattr(Agent, "keep_alive", stubborn)
    async with scene(nats_server, hello) as on:
        on.stop.request()
        async with asyncio.timeout(PATIENCE_S):
            await on.task


async def test_work_that_arrives_while_a_killed_agent_disconnects_is_ignored(
    nats_server, monkeypatch
) -> None:
    feeds = []
    listen = AgentBus.listen

    async def kept(self, feed, credit) -> None:
        feeds.append(feed)
        await listen(self, feed, credit)

    monkeypatch.setattr(AgentBus, "listen", kept)
    headers = {
        exchange.H_MODEL: subjects.encode_model(MODEL),
        exchange.H_PATH: "/v1/completions",
        exchange.H_FROM: ROUTER,
        exchange.H_HANDOFF: "1",
        exchange.H_DEADLINE_MS: "30000",
    }
    work = WorkArrived(subjects.inbox(REGION, ROUTER, 1), headers, b"{}")
    with pytest.raises(asyncio.CancelledError):
        async with scene(nats_server, hello) as on:
            await end_all([on.task])
            await feeds[0](work)  # no relay starts: its tasks have ended
            assert on.engine.requests == []


async def test_a_task_that_fails_ends_the_agent_and_every_answer(nats_server, monkeypatch) -> None:
    broken = asyncio.Event()

    async def fails(self) -> None:
        await broken.wait()
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Agent, "keep_alive", fails)
    waiting = "agents.runtime.process._write_ready_file"
    monkeypatch.setattr(waiting, lambda path, ready: stubborn(None))
    gate = Gate()
    with pytest.raises(ExceptionGroup) as failure:
        async with scene(nats_server, gate) as on:
            inbox = await on.router.send_work(1)
            await on.router.until(lambda: on.router.text(inbox))
            broken.set()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait([on.task])
            await gate.hung_up.wait()
    assert [str(problem) for problem in failure.value.exceptions] == ["a bug of ours"]


TWO_ACCOUNTS = """
accounts {
  MESH { users: [{user: mesh, password: x}], exports: [{service: "$SRV.>", response_type: stream}] }
  OBSERVE {
    users: [{user: observer, password: x}]
    imports: [{service: {account: MESH, subject: "$SRV.>"}}]
  }
}
no_auth_user: mesh
"""


async def test_the_fleet_is_visible_as_micro_services_to_another_account(tmp_path) -> None:
    async with (
        running_nats_server(tmp_path / "nats", config=TWO_ACCOUNTS) as nats_server,
        scene(nats_server, hello) as on,
    ):
        observer = await bus.connect(
            bus.BusAddress(nats_server.url, "observer", "x"), name="t", inbox_prefix="_INBOX"
        )
        within = await on.router.client.subscribe("_INBOX.us.r1.7")
        await on.router.client.publish("$SRV.INFO.mesh-agent", b"", reply="_INBOX.us.r1.7")
        await flushed(on.router.client)

        async def info() -> dict:
            reply = await observer.request("$SRV.INFO.mesh-agent", b"", timeout=20)
            return orjson.loads(reply.data)

        expected = {"region": "us", "replica": "g0", "engine": "vllm", "models": "org/llama"}
        assert (await info())["metadata"] == expected
        on.engine.models = ["org/other"]
        await on.router.state(models=("org/other",))
        assert (await info())["metadata"]["models"] == "org/other"
        assert within.pending_msgs == 0, "inside its own account nobody is answered"
        await observer.close()


async def test_its_own_metrics_page(nats_server) -> None:
    [port] = free_ports(1)
    async with (
        scene(nats_server, hello, metrics_port=port) as on,
        aiohttp.ClientSession() as http,
    ):
        await on.router.answer(await on.router.send_work(1))
        async with http.get(f"http://127.0.0.1:{port}/metrics") as response:
            page = await response.text()
    labels = 'engine="vllm",region="us",replica="g0"'
    assert f"mesh_agent_served_total{{{labels}}} 1.0" in page
    assert f'mesh_agent_state{{{labels},state="ready"}} 1.0' in page
    assert "\nmesh_agent_prefill_s_per_token{" not in page  # unknown is not zero


async def test_without_a_bus_there_is_no_agent(monkeypatch) -> None:
    monkeypatch.setattr("infra.bus.START_TIMEOUT_S", 0.3)
    config = AgentConfig(
        region="us",
        replica="g0",
        engine_kind="openai",
        engine_url="http://127.0.0.1:1",
        nats_url=f"nats://127.0.0.1:{free_ports(1)[0]}",
    )
    with pytest.raises(BusUnreachable, match="no bus at"):
        await run(config, time.monotonic, 1, Stop())


async def test_a_second_agent_of_one_name_is_refused_and_the_first_goes_on(
    nats_server, monkeypatch
) -> None:
    monkeypatch.setattr("agents.adapters.name_guard.CLAIM_S", 20.0)  # for the first one to answer
    async with scene(nats_server, hello) as on:
        config = AgentConfig(
            region=REGION,
            replica=REPLICA,
            engine_kind="vllm",
            engine_url="http://127.0.0.1:1",
            nats_url=nats_server.url,
        )
        behind = time.time_ns() + 10**12  # by its clock it started later
        with pytest.raises(ReplicaNameTaken, match=f"{REGION}/{REPLICA} runs already"):
            await run(config, time.monotonic, behind, Stop())
        assert (await on.router.answer(await on.router.send_work(1))).outcome == Outcome.DONE
