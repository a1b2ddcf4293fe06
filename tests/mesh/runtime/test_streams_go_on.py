"""A client reads one whole stream though engine after engine breaks off, also across regions."""

import asyncio
from typing import NamedTuple

import aiohttp
import orjson
import pytest
from aiohttp import web

from agents.sim.profiles import PROFILES
from agents.simserver.faults import Break, Faults
from agents.simserver.requests import RequestParser
from agents.simserver.server import SimConfig, SimServer
from mesh.adapters.access_log import AccessLogFormat
from mesh.core.lifecycle import continued_streams
from mesh.core.model.model_targets import ModelRule
from mesh.explain.story import summary
from schemas.control import RegionControl, encode_control
from schemas.ids import ModelId, RegionId
from schemas.settings import ContinueStreams
from tests.agents.scripted_engine import CHUNKED, LAST_CHUNK, Conversation, chunk, running
from tests.support.access_lines import Lines
from tests.support.nats_pair import nats_pair
from tests.support.scripted_engine import event
from tests.support.small_mesh import PATIENT, SmallMesh, client

MODEL = "m"
PROFILE = PROFILES["a100-mistral-7b"]
BODY = {
    "model": MODEL,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
    "max_tokens": 40,
    "ignore_eos": True,
}
HALF = event("half")


class Engine(NamedTuple):
    url: str


async def engine(
    mesh: SmallMesh,
    *,
    cut_after: int | None = None,
    how: Break = Break.CUT,
    time_scale: float | None = None,
) -> Engine:
    """A simulated engine that breaks off every stream after so many tokens."""
    cut = Break.NONE if cut_after is None else how
    faults = Faults(stream=cut, stream_after_tokens=cut_after or 1)
    if time_scale is None:
        time_scale = 20.0 if how is Break.CUT else 1.0  # the error comes by itself
    config = SimConfig(profile=PROFILE, models=(MODEL,), time_scale=time_scale, faults=faults)
    runner = web.AppRunner(SimServer(config).app(), handler_cancellation=True)
    await runner.setup()
    mesh.stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return Engine(f"http://127.0.0.1:{runner.addresses[0][1]}")


