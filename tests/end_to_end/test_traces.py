"""What traces say of a running mesh, as a collector of OTLP receives them."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp

from tests.support.mesh_up import mesh_up, write_config
from tests.support.otlp_collector import otlp_collector
from tests.support.scripted_engine import event, fail, hang, say, scripted_engine

SLOW_TTFT_S = 4.0  # a suspended process alone does not take as long
SAMPLED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
ROOT, ENGINE = ("SERVER", "chat tiny"), ("CLIENT", "chat tiny")
WORK = "process mesh.{region}.replica.{replica}.work"
BODY = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def traced_mesh(directory, monkeypatch):
    """One region with one engine; none of its requests is sampled by chance."""
    async with otlp_collector() as collector, scripted_engine() as engine:
        for name, value in {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0",
            "MESH_TRACE_SLOW_TTFT_S": str(SLOW_TTFT_S),
        }.items():
            monkeypatch.setenv(name, value)
        given = ("--engine", f"us={engine.url}", "--engine-kind", "vllm")
        config = write_config(directory, regions=("us",))
        async with (
            mesh_up(directory, *given, config=config, time_scale=None) as mesh,
            aiohttp.ClientSession(f"{mesh.endpoint('us')}/v1/chat/") as http,
        ):
            yield http, engine, collector


async def ask(http, name: str, **headers: str) -> int:
    given = {"x-request-id": name, **headers}
    async with http.post("completions", json=BODY, headers=given) as answer:
        await answer.read()
        return answer.status


async def test_what_is_traced_where_nothing_is_sampled_by_chance(tmp_path, monkeypatch):
    async with traced_mesh(tmp_path, monkeypatch) as (http, engine, collector):
        await errors_and_slow_requests_are_traced_whatever_the_share(http, engine, collector)
        await a_sampled_request_is_found_by_its_replica_and_says_that_its_client_left(
            http, engine, collector
        )


async def errors_and_slow_requests_are_traced_whatever_the_share(http, engine, collector):
    engine.behaviour = say("soon")
    assert await ask(http, "fast") == 200
    engine.behaviour = fail(400)
    assert await ask(http, "mistaken") == 400
    gate = asyncio.Event()
    engine.behaviour = hang(gate=gate)
    asyncio.get_running_loop().call_later(SLOW_TTFT_S + 0.2, gate.set)
    assert await ask(http, "slow") == 200
    engine.behaviour = hang()
    assert await ask(http, "late", **{"x-mesh-timeout-s": "0.5"}) == 504
    engine.behaviour = fail(500)
    assert await ask(http, "failed") == 500
    kept = {name: await collector.until({ROOT}, name) for name in ("slow", "late", "failed")}
    asked = {span.attributes.get("mesh.request_id") for span in collector.spans} - {None}
    # Spans of one process arrive in their order, so those of earlier requests would be here.
    assert asked == set(kept)
    roots = {name: root for name, spans in kept.items() for root in spans if root.kind == "SERVER"}
    reasons = {name: root.attributes["mesh.kept_because"] for name, root in roots.items()}
    assert reasons == {"slow": "slow", "late": "error", "failed": "error"}
    assert roots["slow"].status == ("UNSET", "")
    assert roots["slow"].attributes["mesh.ttft_s"] >= SLOW_TTFT_S
    assert roots["slow"].duration_s >= SLOW_TTFT_S
    assert roots["late"].status[0] == roots["failed"].status[0] == "ERROR"
    assert roots["late"].attributes["error.type"] == "deadline_exceeded"
    assert roots["failed"].attributes["error.type"] == "500"
    for spans in kept.values():
        assert {span.service for span in spans} == {"mesh-router"}, "the agent had it as unsampled"
        assert {"mesh.decide", "publish mesh.{region}.replica.{replica}.work"} <= {
            span.name for span in spans
        }


async def a_sampled_request_is_found_by_its_replica_and_says_that_its_client_left(
    http, engine, collector
):
    engine.behaviour = hang(event("first"))
    given = {"x-request-id": "left", **SAMPLED}
    async with http.post("completions", json=BODY, headers=given) as answer:
        await answer.content.readany()
        answer.close()
    spans = await collector.until({ROOT, ENGINE, ("CONSUMER", WORK)}, "left")
    found = collector.roots(**{"mesh.region": "us", "mesh.replica": "us-0"})
    root, engine_s, work = (
        next(span for span in spans if span.kind == kind)
        for kind in ("SERVER", "CLIENT", "CONSUMER")
    )
    assert root in found
    assert root.trace == "a" * 32
    assert root.parent == "b" * 16
    assert root.status == ("ERROR", "the client hung up")
    assert root.attributes["error.type"] == "client_gone"
    assert root.attributes["http.response.status_code"] == 200, "was sent"
    assert work.status[0] == engine_s.status[0] == "ERROR"
    assert work.attributes["error.type"] == engine_s.attributes["error.type"] == "cancelled"
    assert engine_s.attributes["http.response.status_code"] == 200
    assert engine_s.attributes["server.port"] == engine.port
    assert root.resource["service.instance.id"] == "us/r1"
    assert work.resource["service.instance.id"] == "us/us-0"
