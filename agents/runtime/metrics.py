"""The agent's own Prometheus page: its heartbeat, as gauges, and the process.

Several agents share a host. One that was given no port takes the first free one of PORTS; its
series name its region and replica, so it does not matter which agent has which port.
"""

import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agents.adapters.bus import AgentBus
from agents.core.offline_work import OfflineTotals
from agents.runtime.agent import Agent
from infra.metrics_page import add_process_metrics, metrics_page
from schemas.state import Heartbeat

log = logging.getLogger(__name__)

PORTS = range(9700, 9764)
LABELS = ("region", "replica", "engine")

# Heartbeat field → what a person reads about it. A field that is unknown has no sample.
GAUGES = {
    "pending": "Requests accepted and not yet in the running batch",
    "running": "Requests in the running batch",
    "outstanding": "Requests taken from the bus and not finished",
    "full": "1 while new work is refused",
    "batch_max": "Most requests the engine runs at once",
    "batch_occupancy": "Share of the batch in use",
    "kv_used_ratio": "Share of the KV cache in use",
    "kv_capacity_tokens": "Tokens the KV cache holds",
    "prefill_s_per_token": "Learned seconds per uncached prompt token",
    "prefill_base_s": "Learned seconds to first token of an empty prompt",
    "decode_tokens_per_s": "Output tokens per second of one running request, recent median",
    "prefix_hit_ratio": "Share of prompt tokens found in the prefix cache",
    "engine_age_s": "Age of the last scrape of the engine",
    "offline_room_tokens": "Tokens of offline requests that it would take now",
    "offline_waiting": "Offline requests taken and not given to the engine",
    "offline_running": "Offline requests that the engine has",
}
COUNTERS = {
    "served_total": "Answers finished well",
    "refused_total": "Requests refused",
}
OFFLINE_COUNTERS = {
    "admitted": "Offline requests given to the engine",
    "preempted": "Offline requests given back for online ones, begun or not",
    "done": "Offline requests answered",
    "tokens": "Prompt and answer tokens of these",
}
REPLIES_DROPPED = "Work messages dropped because no response may go to their reply subject"
PAGE_BROKEN = "1 while a page of the engine can't be read and the engine answers all the same"
ENGINE_FAILING = "1 while the engine fails the requests that it is given"


def _gauge(name: str, about: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"mesh_agent_{name}", about, labels=LABELS)


def _counter(name: str, about: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"mesh_agent_{name}", about, labels=LABELS)


class HeartbeatCollector(Collector):
    """Makes the page from the heartbeat of the moment of the scrape."""

    def __init__(
        self,
        heartbeat: Callable[[], Heartbeat],
        offline: Callable[[], OfflineTotals],
        unanswered: Callable[[], int],
    ) -> None:
        self._heartbeat = heartbeat
        self._offline = offline
        self._unanswered = unanswered

    def collect(self) -> Iterator[Metric]:
        beat = self._heartbeat()
        labels, totals = (beat.region, beat.replica, beat.engine), self._offline()
        values: tuple[tuple[GaugeMetricFamily | CounterMetricFamily, float | None], ...] = (
            *((_gauge(name, about), getattr(beat, name)) for name, about in GAUGES.items()),
            *((_counter(name, about), getattr(beat, name)) for name, about in COUNTERS.items()),
            *(
                (_counter(f"offline_{name}", about), getattr(totals, name))
                for name, about in OFFLINE_COUNTERS.items()
            ),
            (_counter("replies_dropped", REPLIES_DROPPED), self._unanswered()),
            (_gauge("page_broken", PAGE_BROKEN), beat.page_problem is not None),
            (_gauge("engine_failing", ENGINE_FAILING), beat.is_failing),
        )
        for family, value in values:
            if value is not None:
                family.add_metric(labels, float(value))
            yield family
        state = GaugeMetricFamily(
            "mesh_agent_state", "1 for the state the replica is in", labels=(*LABELS, "state")
        )
        state.add_metric((*labels, beat.state), 1.0)
        yield state


async def serve_metrics(
    opened: AsyncExitStack, host: str, port: int | None, agent: Agent, bus: AgentBus
) -> None:
    """Serve `/metrics` until `opened` closes. `port`: None for the first free one of PORTS.

    Raises OSError where the host or a given port can't be had. Where all of PORTS are taken there
    is no page: work goes on.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        HeartbeatCollector(agent.heartbeat, agent.offline_totals, lambda: bus.unanswered)
    )
    add_process_metrics(registry)

    async def page(request: web.Request) -> web.Response:
        accept = ",".join(request.headers.getall("accept", ()))
        body, content_type = metrics_page(registry, accept)
        return web.Response(body=body, headers={"content-type": content_type})

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    opened.push_async_callback(runner.cleanup)
    if port is not None:
        await web.TCPSite(runner, host, port).start()
    elif (found := await _first_free(runner, host)) is None:
        text = "no metrics page: ports %d to %d of %s are taken; give --metrics-port"
        log.warning(text, PORTS[0], PORTS[-1], host)
    else:
        log.info("metrics at http://%s:%d/metrics", host, found)


async def _first_free(runner: web.AppRunner, host: str) -> int | None:
    """The port that is served now; None if none of PORTS is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in PORTS:
        try:
            # Listening, not only bound: of two agents that bind a port in one moment, the second
            # fails when it listens, which uvloop's `create_server` does not report.
            listening = socket.create_server((host, port), family=family)
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE:
                raise
        else:
            await web.SockSite(runner, listening).start()
            return port
    return None
