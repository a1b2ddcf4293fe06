"""A real Jaeger beside a running mesh: what an operator finds there, by the names that documents
give, of a request of every fate. The last line printed counts traces, queries and spans."""

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import orjson
import pytest
import pytest_asyncio
from aiohttp import web

from tests.support.mesh_up import MeshUp, mesh_up, write_config
from tests.support.pages import ROOT as ROOT_FOLDER
from tests.support.pages import blocks
from tests.support.scripted_engine import (
    ScriptedEngine,
    event,
    fail,
    hang,
    say,
    scripted_engine,
)
from tests.tools.jaeger import ROUTER, Jaeger, Span, Trace, running_jaeger

pytestmark = [
    pytest.mark.tools,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

AGREE_S = 0.005
SLOW_TTFT_S = 4.0  # a suspended process alone does not take as long
UNSAMPLED = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-00"}
CHAT = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
EMBED = {"model": "tiny", "input": "hello"}
ROOT, WORK = "chat tiny", "process mesh.{region}.replica.{replica}.work"
FATES = ("local", "forwarded", "held", "failed", "left", "late", "embedded")
OPERATE = "docs/operate.md"


class Answered(NamedTuple):
    """What a client got."""

    status: int
    receipt: dict[str, object]


class Traced(NamedTuple):
    """A mesh whose spans go to a Jaeger, and what its clients got."""

    jaeger: Jaeger
    mesh: MeshUp
    answers: dict[str, Answered]
    ttft_s: dict[str, float]  # what the metric of us grew by

    async def trace(self, name: str, spans: int) -> Trace:
        """Of that request, with so many spans or more. Each process sends its own in its time."""

        def is_whole(trace: Trace) -> bool:
            ids = {span.id for span in trace}
            return len(trace) >= spans and all(ids.issuperset(span.parents) for span in trace)

        return await self.jaeger.until(is_whole, **{"mesh.request_id": name})


async def metric(mesh: MeshUp, name: str) -> float:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{mesh.endpoint('us')}/metrics") as answer,
    ):
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))


async def until_metric(mesh: MeshUp, name: str, value: float) -> None:
    async with asyncio.timeout(30):
        while await metric(mesh, name) != value:
            await asyncio.sleep(0.02)


async def ask(mesh: MeshUp, name: str, path: str = "chat/completions", **headers: str) -> Answered:
    given = {"x-request-id": name, "x-mesh-debug": "1", **headers}
    body = EMBED if path == "embeddings" else CHAT
    async with (
        aiohttp.ClientSession(f"{mesh.endpoint('us')}/v1/") as http,
        http.post(path, json=body, headers=given) as answer,
    ):
        await answer.read()
        return Answered(answer.status, orjson.loads(answer.headers.get("x-mesh-decision", "{}")))


async def hang_up(mesh: MeshUp, name: str) -> None:
    """Leave after the first byte."""
    async with (
        aiohttp.ClientSession(f"{mesh.endpoint('us')}/v1/") as http,
        http.post("chat/completions", json=CHAT, headers={"x-request-id": name}) as answer,
    ):
        await answer.content.readany()
        answer.close()


async def vectors(request: web.Request, body: dict) -> web.StreamResponse:
    data = [{"object": "embedding", "index": 0, "embedding": [0.25] * 8}]
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    return web.json_response({"object": "list", "data": data, "usage": usage})


