"""The router's Prometheus metrics: every name is here, and only here.

Counters and histograms are raised where things happen; gauges of replicas and peers are read
from the core at a scrape, so a fleet of thousands costs nothing between scrapes.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infra.metrics_page import add_process_metrics
from mesh.adapters.replica_failures import ReplicaFailures
from mesh.core.model.served_names import model_of
from mesh.core.router import RouterCore
from mesh.session.cost import Cost
from schemas.ids import ModelId
from schemas.state import Health

HEALTH_LEVELS = {Health.GREEN: 2, Health.YELLOW: 1, Health.RED: 0}
LATENESSES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
TOKEN_SECONDS = (
    *(0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5),
)
OF_REQUEST = ("model", "tenant", "served_region")  # `region` is the label that operators add
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320)
MODELS_MAX = 16
TENANTS_MAX = 32
SETS_MAX = 128  # of model, tenant and region together
OTHER = "other"  # label of a name without one of its own

LabelSet = tuple[str, str, str]  # model, tenant, region that served


class RequestLabels:
    """Which model, tenant and region one router's requests are labelled with: a bounded choice.

    Clients and peers name models and regions. A name gets a label of its own if this mesh has it
    and there is room; otherwise it is counted under OTHER. Each set of labels costs memory for
    ever, here and in the Prometheus that reads it.
    """

    def __init__(self, models: Callable[[], Collection[str]], regions: Iterable[str]) -> None:
        """`models`: those that this mesh has. `regions`: its regions."""
        self._known_models = models
        self._regions = frozenset(regions)
        self._models: set[str] = set()
        self._aliases: set[str] = set()
        self._tenants: set[str] = set()
        self._sets: dict[LabelSet, LabelSet] = {}

    def of(self, model: str, tenant: str, region: str) -> LabelSet:
        """The labels of a request; empty for no tenant, and for no region that served it."""
        return self._sets.get((model, tenant, region)) or self._new(model, tenant, region)

    def model(self, name: str) -> str:
        """The label of a model, or of a model on an optional path: the same."""
        name = model_of(ModelId(name))
        if name in self._models:
            return name
        if len(self._models) < MODELS_MAX and name in self._known_models():
            self._models.add(name)
            return name
        return OTHER

    def alias(self, name: str) -> str:
        """The label of a name that mesh.toml maps to a model; files that are read again may have
        others."""
        if name not in self._aliases:
            if len(self._aliases) >= MODELS_MAX:
                return OTHER
            self._aliases.add(name)
        return name

    def _new(self, model: str, tenant: str, region: str) -> LabelSet:
        region = region if not region or region in self._regions else OTHER
        labels = self.model(model), self._tenant(tenant), region
        if labels not in self._sets:
            if len(self._sets) >= SETS_MAX:
                return OTHER, OTHER, region
            self._sets[labels] = labels
        return labels

    def _tenant(self, name: str) -> str:
        if not name or name in self._tenants:
            return name
        if len(self._tenants) < TENANTS_MAX:
            self._tenants.add(name)
            return name
        return OTHER


class RouterMetrics:
    """One router's metrics in a registry of its own."""

    def __init__(
        self,
        core: RouterCore,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
        regions: Iterable[str] = (),
    ) -> None:
        """`clock`: the one by which the core is fed. `regions`: of the mesh, beside its own."""
        self.registry = registry
        self._request_labels = RequestLabels(core.known_models, (core.region, *regions))
        self.labels_of = self._request_labels.of
        registry.register(_CoreState(core, clock, self._request_labels.model))
        self.replica_failures = ReplicaFailures(core.replicas)
        registry.register(self.replica_failures)
        add_process_metrics(registry)
        self._client_metrics(partial(Counter, registry=registry))
        self._token_metrics(partial(Counter, registry=registry))
        self._placement_metrics(partial(Counter, registry=registry))
        self._bus_metrics(partial(Counter, registry=registry))
        gauge = partial(Gauge, registry=registry)
        self.router = gauge("mesh_router", "1, and which router this is.", ["router"])
        self.buffered = gauge(
            "mesh_answer_buffer_bytes",
            "Bytes of answers that wait for slow clients; flow control bounds it.",
        )
        self.peer_requests_held = gauge(
            "mesh_peer_requests_held", "Peers' requests that wait in this router's hold queue."
        )
        self.orders_lost = gauge(
            "mesh_orders_lost", "Whether it keeps operators' orders that the stream has lost."
        )
        self.bus_connected = gauge("mesh_bus_connected", "Whether the bus can be reached.")
        self.stream_altered = gauge(
            "mesh_stream_altered",
            "1 while a stream of the region is missing or not as it was made.",
            ["stream"],
        )
        self.bodies = gauge(
            "mesh_body_bytes",
            "Bytes of requests that are kept or arriving; beyond 512 MiB they are refused.",
        )
        self.usage_unwritten = gauge(
            "mesh_usage_unwritten_pages",
            "Pages of accounts of tokens that the region's stream has not got yet.",
        )
        self.connections = gauge("mesh_http_connections", "Open connections of clients.")
        self.connections_max = gauge(
            "mesh_http_connections_max", "Most of them; further ones are refused."
        )
        # A look-up of labels costs more than raising what it finds.
        self._requests_of = cache(self.requests.labels)
        self._ttft_of = cache(self.ttft.labels)
        self._duration_of = cache(self.duration.labels)
        self._token_time_of = cache(self.token_time.labels)
        self._tokens_of = cache(self._token_counters)
        self.placements_by_kind = cache(self.placements.labels)

    def _client_metrics(self, counter: Callable[..., Counter]) -> None:
        histogram = partial(Histogram, registry=self.registry)
        self.limited = counter(
            "mesh_requests_limited",
            "Requests refused for a limit of their key or tenant.",
            ["limit"],
        )
        self.turned_away = counter(
            "mesh_http_turned_away",
            "Connections and bodies refused before admission, by why: connections, headers_late, "
            "handshakes (of TLS), plain_http (where TLS is served), or the code of the error.",
            ["why"],
        )
        self.loop_late = histogram(
            "mesh_loop_late_seconds",
            "How much later than it was due the event loop came to a timer.",
            buckets=LATENESSES,
        )
        self.requests = counter(
            "mesh_requests",
            "Requests by how they ended: ok, shed, failed, engine_failed, client_gone; "
            "served_region is empty where no byte of an answer came.",
            ["outcome", *OF_REQUEST],
        )
        self.ttft = histogram(
            "mesh_request_ttft_seconds",
            "From a client's request to the first byte of its answer; streamed answers alone.",
            ["served", *OF_REQUEST],
            buckets=SECONDS,
        )
        self.duration = histogram(
            "mesh_request_duration_seconds",
            "From a client's request to the last byte of its answer.",
            ["streamed", *OF_REQUEST],
            buckets=SECONDS,
        )
        self.token_time = histogram(
            "mesh_request_time_per_output_token_seconds",
            "From the first byte of a streamed answer to its end, by each output token after the "
            "first: one mean for each answer.",
            OF_REQUEST,
            buckets=TOKEN_SECONDS,
        )
        self._mapped = counter(
            "mesh_requests_mapped",
            "Clients' requests that were mapped to another model, by what they asked for.",
            ["asked", "model"],
        )
        self._copies = counter(
            "mesh_shadow_copies",
            "Copies of requests whose answers are dropped: ok, failed, cancelled, and skipped, for "
            "which there was no room at once.",
            ["model", "outcome"],
        )
        self.hold = histogram(
            "mesh_hold_seconds",
            "Time placed requests, peers' included, had waited in this router's hold queue.",
            buckets=SECONDS,
        )
        self.residency_refused = counter(
            "mesh_residency_refused",
            "Requests refused because of their residency labels, by who asked: client, peer.",
            ["asker"],
        )

    def _token_metrics(self, counter: Callable[..., Counter]) -> None:
        self.prompt_tokens = counter(
            "mesh_prompt_tokens",
            "Prompt tokens of ended requests, as their engines counted, else by estimate.",
            OF_REQUEST,
        )
        self.cached_tokens = counter(
            "mesh_cached_tokens",
            "Those of them that engines had in their prefix caches.",
            OF_REQUEST,
        )
        self.output_tokens = counter(
            "mesh_output_tokens",
            "Output tokens of ended requests, as their engines counted, else by estimate.",
            OF_REQUEST,
        )
        self.estimated_tokens = counter(
            "mesh_estimated_tokens",
            "Those of prompts and outputs that are estimates: no engine's count came.",
            OF_REQUEST,
        )

    def _placement_metrics(self, counter: Callable[..., Counter]) -> None:
        self.placements = counter(
            "mesh_placements",
            "Placements of this region's requests: local, peer, hold, shed.",
            ["placement"],
        )
        self.forwards = counter(
            "mesh_forwards",
            "Requests sent to a peer, by its answer: placed, refused.",
            ["peer", "result"],
        )
        self.ingress = counter(
            "mesh_ingress",
            "Requests of peers, by result: placed, refused.",
            ["origin", "result"],
        )
        self.ingress_refusals = counter(
            "mesh_ingress_refusals", "Requests of peers not taken, by why.", ["reason"]
        )
        self.refusals = counter("mesh_refusals", "Placements not taken, by reason.", ["reason"])
        self.failures = counter("mesh_attempt_failures", "Attempts that were lost or failed.")
        self.streams_continued = counter(
            "mesh_streams_continued",
            "Streams that broke after their first byte, by what became of them: whole (another "
            "engine said the rest), failed, client_gone, or refused (none could).",
            ["outcome"],
        )

    def _bus_metrics(self, counter: Callable[..., Counter]) -> None:
        self.frames_missing = counter(
            "mesh_frames_missing", "Times that frames of an answer were lost and requested again."
        )
        self.gossip_dropped = counter("mesh_gossip_dropped", "Invalid gossip that was dropped.")
        self.leases_dropped = counter("mesh_leases_dropped", "Invalid leases that were dropped.")
        self.lease_writes_failed = counter(
            "mesh_lease_writes_failed",
            "Writes of its lease that the region's stream did not answer, or not as it should.",
        )
        self.replies_dropped = counter(
            "mesh_replies_dropped",
            "Requests on the bus whose reply subject is not allowed, by channel.",
            ["channel"],
        )

    def mapped(self, asked: str, model: str) -> None:
        """A request for one model has ended that another one served."""
        labels = self._request_labels
        self._mapped.labels(labels.alias(asked), labels.model(model)).inc()

    def copy_ended(self, model: str, outcome: str) -> None:
        """A copy for that model has ended, or was not sent."""
        self._copies.labels(self._request_labels.model(model), outcome).inc()

    # A trace id is kept as an exemplar, which leads from a value to a request that had it.

    def ttft_seen(
        self, served: str, labels: LabelSet, seconds: float, trace_id: str | None
    ) -> None:
        """A client is sent the first byte of a stream. `served`: local or peer."""
        self._ttft_of(served, *labels).observe(seconds, _exemplar(trace_id))

    def tokens_seen(self, labels: LabelSet, cost: Cost) -> None:
        """What one request of a client has cost."""
        uncached, cached, output, is_prompt_estimated, is_output_estimated = cost
        of_prompt, of_cached, of_output = self._tokens_of(labels)
        if uncached or cached:
            of_prompt.inc(uncached + cached)
        if cached:
            of_cached.inc(cached)
        if output:
            of_output.inc(output)
        if is_prompt_estimated or is_output_estimated:
            estimate = is_prompt_estimated * cost.prompt + is_output_estimated * output
            self.estimated_tokens.labels(*labels).inc(estimate)

    def token_time_seen(self, labels: LabelSet, seconds: float, trace_id: str | None) -> None:
        """The mean time of one streamed answer's output tokens."""
        self._token_time_of(*labels).observe(seconds, _exemplar(trace_id))

    def ended(
        self,
        outcome: str,
        labels: LabelSet,
        seconds: float,
        *,
        streamed: bool,
        trace_id: str | None = None,
    ) -> None:
        """Count one client's request that is over, that many seconds after it came."""
        exemplar = _exemplar(trace_id)
        self._requests_of(outcome, *labels).inc(1, exemplar)
        if outcome == "ok":
            is_streamed = "true" if streamed else "false"
            self._duration_of(is_streamed, *labels).observe(seconds, exemplar)

    def _token_counters(self, labels: LabelSet) -> tuple[Counter, Counter, Counter]:
        of_prompt, of_cached = (
            self.prompt_tokens.labels(*labels),
            self.cached_tokens.labels(*labels),
        )
        return of_prompt, of_cached, self.output_tokens.labels(*labels)


