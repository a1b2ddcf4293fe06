"""Two regions as real processes over a delayed leaf link; us is full, so its peer answers."""

import asyncio

import aiohttp
import openai
import orjson

from tests.support.mesh_up import mesh_up, write_config
from tests.support.otlp_collector import otlp_collector
from tests.support.scripted_engine import say, scripted_engine
from tests.support.until import PATIENCE_S

ROOT, FORWARD = "chat tiny", "publish mesh.{region}.ingress"
INGRESS, WORK = "process mesh.{region}.ingress", "process mesh.{region}.replica.{replica}.work"
TRACE = {
    ("SERVER", ROOT),
    ("PRODUCER", FORWARD),
    ("CONSUMER", INGRESS),
    ("CONSUMER", WORK),
    ("CLIENT", ROOT),
}


async def until_full(endpoint: str, state: str) -> None:
    """Wait until the region's router says of its one replica that it is in this state."""
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{endpoint}/metrics") as answer:
                if f'mesh_replicas{{state="{state}"}} 1.0' in await answer.text():
                    return
            await asyncio.sleep(0.02)


async def test_a_full_region_is_served_by_a_peer_and_the_trace_shows_one_hop(tmp_path, monkeypatch):
    async with (
        otlp_collector() as collector,
        scripted_engine() as near,
        scripted_engine() as far,
    ):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        far.behaviour = say("from ", "afar")
        near.waiting = 9
        engines = ("--engine", f"us={near.url}", "--engine", f"eu={far.url}")
        given = (*engines, "--engine-kind", "vllm", "--policy", "skywalker")
        config = write_config(tmp_path, regions=("us", "eu"))
        async with mesh_up(tmp_path, *given, config=config, time_scale=None) as mesh:
            await until_full(mesh.endpoint("us"), "full")
            async with openai.AsyncOpenAI(
                base_url=mesh.endpoint("us") + "/v1", api_key="none", max_retries=0
            ) as api:
                raw = await api.chat.completions.with_raw_response.create(
                    model="tiny",
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    extra_headers={"x-mesh-debug": "1", "x-request-id": "hop-1"},
                )
                words = [
                    chunk.choices[0].delta.content async for chunk in raw.parse() if chunk.choices
                ]
            spans = await collector.until(TRACE, "hop-1")
    decision = orjson.loads(raw.headers["x-mesh-decision"])
    assert words == ["from ", "afar"]
    assert raw.headers["x-mesh-region"] == "eu"
    assert (decision["placement"], decision["peer"], decision["hops"]) == ("peer", "eu", 1)
    assert near.seen == []
    assert len(far.seen) == 1
    assert far.seen[0]["stream_options"] == {"include_usage": True}  # of the agent
    _is_one_tree_over_two_regions(spans, far.headers[0])


def _is_one_tree_over_two_regions(spans, engine_headers) -> None:
    by_id = {span.id: span for span in spans}
    [engine] = [span for span in spans if span.kind == "CLIENT"]
    chain, span = [], engine
    while span is not None:
        chain.append((span.region, span.kind, span.name))
        span = by_id.get(span.parent)
    assert chain == [
        ("eu", "CLIENT", ROOT),
        ("eu", "CONSUMER", WORK),
        ("eu", "CONSUMER", INGRESS),
        ("us", "PRODUCER", FORWARD),
        ("us", "SERVER", ROOT),
    ]
    assert [span.name for span in spans].count(INGRESS) == 1  # one hop
    [root] = [span for span in spans if span.kind == "SERVER"]
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["mesh.region"] == "eu"
    assert root.attributes["mesh.replica"] == "eu-0"
    assert engine.attributes["gen_ai.provider.name"] == "vllm"
    resources = {span.resource["service.instance.id"] for span in spans}
    assert resources == {"us/r1", "eu/r1", "eu/eu-0"}
    decisions = [span for span in spans if span.name == "mesh.decide"]
    assert {span.region for span in decisions} == {"us", "eu"}
    assert all("mesh.candidates" in span.attributes for span in decisions)
    version, trace, parent, _ = engine_headers["traceparent"].split("-")
    assert (trace, parent) == (engine.trace, engine.id)
    assert version == "00"