@asynccontextmanager
async def exporting(url: str, share: str) -> AsyncIterator[None]:
    """Processes that start meanwhile trace that share."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": share,
            "MESH_TRACE_SLOW_TTFT_S": str(SLOW_TTFT_S),
        }.items():
            environment.setenv(name, value)
        yield


async def play(
    mesh: MeshUp, near: ScriptedEngine, far: ScriptedEngine
) -> tuple[dict[str, Answered], dict[str, float]]:
    """One request of each fate."""
    answers, ttft_s = {}, {}
    ttft = "mesh_request_ttft_seconds_sum"
    answers["local"] = await ask(mesh, "local")
    answers["embedded"] = await ask(mesh, "embedded", "embeddings")
    near.behaviour = hang(event("first"))
    await hang_up(mesh, "left")
    near.behaviour = hang()
    answers["late"] = await ask(mesh, "late", **{"x-mesh-timeout-s": "0.5"})
    near.behaviour = far.behaviour = fail(500)
    answers["failed"] = await ask(mesh, "failed")
    near.behaviour, far.behaviour = say("near"), say("far")
    near.waiting = 9
    await until_metric(mesh, 'mesh_replicas{state="full"}', 1.0)
    await until_metric(mesh, "mesh_peer_replicas_free", 1.0)
    before_s = await metric(mesh, ttft)
    answers["forwarded"] = await ask(mesh, "forwarded")
    ttft_s["forwarded"] = await metric(mesh, ttft) - before_s
    far.waiting = 9
    await until_metric(mesh, "mesh_peer_replicas_free", 0.0)
    before_s = await metric(mesh, ttft)
    waiting = asyncio.create_task(ask(mesh, "held"))
    await until_metric(mesh, "mesh_hold_queue_length", 1.0)
    near.waiting = 0
    answers["held"] = await waiting
    ttft_s["held"] = await metric(mesh, ttft) - before_s
    return answers, ttft_s


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def jaeger(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Jaeger]:
    async with running_jaeger(tmp_path_factory.mktemp("jaeger")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(jaeger: Jaeger, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    folder = tmp_path_factory.mktemp("mesh")
    async with (
        exporting(jaeger.otlp_url, "1"),
        scripted_engine() as near,
        scripted_engine() as far,
    ):
        near.embeddings = far.embeddings = vectors
        near.behaviour, far.behaviour = say("near"), say("far")
        engines = ("--engine", f"us={near.url}", "--engine", f"eu={far.url}")
        given = (*engines, "--engine-kind", "vllm", "--policy", "skywalker")
        config = write_config(folder, regions=("us", "eu"))
        async with mesh_up(folder, *given, config=config, time_scale=None) as mesh:
            yield Traced(jaeger, mesh, *await play(mesh, near, far))


def root_of(trace: Trace) -> Span:
    [root] = [span for span in trace if not span.parents]
    return root


async def test_every_request_is_one_whole_trace(traced: Traced):
    statuses = {name: answer.status for name, answer in traced.answers.items()}
    assert statuses == {
        "local": 200, "embedded": 200, "forwarded": 200, "held": 200, "late": 504, "failed": 500,
    }  # fmt: skip
    for name in FATES:
        trace = await traced.trace(name, 5)
        by_id = {span.id: span for span in trace}
        root = root_of(trace)
        assert (root.process, root.kind) == ("us/r1", "server")
        for span in trace:
            assert set(span.parents) <= by_id.keys(), f"an orphan of {name}: {span}"
            for parent in map(by_id.__getitem__, span.parents):
                if parent.process != span.process:
                    assert span.began_s >= parent.began_s, (name, span, parent)
                works_on = span.ended_s > parent.ended_s and span.kind == "consumer"
                # Jaeger takes a consumer that works on when its message was sent for a skew.
                assert works_on or not span.warnings, (name, span, parent)


async def test_a_forwarded_request_is_one_trace_over_three_processes(traced: Traced):
    trace = await traced.trace("forwarded", 7)
    by_id = {span.id: span for span in trace}
    [engine] = [span for span in trace if span.kind == "client"]
    chain = [engine]
    while chain[-1].parents:
        chain.append(by_id[chain[-1].parents[0]])
    assert [(span.process, span.name) for span in chain] == [
        ("eu/eu-0", ROOT),
        ("eu/eu-0", WORK),
        ("eu/r1", "process mesh.{region}.ingress"),
        ("us/r1", "publish mesh.{region}.ingress"),
        ("us/r1", ROOT),
    ]


@pytest.mark.parametrize("name", ["forwarded", "held"])
async def test_parts_sum_to_the_time_to_first_token(traced: Traced, name: str):
    tags, receipt = root_of(await traced.trace(name, 5)).tags, traced.answers[name].receipt
    parts = ("held_s", "peer_held_s", "attempts_s")
    ttft_s = receipt["ttft_s"]
    assert sum(tags[f"mesh.{part}"] for part in parts) == pytest.approx(ttft_s, abs=AGREE_S)
    assert sum(receipt[part] for part in parts) == pytest.approx(ttft_s, abs=AGREE_S)
    assert tags["mesh.ttft_s"] == pytest.approx(ttft_s, abs=AGREE_S)
    assert traced.ttft_s[name] == pytest.approx(ttft_s, abs=AGREE_S)
    if name == "held":  # the other may wait for the peer's next digest, after what failed there
        assert tags["mesh.held_s"] > 0.0
    holds = [s for s in await traced.trace(name, 5) if s.name == "mesh.hold"]
    held_s = sum(span.duration_s for span in holds)
    assert held_s == pytest.approx(tags["mesh.held_s"], abs=AGREE_S)


SEARCHES = {
    "mesh.replica=us-0": {"local", "held", "left", "embedded", "late"},
    "mesh.replica=eu-0": {"forwarded", "failed"},
    "mesh.region=eu": {"forwarded", "failed"},
    "mesh.placement=peer": {"forwarded", "failed"},
    "error=true": {"failed", "late", "left"},
    "error.type=500": {"failed"},
    "error.type=deadline_exceeded": {"late"},
    "error.type=client_gone": {"left"},
    "gen_ai.request.model=tiny": set(FATES),
    "http.response.status_code=504": {"late"},
}


@pytest.mark.parametrize("tag", SEARCHES)
async def test_a_search_by_a_tag_finds_the_requests_that_have_it(traced: Traced, tag: str):
    for name in FATES:
        await traced.trace(name, 5)
    name, _, value = tag.partition("=")
    found = {
        span.tags["mesh.request_id"]
        for operation in (ROOT, "embeddings tiny")
        for trace in await traced.jaeger.search(ROUTER, operation, **{name: value})
        for span in trace
        if span.kind == "server" and str(span.tags.get(name)).lower() == value
    }
    assert found == SEARCHES[tag]


async def test_services_and_operations_are_listed(traced: Traced):
    for name in FATES:
        await traced.trace(name, 5)
    assert set(await traced.jaeger.ask("services")) >= {ROUTER, "mesh-agent"}
    listed = await traced.jaeger.ask(f"services/{ROUTER}/operations")
    assert {ROOT, "embeddings tiny", "mesh.hold", "mesh.decide"} <= set(listed)


async def test_an_exemplar_leads_to_its_trace(traced: Traced):
    headers = {"accept": "application/openmetrics-text; version=1.0.0"}
    page = f"{traced.mesh.endpoint('us')}/metrics"
    async with traced.jaeger.http.get(page, headers=headers) as answer:
        lines = (await answer.text()).splitlines()
    found = {
        id_
        for line in lines
        if line.startswith("mesh_request_ttft_seconds_bucket")
        for id_ in re.findall(r'# \{trace_id="([0-9a-f]{32})"\}', line)
    }
    assert found
    asked = set()
    for id_ in found:
        [trace] = traced.jaeger.kept(await traced.jaeger.ask(f"traces/{id_}"))
        asked.add(root_of(trace).tags["mesh.request_id"])
    assert asked <= {"local", "forwarded", "held", "left"}


async def test_what_the_page_tells_to_type_is_run(traced: Traced):
    [block] = [
        block for block in blocks("sh") if block.page == OPERATE and "jaegertracing" in block.text
    ]
    run, up, *asks = block.text.splitlines()
    assert run.startswith("docker run") and "4318:4318" in run  # this Jaeger stands for it
    assert up == "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 make up"
    assert asks
    for line in asks:
        command = line.replace("http://127.0.0.1:16686", traced.jaeger.query_url)
        command = command.replace("mine-1", "forwarded")
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command), stdout=asyncio.subprocess.PIPE
        )
        traces = traced.jaeger.kept(json.loads((await process.communicate())[0])["data"])
        traced.jaeger.queries += 1
        assert traces, line
    section = (ROOT_FOLDER / OPERATE).read_text().partition("## Traces\n")[2].partition("\n## ")[0]
    for name in ("mesh.region", "mesh.replica", "mesh.request_id", "error.type"):
        assert f"`{name}`" in section


async def test_a_slow_request_is_kept_where_one_of_a_hundred_is_sampled(
    jaeger: Jaeger, tmp_path: Path
):
    async with exporting(jaeger.otlp_url, "0.01"), scripted_engine() as engine:
        given = ("--engine", f"us={engine.url}", "--engine-kind", "vllm")
        config = write_config(tmp_path, regions=("us",))
        async with mesh_up(tmp_path, *given, config=config, time_scale=None) as mesh:
            engine.behaviour = say("soon")
            assert (await ask(mesh, "fast", **UNSAMPLED)).status == 200
            gate = asyncio.Event()
            engine.behaviour = hang(gate=gate)
            asyncio.get_running_loop().call_later(SLOW_TTFT_S + 0.2, gate.set)
            assert (await ask(mesh, "slow", **UNSAMPLED)).status == 200
            trace = await jaeger.until(len, **{"mesh.kept_because": "slow"})
    [root] = [span for span in trace if span.kind == "server"]
    assert root.tags["mesh.request_id"] == "slow"
    assert root.duration_s >= SLOW_TTFT_S
    # Spans of one process arrive in their order: that of an earlier request would be there.
    assert await jaeger.search(**{"mesh.request_id": "fast"}) == []


async def test_what_was_asked_is_counted(jaeger: Jaeger):
    assert len(jaeger.shown) > len(FATES)
    spans = sum(jaeger.shown.values())
    print(f"{len(jaeger.shown)} traces of {spans} spans, {jaeger.queries} queries")
