"""Offline work at a real agent: beside the simulated engine, over a real bus."""

import asyncio
import random
import signal
import time
from dataclasses import replace

import aiohttp
import orjson

from agents.core.latency_predictor import LatencyPredictor, Sample
from agents.core.offline_profile import OfflineProfile, encode_profile
from agents.core.slo_profile import Measure
from agents.sim.profiles import L4_LLAMA
from agents.sim.profiling_run import profiling_run
from schemas import subjects
from schemas.exchange import H_MODEL, H_OFFLINE, H_PREFILL_TOKENS, WORKING_S, Frame, Outcome
from tests.agents.core.test_offline_admission import LINEAR
from tests.agents.fake_router import FakeRouter, fake_router
from tests.agents.runtime.test_command import appeared, process
from tests.agents.runtime.test_simulated import body
from tests.agents.scene import Gate, scene
from tests.agents.simserver.support import MODEL, config, running
from tests.support.ports import free_ports
from tests.support.profiled import coefficients_of

SPEED = 10.0
OFFLINE = {H_OFFLINE: "1"}
ONLINE = {H_MODEL: subjects.encode_model(MODEL), "Mesh-Deadline-Ms": "60000"}


def profile(budget_s: float) -> OfflineProfile:
    """Of the simulated engine at that speed."""
    samples = [Sample(load, seconds / SPEED) for load, seconds in profiling_run(L4_LLAMA)]
    return OfflineProfile(
        engine="vllm",
        model=MODEL,
        measured_at=0,
        **coefficients_of(LatencyPredictor(samples)),
        latency_budget_s=budget_s,
        limits_s={Measure.TBT_P99: 0.05},
        chunk_tokens=L4_LLAMA.batch_tokens,
        prefill_tokens_max=1024,
    )


async def answered(
    router: FakeRouter, first: int, dice: random.Random, headers: dict[str, str] = OFFLINE
) -> tuple[int, Outcome]:
    """A request, sent until it is answered: how often it was, and how its last time ended."""
    request = body(dice, 100, 30)
    for attempt in range(200):
        sent = {**ONLINE, **headers, H_PREFILL_TOKENS: "100"}
        inbox = await router.send_work(first + 1000 * attempt, request, **sent)
        await router.until(
            lambda inbox=inbox: any(
                frame.kind in (Frame.END, Frame.REFUSED) for frame in router.frames[inbox]
            )
        )
        if router.frames[inbox][-1].kind is Frame.END:
            end = await router.answer(inbox)
            if end.outcome != Outcome.PREEMPTED:
                return attempt, end.outcome
        await router.state()  # as a runner would: by what the agent shows
    raise AssertionError("given back 200 times")


async def test_lines_are_answered_once_beside_online_requests(nats_server, tmp_path) -> None:
    seed = time.time_ns()
    print("seed", seed)
    dice = random.Random(seed)
    file, ready = tmp_path / "profile.json", tmp_path / "ready"
    file.write_bytes(encode_profile(profile(0.1)))
    [port] = free_ports(1)
    arguments = ("run", "--region", "us", "--replica", "g0", "--ready-file", str(ready))
    arguments += ("--profile", str(file), "--metrics-port", str(port))
    async with (
        running(config(time_scale=SPEED)) as engine,
        fake_router(nats_server.url) as router,
        process(*arguments, "--engine-url", engine.url, NATS_URL=nats_server.url) as agent,
    ):
        await appeared(ready, agent)
        beat = await router.state(outstanding=0)
        assert beat.offline_room_tokens > 0
        lines = [asyncio.create_task(answered(router, 100 + n, dice)) for n in range(30)]
        for number in range(5):
            assert (await answered(router, number, dice, {}))[1] == Outcome.DONE
        found = await asyncio.wait_for(asyncio.gather(*lines), 60)
        assert [outcome for _, outcome in found] == [Outcome.DONE] * 30
        none = dict.fromkeys(("outstanding", "running", "offline_waiting", "offline_running"), 0)
        beat = await router.state(**none)
        assert (beat.served_total, beat.pending) == (5, 0)
        assert max(beat.outstanding for beat in router.beats) <= 1  # online ones
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{port}/metrics") as page,
        ):
            text = await page.text()
        labels = 'engine="vllm",region="us",replica="g0"'
        assert f"mesh_agent_offline_done_total{{{labels}}} 30.0" in text
        assert f"mesh_agent_offline_tokens_total{{{labels}}} " in text
        agent.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(agent.wait(), 30) == 0


async def test_a_full_engine_has_its_offline_work_given_back(nats_server, tmp_path) -> None:
    dice = random.Random(1)
    file, ready = tmp_path / "profile.json", tmp_path / "ready"
    file.write_bytes(encode_profile(profile(10.0)))
    arguments = ("run", "--region", "us", "--replica", "g0", "--ready-file", str(ready))
    arguments += ("--profile", str(file), "--batch-max", "4")
    async with (
        running(config(time_scale=SPEED, max_seqs=4)) as engine,
        fake_router(nats_server.url) as router,
        process(*arguments, "--engine-url", engine.url, NATS_URL=nats_server.url) as agent,
    ):
        await appeared(ready, agent)
        lines = [
            await router.send_work(100 + n, body(dice, 50, 4000), **ONLINE, **OFFLINE)
            for n in range(6)
        ]
        await router.state(offline_running=2, offline_waiting=4)  # half of the batch
        users = [await router.send_work(n, body(dice, 50, 4000), **ONLINE) for n in range(5)]
        for line in lines:
            assert (await router.answer(line)).outcome == Outcome.PREEMPTED
        beat = await router.state(offline_running=0, running=4)
        assert (beat.offline_waiting, beat.offline_room_tokens) == (0, 0)
        for user in users:
            await router.cancel(user)
        await router.state(outstanding=0)


async def test_the_router_of_one_that_waits_is_told_that_it_does(nats_server) -> None:
    gate, ahead_s = Gate(), [0.0]
    long = {H_PREFILL_TOKENS: "30000", **OFFLINE}
    async with scene(
        nats_server,
        gate,
        clock=lambda: time.monotonic() + ahead_s[0],
        profile=replace(LINEAR, model="org/llama"),
    ) as on:
        user = await on.router.send_work(1)
        await on.router.until(lambda: on.router.text(user))
        line = await on.router.send_work(2, **long)
        await on.router.state(offline_waiting=1)
        ahead_s[0] += WORKING_S + 0.1
        await on.router.until(lambda: "W" in on.router.all_kinds(line))
        gate.open.set()
        assert (await on.router.answer(user)).outcome == Outcome.DONE
        assert (await on.router.answer(line)).outcome == Outcome.DONE
        assert on.router.kinds(line) == "HDDE"


async def test_the_engine_gets_the_priority_of_offline_requests(nats_server) -> None:
    gate = Gate()
    gate.open.set()
    settings = {"profile": LINEAR, "offline_priority": 10}
    async with scene(nats_server, gate, **settings) as on:
        line = await on.router.send_work(1, b'{"prompt":"x"}', **OFFLINE)
        assert (await on.router.answer(line)).outcome == Outcome.DONE
        assert orjson.loads(on.engine.requests[0].body) == {"prompt": "x", "priority": 10}
