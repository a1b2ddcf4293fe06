"""The agent's own Prometheus page: its heartbeat, as gauges. Off unless a port is given."""

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agents.adapters.bus import AgentBus
from agents.core.offline_work import OfflineTotals
from agents.runtime.agent import Agent
from schemas.state import Heartbeat

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
        labels = (beat.region, beat.replica, beat.engine)
        for name, about in GAUGES.items():
            gauge = GaugeMetricFamily(f"mesh_agent_{name}", about, labels=LABELS)
            if (value := getattr(beat, name)) is not None:
                gauge.add_metric(labels, float(value))
            yield gauge
        for name, about in COUNTERS.items():
            counter = CounterMetricFamily(f"mesh_agent_{name}", about, labels=LABELS)
            counter.add_metric(labels, float(getattr(beat, name)))
            yield counter
        totals = self._offline()
        for name, about in OFFLINE_COUNTERS.items():
            counter = CounterMetricFamily(f"mesh_agent_offline_{name}", about, labels=LABELS)
            counter.add_metric(labels, float(getattr(totals, name)))
            yield counter
        dropped = CounterMetricFamily(
            "mesh_agent_replies_dropped",
            "Work messages dropped because no response may go to their reply subject",
            labels=LABELS,
        )
        dropped.add_metric(labels, float(self._unanswered()))
        yield dropped
        state = GaugeMetricFamily(
            "mesh_agent_state", "1 for the state the replica is in", labels=(*LABELS, "state")
        )
        state.add_metric((*labels, beat.state), 1.0)
        yield state


async def serve_metrics(
    opened: AsyncExitStack, address: tuple[str, int], agent: Agent, bus: AgentBus
) -> None:
    """Serve `/metrics` until `opened` closes. Raises OSError when the port is taken."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        HeartbeatCollector(agent.heartbeat, agent.offline_totals, lambda: bus.unanswered)
    )

    async def page(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    opened.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, *address).start()
