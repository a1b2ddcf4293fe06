"""An agent that measures its engine's prefill speed while it is idle."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import orjson
import pytest

from agents.core import speed_probe
from agents.runtime.speed_file import FILE_NAME
from agents.sim.profiles import L4_LLAMA
from schemas import subjects
from schemas.exchange import H_MODEL, Outcome
from schemas.state import PrefillPrior
from tests.agents.fake_router import FakeRouter, fake_router
from tests.agents.scene import hello, running_agent, scene
from tests.agents.scripted_engine import Conversation, plain
from tests.agents.simserver.support import MODEL, Engine, config, running

SCALE = 5.0
TRIES = 5  # this machine may stand still in the middle of one
BEATS = 30  # in which an agent that probes has begun to


@pytest.fixture(autouse=True)
def _soon(monkeypatch) -> None:
    monkeypatch.setattr(speed_probe, "QUIET_S", 0.1)


@contextlib.asynccontextmanager
async def probing(nats_server, engine: Engine, **settings) -> AsyncIterator[FakeRouter]:
    """An agent beside that engine; the router hears its heartbeats."""
    wanted = {"speed_probe": True, **settings}
    async with (
        fake_router(nats_server.url) as router,
        running_agent(router, nats_server.url, engine_url=engine.url, **wanted),
    ):
        yield router


async def prior_of(router: FakeRouter) -> PrefillPrior:
    """Once a heartbeat has it."""

    def found() -> list[PrefillPrior]:
        return [beat.prefill_prior for beat in router.beats if beat.prefill_prior is not None]

    await router.until(found)
    return found()[-1]


async def test_its_prior_is_within_a_fifth_of_what_the_engine_takes(nats_server) -> None:
    for _ in range(TRIES):
        async with (
            running(config(models=(MODEL,), time_scale=SCALE)) as engine,
            probing(nats_server, engine) as router,
        ):
            prior = await prior_of(router)
            beats = list(router.beats)
        assert {beat.running for beat in beats} <= {None, 0}, "it is no request"
        assert {(beat.outstanding, beat.full, beat.served_total) for beat in beats} == {(0, 0, 0)}
        long_tokens = prior.short_tokens + prior.more_tokens
        assert 0.9 * speed_probe.LONG_TOKENS < long_tokens <= speed_probe.LONG_TOKENS
        short_s, long_s = (L4_LLAMA.alone_s(n) / SCALE for n in (prior.short_tokens, long_tokens))
        found = prior.s_per_token, prior.base_s + long_tokens * prior.s_per_token
        expected = (long_s - short_s) / prior.more_tokens, long_s
        print("found", found, "expected", expected)
        if found == pytest.approx(expected, rel=0.2):
            return
    raise AssertionError(f"{TRIES} times out of it")


async def test_the_next_run_knows_it(nats_server, tmp_path) -> None:
    async with running(config(models=(MODEL,), time_scale=20.0)) as engine:
        async with probing(nats_server, engine, state_dir=tmp_path) as router:
            prior = await prior_of(router)
        assert (tmp_path / FILE_NAME).exists()
        before = (await engine.metrics())["vllm:prompt_tokens_total"]
        async with probing(nats_server, engine, state_dir=tmp_path) as router:
            assert await prior_of(router) == prior
            count = len(router.beats)
            await router.until(lambda: len(router.beats) > count + BEATS)
        more = (await engine.metrics())["vllm:prompt_tokens_total"] - before
        assert more < speed_probe.SHORT_TOKENS, "no more than finding out about its paths takes"


async def test_with_the_option_off_the_engine_gets_no_prompt(nats_server) -> None:
    async with scene(nats_server, hello, speed_probe=False) as on:
        await on.router.until(lambda: len(on.router.beats) > BEATS)
        assert on.engine.requests == []
        assert {beat.prefill_prior for beat in on.router.beats} == {None}


async def test_a_request_waits_for_no_more_than_the_step_that_the_engine_is_in(
    nats_server,
) -> None:
    """The engine computes the long prompt in 16 steps of 0.11 s. The request arrives in one of the
    first, is computed in the step after it, and its second token ends its answer."""
    profile = replace(L4_LLAMA, batch_tokens=128)
    step_s, used = profile.alone_s(128), 200 / profile.kv_tokens
    ask = {"model": MODEL, "prompt": "Hello?", "max_tokens": 1}
    waits_s = []
    for number in range(1, TRIES + 1):
        async with (
            running(config(models=(MODEL,), profile=profile, time_scale=1.0)) as engine,
            probing(nats_server, engine) as router,
        ):
            await engine.until(lambda page: page["vllm:kv_cache_usage_perc"] > used)
            sent_at = time.monotonic()
            headers = {H_MODEL: subjects.encode_model(MODEL)}
            inbox = await router.send_work(number, orjson.dumps(ask), **headers)
            assert (await router.answer(inbox)).outcome == Outcome.DONE
            waits_s.append(time.monotonic() - sent_at)
            assert {beat.prefill_prior for beat in router.beats} == {None}, "it was stopped"
        print("waited", waits_s, "step", step_s)
        if waits_s[-1] < 3 * step_s:
            return
    raise AssertionError(f"{waits_s} s, with steps of {step_s} s")


async def fails(talk: Conversation) -> None:
    await talk.send(plain(500, b'{"error":"no"}'))


async def hangs(talk: Conversation) -> None:
    await talk.hung_up()


async def cuts(talk: Conversation) -> None:
    talk.cut()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (fails, "HTTP 500"),
        (hangs, "none within 0.3 s"),
        (cuts, "closed the connection"),
        (hello, "count no prompt tokens"),
    ],
)
async def test_an_engine_that_gives_no_measure_gets_no_second_prompt(
    nats_server, monkeypatch, caplog, script, says
) -> None:
    monkeypatch.setattr(speed_probe, "LIMIT_S", 0.3)
    monkeypatch.setattr(speed_probe, "AGAIN_S", 0.1)
    with caplog.at_level(logging.WARNING):
        async with scene(nats_server, script, speed_probe=True) as on:
            await on.router.until(lambda: on.engine.requests and "speed probe" in caplog.text)
            count = len(on.router.beats)
            await on.router.until(lambda: len(on.router.beats) > count + BEATS)
            assert len({each.body for each in on.engine.requests}) == 1
            assert {beat.prefill_prior for beat in on.router.beats} == {None}
            on.engine.script = hello
            assert (await on.router.answer(await on.router.send_work(1))).outcome == Outcome.DONE
    [line] = [each.getMessage() for each in caplog.records if "speed probe" in each.getMessage()]
    assert says in line and "from clients' answers alone" in line


async def test_an_agent_that_ends_closes_the_probes_connection(nats_server) -> None:
    closed = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.hung_up()
        closed.set()

    async with scene(nats_server, script, speed_probe=True) as on:
        await on.router.until(lambda: on.engine.requests)
        began = time.monotonic()
        on.stop.request()
        await asyncio.wait_for(closed.wait(), 20.0)
        await on.task
        assert time.monotonic() - began < speed_probe.LIMIT_S / 2
