"""Every panel of the dashboard has an answer in a real Prometheus while a real mesh has work."""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from infra.process import end_all
from tests.dashboards.test_mesh_dashboard import graphs
from tests.dashboards.test_rules import RULES, recorded, rules
from tests.support.exported_metrics import EXPORTED, selectors
from tests.support.mesh_up import MeshUp, mesh_up, write_config
from tests.support.otlp_collector import Collector, otlp_collector
from tests.support.prometheus import Prometheus, running_prometheus, scrape_config

pytestmark = pytest.mark.prometheus

ANSWERED_S = 120.0
STREAMS = 40  # at once, more than the replica of one region takes
BATCH_LINES = 400
ALIAS, MODEL = "alias", "mistralai/Mistral-7B-Instruct-v0.3"
WINDOW = "1m"  # in the place of Grafana's own intervals
GRAFANA = re.compile(r"\$__rate_interval|\$__interval|\$__range|\$region")
USAGE = {"include_usage": True}
PROMPT = "What holds the mesh together? " * 40  # several blocks, so that prefixes are found


def query(expression: str) -> str:
    """A panel's query as Grafana sends it, for all regions."""
    return GRAFANA.sub(lambda name: ".*" if name[0] == "$region" else WINDOW, expression)


async def stream(http: aiohttp.ClientSession, mesh: MeshUp, number: int) -> None:
    """One client of us that asks again and again; every fourth wants whole answers, every fifth
    asks for an alias."""
    body = {"model": mesh.model if number % 5 else ALIAS, "max_tokens": 30}
    body |= {"stream": True, "stream_options": USAGE} if number % 4 else {}
    for turn in range(1_000_000):
        text = f"{number} {turn} {PROMPT}" if turn % 2 else f"{PROMPT} {number}"
        request = body | {"messages": [{"role": "user", "content": text}]}
        url = f"{mesh.endpoint('us')}/v1/chat/completions"
        with contextlib.suppress(aiohttp.ClientError):
            async with http.post(url, json=request) as answer:
                await answer.read()


async def prompts_of_all_lengths(mesh: MeshUp, prometheus: Prometheus) -> None:
    """A client of eu, alone, until an agent has learned how long a prompt token takes."""
    url = f"{mesh.endpoint('eu')}/v1/chat/completions"
    body = {"model": mesh.model, "max_tokens": 1, "stream": True, "stream_options": USAGE}
    async with aiohttp.ClientSession() as http, asyncio.timeout(ANSWERED_S):
        for turn in range(1_000_000):
            text = f"{turn} {PROMPT * (1 + turn * 7 % 20)}"
            request = body | {"messages": [{"role": "user", "content": text}]}
            async with http.post(url, json=request) as answer:
                await answer.read()
            if await prometheus.values("mesh_replica_prefill_seconds_per_token"):
                return


async def refused(http: aiohttp.ClientSession, mesh: MeshUp) -> None:
    """A client whose requests are no JSON."""
    while True:
        url = f"{mesh.endpoint('us')}/v1/chat/completions"
        async with http.post(url, data=b"{", headers={"content-type": "application/json"}) as bad:
            assert bad.status == 400
        await asyncio.sleep(0.2)


async def batch_job(http: aiohttp.ClientSession, mesh: MeshUp) -> None:
    """Jobs, one after another; each output is fetched."""
    base = f"{mesh.endpoint('us')}/v1"
    body = {"model": mesh.model, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [json.dumps(line | {"custom_id": f"{number}"}) for number in range(BATCH_LINES)]
    while True:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(lines).encode(), filename="in.jsonl")
        async with http.post(f"{base}/files", data=form) as answer:
            file = (await answer.json())["id"]
        wanted = {"input_file_id": file, "endpoint": line["url"], "completion_window": "24h"}
        async with http.post(f"{base}/batches", json=wanted) as answer:
            job = await answer.json()
        while job.get("status") not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.5)
            async with http.get(f"{base}/batches/{job['id']}") as answer:
                job = await answer.json()
        async with http.get(f"{base}/files/{job['output_file_id']}/content") as answer:
            assert len((await answer.read()).splitlines()) == BATCH_LINES


