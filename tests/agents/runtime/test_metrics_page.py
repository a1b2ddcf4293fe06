"""The agent's own Prometheus page: there is one by default, and agents of a host don't collide."""

import logging
import re
import socket
import time

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as text_format

from agents.core.offline_work import OfflineTotals
from agents.runtime import metrics
from schemas.state import EngineResults, Heartbeat, ReplicaState
from tests.agents.scene import hello, scene
from tests.support.ports import free_ports, free_row

PARSERS = {"text/plain": text_format, "application/openmetrics-text": open_metrics}


async def page(port: int, accept: str = "text/plain") -> dict[str, tuple[dict[str, str], float]]:
    """The samples of the page on that port: name → labels and value."""
    url, headers = f"http://127.0.0.1:{port}/metrics", {"accept": accept}
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as answer:
        assert answer.content_type == accept
        families = list(PARSERS[accept](await answer.text()))
    return {each.name: (each.labels, each.value) for one in families for each in one.samples}


def replica(samples: dict[str, tuple[dict[str, str], float]]) -> str:
    return samples["mesh_agent_full"][0]["replica"]


def ports_in(log: str) -> list[int]:
    return [int(port) for port in re.findall(r"metrics at http://127.0.0.1:(\d+)/", log)]


async def test_each_agent_of_a_host_has_a_page(nats_server, monkeypatch, caplog) -> None:
    monkeypatch.setattr(metrics, "PORTS", free_row(8))
    with caplog.at_level(logging.INFO, metrics.__name__):
        async with scene(nats_server, hello), scene(nats_server, hello, replica="g1"):
            first, second = ports_in(caplog.text)
            assert replica(await page(first)) == "g0"
            assert replica(await page(second)) == "g1"


async def test_where_all_ports_are_taken_the_agent_works_without_a_page(
    nats_server, monkeypatch, caplog
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(metrics, "PORTS", [taken.getsockname()[1]])
        async with scene(nats_server, hello) as on:
            await on.router.answer(await on.router.send_work(1))
    assert "no metrics page: ports" in caplog.text


@pytest.mark.parametrize("accept", PARSERS)
async def test_the_page_shows_the_process_in_both_formats(nats_server, accept) -> None:
    [port] = free_ports(1)
    began_at = time.time()
    async with scene(nats_server, hello, metrics_port=port):
        samples = await page(port, accept)
    values = {name: value for name, (_, value) in samples.items()}
    assert values["process_cpu_seconds_total"] > 0.0
    assert 2**20 < values["process_resident_memory_bytes"] < values["process_virtual_memory_bytes"]
    assert 3 < values["process_open_fds"] < values["process_max_fds"]
    assert began_at - 86_400 < values["process_start_time_seconds"] < time.time()


async def test_a_port_that_was_given_must_be_free(nats_server) -> None:
    [port] = free_ports(1)
    async with scene(nats_server, hello, metrics_port=port):
        with pytest.raises(ExceptionGroup) as refused:
            async with scene(nats_server, hello, replica="g1", metrics_port=port):
                pass
    assert refused.group_contains(OSError, match=str(port))


async def test_no_page_where_none_is_wanted(nats_server, monkeypatch, caplog) -> None:
    monkeypatch.setattr(metrics, "PORTS", free_row(8))
    with caplog.at_level(logging.INFO, metrics.__name__):
        async with scene(nats_server, hello, metrics_port=0):
            assert not caplog.records


@pytest.mark.parametrize(
    ("results", "value"),
    [
        (None, 0.0),
        (EngineResults(failed=1, of=9, in_a_row=1, what="HTTP 500"), 0.0),
        (EngineResults(failed=9, of=10, in_a_row=2, what="HTTP 500"), 1.0),
    ],
)
def test_an_engine_that_fails_its_requests_is_shown(results, value) -> None:
    registry = CollectorRegistry(auto_describe=False)
    seen = Heartbeat(
        region="us",
        replica="g0",
        epoch=1,
        seq=1,
        state=ReplicaState.READY,
        engine="vllm",
        models=(),
        full=False,
        pending=0,
        running=0,
        outstanding=0,
        outstanding_max=8,
        results=results,
    )
    registry.register(metrics.HeartbeatCollector(lambda: seen, OfflineTotals, lambda: 0))
    labels = {"region": seen.region, "replica": "g0", "engine": seen.engine}
    assert registry.get_sample_value("mesh_agent_engine_failing", labels) == value
