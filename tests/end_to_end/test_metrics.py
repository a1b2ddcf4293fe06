"""What real routers say of real requests: the page in both formats, against answers and traces."""

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as text_format
from prometheus_client.samples import Sample

from tests.support.mesh_up import mesh_up, write_config
from tests.support.otlp_collector import otlp_collector
from tests.support.until import PATIENCE_S

MODEL = "mistralai/Mistral-7B-Instruct-v0.3"
SPANS = {("SERVER", f"chat {MODEL}"), ("CLIENT", f"chat {MODEL}")}  # of router and agent
STREAMS, WHOLE, TOKENS = 3, 2, 12
OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
PARSERS = {"text/plain": text_format, "application/openmetrics-text": open_metrics}


async def families(http: aiohttp.ClientSession, url: str, accept: str) -> list[Metric]:
    async with http.get(f"{url}/metrics", headers={"accept": accept}) as answer:
        return list(PARSERS[answer.content_type](await answer.text()))


def samples(page: list[Metric], name: str, **labels: str) -> Iterator[Sample]:
    for family in page:
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample


def total(page: list[Metric], name: str, **labels: str) -> float:
    return sum(sample.value for sample in samples(page, name, **labels))


async def ask(http: aiohttp.ClientSession, url: str, name: str, *, stream: bool) -> bytes:
    message = {"role": "user", "content": f"Request {name}: " + "words " * 60}
    body = {
        "model": MODEL,
        "messages": [message],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": stream,
    }
    headers = {"x-request-id": name}
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read()


async def counted(http: aiohttp.ClientSession, url: str) -> list[Metric]:
    """The page once all requests are on it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            page = await families(http, url, OPEN_METRICS)
            if total(page, "mesh_requests_total", outcome="ok") == STREAMS + WHOLE:
                return page
            await asyncio.sleep(0.05)


async def test_requests_on_the_page_are_those_that_were_served(tmp_path, monkeypatch):
    async with otlp_collector() as collector, aiohttp.ClientSession() as http:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        config = write_config(tmp_path, regions=("us",))
        async with mesh_up(tmp_path, config=config, time_scale=2.0) as mesh:
            url = mesh.endpoint("us")
            for number in range(STREAMS):
                stream = await ask(http, url, f"stream-{number}", stream=True)
                assert b'"usage"' not in stream
                assert stream.endswith(b"data: [DONE]\n\n")
            for number in range(WHOLE):
                await ask(http, url, f"whole-{number}", stream=False)
            async with http.post(f"{url}/v1/chat/completions", json={"model": "none"}) as refused:
                assert refused.status == 400
            page = await counted(http, url)
            plain = await families(http, url, "text/plain")
            traces = {name: await collector.until(SPANS, name) for name in ("stream-0", "whole-0")}
    check_values(page)
    check_values(plain)
    check_exemplars(page, {span.trace for span in collector.spans})
    assert not any(sample.exemplar for family in plain for sample in family.samples)
    check_spans(traces)


def check_values(page: list[Metric]) -> None:
    of_model = {"model": MODEL, "tenant": "", "served_region": "us"}
    ttft, duration = "mesh_request_ttft_seconds", "mesh_request_duration_seconds"
    token_time = "mesh_request_time_per_output_token_seconds"
    assert total(page, f"{ttft}_count", served="local", **of_model) == STREAMS
    assert total(page, f"{ttft}_count") == STREAMS
    assert total(page, f"{duration}_count", streamed="true", **of_model) == STREAMS
    assert total(page, f"{duration}_count", streamed="false", **of_model) == WHOLE
    streamed_s = total(page, f"{duration}_sum", streamed="true")
    tokens_s = total(page, f"{token_time}_sum", **of_model) * (TOKENS - 1)
    timed = total(page, f"{token_time}_count")
    assert 0 < timed <= STREAMS  # on a busy machine a whole answer may come at once
    if timed == STREAMS:
        assert total(page, f"{ttft}_sum") + tokens_s == pytest.approx(streamed_s, rel=0.5)
    assert total(page, "mesh_output_tokens_total", **of_model) == TOKENS * (STREAMS + WHOLE)
    assert total(page, "mesh_prompt_tokens_total", **of_model) > 60 * (STREAMS + WHOLE)
    assert total(page, "mesh_inflight", model=MODEL) == 0.0
    assert total(page, "process_cpu_seconds_total") > 0.0


def check_exemplars(page: list[Metric], traces: set[str]) -> None:
    names = {
        sample.name
        for family in page
        for sample in family.samples
        if sample.exemplar and sample.exemplar.labels["trace_id"] in traces
    }
    known = ("ttft", "duration", "time_per_output_token")
    assert names == {f"mesh_request_{name}_seconds_bucket" for name in known} | {
        "mesh_requests_total"
    }


def check_spans(traces: dict[str, list]) -> None:
    """Of answers that were not streamed the first byte means nothing."""
    found = {name: {span.kind: span.attributes for span in spans} for name, spans in traces.items()}
    for name, is_stream in (("stream-0", True), ("whole-0", False)):
        assert ("mesh.ttft_s" in found[name]["SERVER"]) is is_stream
        answer = found[name]["CLIENT"]
        assert ("gen_ai.response.time_to_first_chunk" in answer) is is_stream
        assert answer["gen_ai.usage.output_tokens"] == TOKENS
        assert answer["gen_ai.usage.input_tokens"] > 60