@contextlib.asynccontextmanager
async def traced(environment: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """Processes that start meanwhile trace one request of ten."""
    async with otlp_collector() as collector:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        environment.setenv("OTEL_TRACES_SAMPLER_ARG", "0.1")
        yield collector


@contextlib.contextmanager
def paused_router(mesh: MeshUp, region: str) -> Iterator[None]:
    """The region has no router meanwhile: a neighbour adopts it."""
    process = mesh.record["processes"][f"router-{region}-r1"]
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@contextlib.asynccontextmanager
async def load(mesh: MeshUp) -> AsyncIterator[Callable[[], None]]:
    """Work of all kinds; yields what raises the error of a client that broke."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as http:
        works: list[Coroutine[Any, Any, None]] = [refused(http, mesh), batch_job(http, mesh)]
        works += [stream(http, mesh, number) for number in range(STREAMS)]
        tasks = [asyncio.create_task(work) for work in works]

        def check() -> None:
            for task in tasks:
                if task.done():
                    task.result()

        try:
            yield check
        finally:
            await end_all(tasks)


async def answered(
    prometheus: Prometheus, open_panels: dict[str, list[str]]
) -> tuple[set[str], set[str]]:
    """The titles of panels that have data now, and their queries that have."""
    titles, queries = set(), set()
    for title, expressions in open_panels.items():
        for expression in expressions:
            if await prometheus.values(query(expression)):
                titles.add(title)
                queries.add(expression)
    return titles, queries


async def test_every_panel_has_an_answer_and_every_rule_is_evaluated(
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
):
    config = write_config(tmp_path, batch_runners=("batch-0",))
    with config.open("a") as text:
        text.write(f'[models.{ALIAS}]\nto = "{MODEL}"\nshadow = {{ other = 1.0 }}\n')
    panels = {panel["title"]: [t["expr"] for t in panel["targets"]] for panel in graphs}
    async with (
        traced(monkeypatch) as collector,
        mesh_up(tmp_path, config=config, time_scale=4.0) as mesh,
        running_prometheus(tmp_path, scrape_config(mesh, RULES)) as prometheus,
    ):
        await prompts_of_all_lengths(mesh, prometheus)
        seen, left = await every_panel_answered(mesh, prometheus, panels)
        assert not left, f"no data in {ANSWERED_S:g} s: {sorted(left)}"
        all_queries = {expression for expressions in panels.values() for expression in expressions}
        counts = f"{len(panels)} panels, {len(seen)} of {len(all_queries)} queries"
        record_property("counted", f"a Prometheus answered {counts}")
        await examine_exemplars(prometheus, panels["Time to first token"], collector)
        await examine_rules(prometheus)
        record_property("counted", f"and evaluated {len(rules)} rules")
        await examine_names(prometheus, all_queries)


async def every_panel_answered(
    mesh: MeshUp, prometheus: Prometheus, panels: dict[str, list[str]]
) -> tuple[set[str], dict[str, list[str]]]:
    """The queries that had data under load, and the panels that had none in time."""
    seen: set[str] = set()
    left = panels

    async def look() -> None:
        nonlocal left
        titles, queries = await answered(prometheus, left)
        seen.update(queries)
        left = {title: left[title] for title in left if title not in titles}

    await look()
    async with load(mesh) as check:
        with contextlib.suppress(TimeoutError), paused_router(mesh, "ap"):
            async with asyncio.timeout(ANSWERED_S / 4):
                while not await prometheus.values("mesh_adopted_replicas"):
                    await asyncio.sleep(0.5)
                await look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWERED_S):
                while left:
                    check()
                    await look()
                    await asyncio.sleep(1)
        _, now = await answered(prometheus, panels)
    return seen | now, left


async def examine_rules(prometheus: Prometheus) -> None:
    """Each rule was evaluated without an error."""
    groups = (await prometheus.ask("rules"))["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert len(found) == len(rules)
    assert {rule["health"] for rule in found} == {"ok"}, found


async def examine_exemplars(prometheus: Prometheus, panel: list[str], collector: Collector) -> None:
    """A point of the panel leads to the trace of one request, which was exported."""
    async with asyncio.timeout(ANSWERED_S):
        while True:
            traces = {span.trace for span in collector.roots()}
            for expression in panel:
                asked, now = query(expression), time.time()
                found = await prometheus.ask(
                    "query_exemplars", query=asked, start=f"{now - 600:f}", end=f"{now:f}"
                )
                if {e["labels"]["trace_id"] for one in found for e in one["exemplars"]} & traces:
                    return
            await asyncio.sleep(0.5)


async def examine_names(prometheus: Prometheus, queries: set[str]) -> None:
    """What is asked for is on a page that was scraped."""
    pages = await prometheus.ask("metadata")
    expressions = {*queries, *(rule["expr"] for rule in rules)}
    asked = {s.name for expression in expressions for s in selectors(expression)}
    families = {EXPORTED[name].name for name in asked - set(recorded) - {"up"}}
    written = {name.removesuffix("_total") for name in pages}
    assert families <= written, families - written