def _exemplar(trace_id: str | None) -> dict[str, str] | None:
    return None if trace_id is None else {"trace_id": trace_id}


class BatchMetrics:
    """Of the files and batches of one router's clients."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "mesh_batch_requests",
            "Requests for files and batches, by route and code: ok, or that of the error.",
            ["route", "code"],
            registry=registry,
        )
        self.bytes_received = Counter(
            "mesh_file_received_bytes", "Bytes of uploads.", registry=registry
        )
        self.bytes_sent = Counter("mesh_file_sent_bytes", "Bytes of downloads.", registry=registry)
        self.uploads = Gauge("mesh_uploads_open", "Uploads under way.", registry=registry)
        self.downloads = Gauge("mesh_downloads_open", "Downloads under way.", registry=registry)


class _CoreState(Collector):
    """Gauges read from the core's tables at scrape time."""

    def __init__(
        self, core: RouterCore, clock: Callable[[], float], model_label: Callable[[str], str]
    ) -> None:
        self._core = core
        self._clock = clock
        self._model_label = model_label

    def collect(self) -> Iterator[Metric]:
        core = self._core
        yield GaugeMetricFamily(
            "mesh_hold_queue_length", "Requests held by this router.", value=len(core.held)
        )
        yield self._inflight()
        yield from self._replicas()
        yield from self._peers()
        yield from self._gossip()
        yield from self._ownership()
        yield from self._left_out()

    def _inflight(self) -> Metric:
        inflight = _gauge("mesh_inflight", "Clients' requests held or under way.", "model")
        counts = dict.fromkeys(map(self._model_label, self._core.known_models()), 0)
        for record in self._core.inflight.values():
            if record.request.shadow:
                continue
            model = self._model_label(record.request.model)
            counts[model] = counts.get(model, 0) + 1
        for model, count in sorted(counts.items()):
            _add(inflight, model, count)
        return inflight

    def _replicas(self) -> Iterator[Metric]:
        pending = _gauge("mesh_replica_pending", "Requests waiting in the engine.", "replica")
        running = _gauge("mesh_replica_running", "Requests in the running batch.", "replica")
        kv = _gauge("mesh_replica_kv_used_ratio", "Share of KV memory in use.", "replica")
        prefill = _gauge(
            "mesh_replica_prefill_seconds_per_token", "Learned from its answers.", "replica"
        )
        states = _gauge("mesh_replicas", "Replicas by state; full ones apart.", "state")
        counts: dict[str, int] = {}
        broken = failing = 0
        for replica in self._core.replicas:
            beat = replica.heartbeat
            broken += beat.page_problem is not None
            failing += beat.is_failing
            _add(pending, beat.replica, beat.pending)
            _add(running, beat.replica, beat.running)
            _add(kv, beat.replica, beat.kv_used_ratio)
            _add(prefill, beat.replica, beat.prefill_s_per_token)
            state = "full" if beat.full and beat.state == "ready" else beat.state.value
            counts[state] = counts.get(state, 0) + 1
        for state, count in sorted(counts.items()):
            states.add_metric([state], count)
        yield from (pending, running, kv, prefill, states)
        about = "Replicas with a page of the engine that can't be read."
        yield GaugeMetricFamily("mesh_replicas_page_broken", about, value=broken)
        about = "Replicas whose engine fails the requests that it is given."
        yield GaugeMetricFamily("mesh_replicas_failing", about, value=failing)

    def _peers(self) -> Iterator[Metric]:
        rtt = _gauge("mesh_peer_rtt_seconds", "Round trip on the bus.", "peer")
        jitter = _gauge("mesh_peer_jitter_seconds", "Its change from ping to ping.", "peer")
        loss = _gauge("mesh_peer_ping_loss_ratio", "Part of the last pings not answered.", "peer")
        health = _gauge("mesh_peer_health", "2 green, 1 yellow, 0 red, by its gaps.", "peer")
        free = _gauge("mesh_peer_replicas_free", "Free replicas, by the peer's digest.", "peer")
        queue = _gauge("mesh_peer_queue", "Requests held in the peer region.", "peer")
        for region, peer in self._core.peers:
            _add(health, region, HEALTH_LEVELS[self._core.peers.health(peer, self._clock())])
            _add(loss, region, peer.pings.loss_ratio)
            if not peer.digests:  # silent: its last digest no longer holds
                continue
            _add(rtt, region, peer.rtt_s)
            _add(jitter, region, peer.pings.jitter_s)
            _add(queue, region, peer.queue)
            _add(free, region, max((d.replicas_free for d in peer.digests.values()), default=0))
        yield from (rtt, jitter, loss, health, free, queue)

    def _left_out(self) -> Iterator[Metric]:
        """Replicas and peers that get no work because their last answers failed."""
        core = self._core
        replicas = (one.heartbeat.replica for one in core.replicas)
        peers = (region for region, _ in core.peers)
        for kind, names, left_out in (
            ("replica", replicas, core.replicas.failing.out()),
            ("peer", peers, core.peers.failing.avoided(self._clock())),  # as its digests say
        ):
            about = "Whether it gets no work, or one request at a time, after failures."
            is_out = _gauge(f"mesh_{kind}_left_out", about, kind)
            for name in names:
                _add(is_out, name, name in left_out)
            yield is_out
        shares = core.replicas.slow.shares()
        share = _gauge(
            "mesh_replica_share", "Of an equal part of the work, by how fast it answers.", "replica"
        )
        for one in core.replicas:
            _add(share, one.heartbeat.replica, shares.get(one.heartbeat.replica, 1.0))
        yield share

    def _gossip(self) -> Iterator[Metric]:
        gossip = self._core.gossip
        counts = gossip.counts
        sizes = CounterMetricFamily(
            "mesh_gossip_bytes",
            "Bytes of prefix gossip sent to a peer, repaired for it, received from it; estimated.",
            labels=["peer", "kind"],
        )
        for region, _ in self._core.peers:
            sizes.add_metric([region, "sent"], counts.sent_bytes)
            sizes.add_metric([region, "repaired"], counts.repair_bytes[region])
            sizes.add_metric([region, "received"], counts.received_bytes[region])
        siblings = gossip.siblings
        sizes.add_metric(["siblings", "sent"], siblings.sent_bytes)
        sizes.add_metric(["siblings", "received"], siblings.received_bytes)
        yield sizes
        yield CounterMetricFamily(
            "mesh_gossip_limited",
            "Gossip messages dropped because their router sent more than its budget.",
            value=counts.limited,
        )
        outgoing = gossip.outgoing
        yield CounterMetricFamily(
            "mesh_gossip_unsent_blocks",
            "Blocks that left the caches before the budget had room to send them.",
            value=0 if outgoing is None else outgoing.dropped,
        )
        yield GaugeMetricFamily(
            "mesh_gossip_waiting_blocks",
            "Blocks that wait to be sent.",
            value=0 if outgoing is None else outgoing.waiting,
        )
        yield GaugeMetricFamily(
            "mesh_warm",
            "Whether this router knows what the replicas of its region hold.",
            value=siblings.sync.warm_at is not None,
        )
        yield CounterMetricFamily(
            "mesh_gossip_holes", "Requests for missed deltas.", value=counts.holes + siblings.holes
        )
        yield CounterMetricFamily(
            "mesh_gossip_snapshots",
            "Whole sets sent to peers and siblings that asked.",
            value=counts.snapshots + siblings.snapshots,
        )
        blocks = _gauge("mesh_gossip_blocks", "Blocks that a peer's routers hold.", "peer")
        doubted = _gauge("mesh_gossip_doubted", "Its routers whose stream has a hole.", "peer")
        remote = gossip.remote
        for region in sorted({origin.region for origin in remote.origins}):
            origins = [origin for origin in remote.origins if origin.region == region]
            _add(blocks, region, sum(len(remote.blocks(origin)) for origin in origins))
            _add(doubted, region, sum(not remote.is_trusted(origin) for origin in origins))
        _add(doubted, "siblings", siblings.with_gaps)
        yield from (blocks, doubted)

    def _ownership(self) -> Iterator[Metric]:
        ownership = self._core.ownership
        owned = _gauge("mesh_region_owned", "1 where it may place on that region's replicas.", "of")
        term = _gauge("mesh_lease_term", "Rises when a region's replicas change hands.", "of")
        adopted = _gauge("mesh_adopted_replicas", "Replicas of a region without routers.", "of")
        held = ownership.owned
        for lease in ownership.leases():
            _add(owned, lease.region, lease.region in held)
            _add(term, lease.region, lease.term)
        for region in ownership.adopted:
            _add(adopted, region, len(self._core.replicas.names_of(region)))
        yield from (owned, term, adopted)
        yield CounterMetricFamily(
            "mesh_adoptions", "Times that a region was adopted.", value=ownership.adoptions
        )
        yield CounterMetricFamily(
            "mesh_hand_backs", "Times that one was handed back.", value=ownership.hand_backs
        )


def _gauge(name: str, about: str, label: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=[label])


def _add(family: GaugeMetricFamily, label: str, value: float | None) -> None:
    if value is not None:  # what is not known has no sample
        family.add_metric([label], value)