async def events(url: str, body: dict[str, object]) -> list[dict[str, object]]:
    """Those of one stream, up to its end."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/chat/completions", json=body) as answer,
    ):
        lines = (await answer.text()).split("\n\n")
    assert answer.status == 200
    found = [line.removeprefix("data: ") for line in lines if line]
    return [orjson.loads(one) if one != "[DONE]" else {"done": True} for one in found]


def text_of(told: list[dict[str, object]]) -> str:
    return "".join(
        choice["delta"].get("content") or "" for one in told for choice in one.get("choices", ())
    )


async def asked(
    mesh: SmallMesh, name: str, region: str = "us", **more: object
) -> list[dict[str, object]]:
    """The events of a stream that asks about this."""
    body = BODY | more | {"messages": [{"role": "user", "content": name}]}
    return await events(mesh.urls[region], body)


async def test_engines_that_break_off_here_and_abroad_are_not_noticed(tmp_path) -> None:
    async with nats_pair(tmp_path, "us", "eu") as servers:
        mesh = SmallMesh(servers)
        async with mesh.stack:
            await mesh.router("us", **PATIENT)
            await mesh.router("eu", **PATIENT)
            await mesh.agent("us", "us-0", await engine(mesh, cut_after=5))
            await mesh.agent("us", "us-1", await engine(mesh, cut_after=7))
            await mesh.until_ready("us", 2, MODEL)
            await mesh.agent("eu", "eu-0", await engine(mesh))
            await mesh.until_ready("eu", 1, MODEL)
            await mesh.until_peer("us", "eu", MODEL)
            for name in ("two", "three", "four"):
                body = BODY | {"messages": [{"role": "user", "content": name}]}
                parser = RequestParser(models=(MODEL,), max_model_len=10**6, seed=0)
                whole = parser.chat(orjson.dumps(body))
                told = await asked(mesh, name)
                assert text_of(told) == whole.answer.text
                assert told.pop() == {"done": True}
                usage = told[-1]["usage"]
                counts = usage["prompt_tokens"], usage["completion_tokens"]
                assert counts == (whole.prompt_tokens, 40)
                assert len({one["id"] for one in told}) == 1
            async with (
                aiohttp.ClientSession() as client,
                client.get(mesh.urls["us"] + "/metrics") as page,
            ):
                lines = (await page.text()).splitlines()
            counted = dict(line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))
            # Engines that fail are left out soon.
            assert float(counted['mesh_streams_continued_total{outcome="whole"}']) >= 1


async def test_streams_leave_a_replica_that_is_to_be_empty_in_all_regions(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(continued_streams, "LONG_S", 0.0)
    async with nats_pair(tmp_path, "us", "eu") as servers:
        mesh = SmallMesh(servers)
        async with mesh.stack:
            for region in ("us", "eu"):
                await mesh.router(region, **PATIENT)
            await mesh.agent("us", "us-0", await engine(mesh, time_scale=0.1))
            await mesh.until_ready("us", 1, MODEL)
            await mesh.until_peer("eu", "us", MODEL)
            asking = [asyncio.create_task(asked(mesh, f"of {one}", one)) for one in ("us", "eu")]
            cores = [mesh.routers[region].core for region in ("us", "eu")]

            def begun() -> list[bool]:
                return [one.has_started for core in cores for one in core.inflight.values()]

            await mesh.until(lambda: begun() == [True, True], "both streams to begin")
            await mesh.agent("us", "us-1", await engine(mesh))
            await mesh.until_ready("us", 2, MODEL)
            order = RegionControl(region=RegionId("us"), drained=("us-0",), moved=("us-0",))
            mesh.routers["us"].requests.leases.orders.read(1, encode_control(order))
            parser = RequestParser(models=(MODEL,), max_model_len=10**6, seed=0)
            for region, stream in zip(("us", "eu"), asking, strict=True):
                told = await stream
                body = BODY | {"messages": [{"role": "user", "content": f"of {region}"}]}
                assert text_of(told) == parser.chat(orjson.dumps(body)).answer.text
                assert told[-1] == {"done": True} and len({one["id"] for one in told[:-1]}) == 1
                counted = mesh.sample(region, "mesh_streams_continued_total", outcome="whole")
                assert counted == 1
                [life] = mesh.routers[region].requests.ended.slowest(1).requests
                assert summary(life).startswith("Its stream was moved from us")


@pytest.mark.parametrize("how", [Break.ERROR, Break.NO_DONE])
async def test_an_end_between_two_events_is_not_noticed_either(nats_server, how) -> None:
    mesh = SmallMesh({"us": nats_server})
    async with mesh.stack:
        await mesh.router("us", **PATIENT)
        await mesh.agent("us", "us-0", await engine(mesh, cut_after=5, how=how))
        await mesh.agent("us", "us-1", await engine(mesh))
        await mesh.until_ready("us", 2, MODEL)
        parser = RequestParser(models=(MODEL,), max_model_len=10**6, seed=0)
        for name in ("one", "two", "three"):
            body = BODY | {"messages": [{"role": "user", "content": name}]}
            told = await asked(mesh, name)
            assert text_of(told) == parser.chat(orjson.dumps(body)).answer.text
            assert told[-1] == {"done": True} and not any("error" in one for one in told)


async def test_where_no_other_engine_is_left_the_engines_words_end_the_stream(nats_server) -> None:
    mesh = SmallMesh({"us": nats_server})
    async with mesh.stack:
        await mesh.router("us", **PATIENT)
        await mesh.agent("us", "us-0", await engine(mesh, cut_after=5, how=Break.ERROR))
        await mesh.until_ready("us", 1, MODEL)
        told = await asked(mesh, "one")
        assert len(text_of(told)) == 20
        [error] = [one["error"] for one in told if "error" in one]
        assert "the engine core is dead" in error["message"]
        [life] = mesh.routers["us"].requests.ended.slowest(1).requests
        assert (life.status, life.outcome) == (200, "failed")
        assert f"with an error event in its stream: {error['message']}" in summary(life)


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        # To nginx, which speaks HTTP/1.0 by default; and from it.
        (b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + HALF, b""),
        (CHUNKED + chunk(HALF), LAST_CHUNK),
    ],
    ids=["its connection", "a proxy"],
)
@pytest.mark.parametrize(
    ("replicas", "rules"),
    [(1, ()), (2, (ModelRule(name=ModelId(MODEL), continue_streams=ContinueStreams.OFF),))],
    ids=["no other is left", "nobody goes on"],
)
async def test_a_stream_that_is_ended_half_way_has_failed_where(
    nats_server, capfd, begin, end, replicas, rules
) -> None:
    is_read = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.send(begin)
        await is_read.wait()
        await talk.send(end)
        talk.close()

    mesh = SmallMesh({"us": nats_server})
    async with running(script, MODEL) as cut, mesh.stack, client() as session:
        await mesh.router("us", models=rules, access_log=AccessLogFormat.LOGFMT, **PATIENT)
        for number in range(replicas):
            await mesh.agent("us", f"us-{number}", cut)
        await mesh.until_ready("us", replicas, MODEL)
        body = BODY | {"messages": [{"role": "user", "content": "one"}]}
        url = mesh.urls["us"] + "/v1/chat/completions"
        async with session.post(url, json=body) as answer:
            assert await answer.content.readexactly(len(HALF)) == HALF
            is_read.set()
            rest = await answer.content.read()
        error = orjson.loads(rest.removeprefix(b"data: "))["error"]
        assert error["code"] == "engine_failed"
        assert (await Lines(capfd).of(model=MODEL))["outcome"] == "failed"
