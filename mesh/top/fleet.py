"""What `mesh top` knows of the fleet: messages and times in, rows out. Without I/O or a clock.

Times (`now`) are seconds of one monotonic clock. A replica or router counts as silent only while
its bus is connected: while it is away, the last state stays, with its age.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import ceil
from statistics import fmean
from typing import Any, Generic, TypeVar

from mesh.doctor.waiting_tenants import flood
from mesh.top.rows import CONNECTING, STALE_S, Frame, RegionRow, ReplicaRow, RequestRow, TrafficRow
from schemas.control import RegionControl, nothing_ordered
from schemas.explain import COUNTED_S, RequestFlow, RequestLife, RouterRequests
from schemas.ids import REGION_ROUTERS_MAX, RegionId, ReplicaId
from schemas.state import Digest, EngineResults, Heartbeat, Lease, OfflineState, ReplicaState

REPLICAS_MAX = 4096  # of one region
ROUTERS_MAX = REGION_ROUTERS_MAX  # the same for batch runners
REQUESTS_MAX = 500  # the newest, of all regions together
NOTE_CHARS_MAX = 200  # of what an order holds
KEPT_S = 10 * STALE_S  # that an answer about requests, or a batch runner's word, is shown
NO_LOGIN, CONNECTED, AWAY = "none", "connected", "away"
SILENT, UNSEEN = "silent", "unknown"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """A message and when it was received."""

    value: T
    at: float


@dataclass(slots=True)
class RegionSeen:
    """All that was received of one region."""

    replicas: tuple[ReplicaId, ...]  # of mesh.toml
    has_login: bool
    connected_at: float | None = None
    why_away: str = ""
    heartbeats: dict[ReplicaId, Seen[Heartbeat]] = field(default_factory=dict)
    digests: dict[str, Seen[Digest]] = field(default_factory=dict)  # by router
    rtt_s: dict[RegionId, float] = field(default_factory=dict)
    lease: Seen[Lease] | None = None
    orders: RegionControl | None = None
    offline: dict[str, Seen[OfflineState]] = field(default_factory=dict)  # by batch runner
    answers: dict[str, Seen[RouterRequests]] = field(default_factory=dict)  # by router

    @property
    def bus(self) -> str:
        if not self.has_login:
            return NO_LOGIN
        if self.connected_at is not None:
            return CONNECTED
        return AWAY if self.why_away else CONNECTING

    @property
    def unseen(self) -> str:
        """The state of what nothing was received of."""
        return CONNECTING if self.bus == CONNECTING else UNSEEN


class Fleet:
    """The regions of a mesh. `logins`: those whose bus is watched."""

    def __init__(
        self, regions: Mapping[RegionId, tuple[ReplicaId, ...]], logins: Iterable[RegionId]
    ) -> None:
        watched = set(logins)
        self._regions = {
            name: RegionSeen(replicas, name in watched) for name, replicas in regions.items()
        }
        self._requests: dict[tuple[str, str], RequestRow] = {}

    # Messages. Those of regions that mesh.toml does not have are dropped.

    def connected(self, region: RegionId, now: float) -> None:
        self._regions[region].connected_at = now
        self._regions[region].why_away = ""

    def disconnected(self, region: RegionId, why: str) -> None:
        self._regions[region].connected_at = None
        self._regions[region].why_away = why

    def heartbeat(self, beat: Heartbeat, now: float) -> None:
        if (seen := self._regions.get(beat.region)) is not None:
            _keep(seen.heartbeats, beat.replica, Seen(beat, now), REPLICAS_MAX)

    def digest(self, digest: Digest, now: float) -> None:
        """One message comes by each bus that is watched; the later ones change nothing."""
        if (seen := self._regions.get(digest.region)) is None:
            return
        last = seen.digests.get(digest.router)
        if last is not None and now - last.at < STALE_S:
            known = last.value
            if known.epoch == digest.epoch and known.seq >= digest.seq:
                return
        if _keep(seen.digests, digest.router, Seen(digest, now), ROUTERS_MAX) and digest.rtt_s:
            known_peers = self._regions.keys() & digest.rtt_s.keys()
            seen.rtt_s = {peer: digest.rtt_s[peer] for peer in known_peers}

    def lease(self, lease: Lease, now: float) -> None:
        if (seen := self._regions.get(lease.region)) is not None:
            seen.lease = Seen(lease, now)

    def orders(self, orders: RegionControl) -> None:
        if (seen := self._regions.get(orders.region)) is not None:
            seen.orders = orders

    def offline(self, state: OfflineState, now: float) -> None:
        if (seen := self._regions.get(state.region)) is not None:
            _keep(seen.offline, state.router, Seen(state, now), ROUTERS_MAX)

    def answer(self, answer: RouterRequests, now: float) -> None:
        """A router's latest requests."""
        if (seen := self._regions.get(answer.region)) is None:
            return
        if not _keep(seen.answers, answer.router, Seen(answer, now), ROUTERS_MAX):
            return
        for life in answer.requests:
            self._requests[life.region, life.request] = _request(life)
        newest = sorted(self._requests.items(), key=lambda one: one[1].arrived_at)
        self._requests = dict(newest[-REQUESTS_MAX:])

    # What is shown.

    def frame(self, now: float) -> Frame:
        replicas = {name: self._replicas(name, now) for name in self._regions}
        notes = [
            f"{name}: its bus is away: {seen.why_away}"
            for name, seen in self._regions.items()
            if seen.why_away
        ]
        notes += [
            f"{name}: routing by order: {_plain(seen.orders.routing):.{NOTE_CHARS_MAX}}; "
            f"`mesh changes {name}` has whose"
            for name, seen in self._regions.items()
            if seen.orders is not None and seen.orders.routing
        ]
        notes += [
            f"{name}: forwards little to {peer}: {why}"
            for name, seen in self._regions.items()
            for peer, why in self._avoided_peers(seen, now).items()
        ]
        seen_all = self._regions.values()
        answers = [one for seen in seen_all for one in _answers(seen, now, KEPT_S)]
        if (flooded := flood(answers)) is not None:
            notes.append(f"the tenant {flooded[1]} has {flooded[2]}")
        return Frame(
            regions=tuple(self._region(name, replicas[name], now) for name in self._regions),
            replicas=tuple(row for rows in replicas.values() for row in rows),
            traffic=tuple(row for name in self._regions for row in self._traffic(name, now)),
            requests=tuple(self._requests.values()),
            notes=tuple(notes),
        )

    def _replicas(self, region: RegionId, now: float) -> list[ReplicaRow]:
        seen = self._regions[region]
        names = dict.fromkeys((*seen.replicas, *seen.heartbeats))
        return [_replica(region, name, seen, now) for name in names]

    def _watching_since(self) -> float | None:
        """Since when some bus is connected: every region's digests come by each."""
        since = [one.connected_at for one in self._regions.values() if one.connected_at is not None]
        return min(since, default=None)

    def _current_digests(self, seen: RegionSeen, now: float) -> list[Seen[Digest]]:
        """Those of routers that still send; all that are known while no bus is connected."""
        since = self._watching_since()
        every = seen.digests.values()
        return [one for one in every if since is None or not _is_silent(one, since, now)]

    def _avoided_peers(self, seen: RegionSeen, now: float) -> dict[RegionId, str]:
        told = [one.value.avoided_peers for one in self._current_digests(seen, now)]
        return {peer: why for one in told for peer, why in one.items() if peer in self._regions}

    def _region(self, name: RegionId, replicas: list[ReplicaRow], now: float) -> RegionRow:
        seen = self._regions[name]
        digests = self._current_digests(seen, now)
        values = [one.value for one in digests]
        live = [row for row in replicas if row.state not in (SILENT, UNSEEN, CONNECTING)]
        ready: int | None = sum(row.state == ReplicaState.READY for row in live)
        kv = _mean(row.kv_used_ratio for row in live)
        if not seen.heartbeats and seen.connected_at is None:
            ready = max((one.replicas_ready for one in values), default=None)
            kv = _mean(one.kv_used_ratio for one in values)
        flows, _ = _flows(seen, now)
        ttft_s = [each_s for flow in flows for each_s in flow.ttft_s]
        last = max((one.at for one in seen.digests.values()), default=None)
        offline = [one.value for one in seen.offline.values() if now - one.at < KEPT_S]
        return RegionRow(
            region=name,
            bus=seen.bus,
            state=self._state(name, digests, now),
            replicas=len(replicas),
            ready=ready,
            pending=_sum(row.pending for row in live),
            running=_sum(row.running for row in live),
            held=_sum(one.queue for one in values),
            requests_per_s=sum(one.requests_per_s for one in values) if values else None,
            kv_used_ratio=kv,
            prefix_hit_ratio=_mean(row.prefix_hit_ratio for row in live),
            ttft_p50_s=percentile(ttft_s, 0.50),
            ttft_p99_s=percentile(ttft_s, 0.99),
            rtt_s={str(peer): rtt_s for peer, rtt_s in seen.rtt_s.items()},
            batch_lines=_sum(one.lines_waiting + one.lines_running for one in offline),
            age_s=None if last is None else now - last,
            why_away=seen.why_away,
        )

    def _state(self, name: RegionId, digests: list[Seen[Digest]], now: float) -> str:
        seen, since = self._regions[name], self._watching_since()
        if not digests:
            if (owner := self._adopter(name, now)) is not None:
                return f"adopted by {owner}"
            return seen.unseen if since is None or now - since <= STALE_S else SILENT
        if seen.orders is not None and seen.orders.all_drained:
            return "drained"
        if not any(one.value.accepting for one in digests):
            return "draining"
        known = (
            one.value for each in self._regions.values() for one in self._current_digests(each, now)
        )
        return "serving" if any(one.replicas_ready for one in known) else "no replica"

    def _adopter(self, name: RegionId, now: float) -> RegionId | None:
        lease = self._regions[name].lease
        if lease is not None and lease.value.owner != name and now - lease.at < STALE_S:
            return lease.value.owner
        for other, seen in self._regions.items():
            if any(name in one.value.adopted for one in self._current_digests(seen, now)):
                return other
        return None

    def _traffic(self, name: RegionId, now: float) -> Iterator[TrafficRow]:
        seen = self._regions[name]
        flows, counted_s = _flows(seen, now)
        served = {flow.served_by_region for flow in flows} | seen.rtt_s.keys()
        at = max((one.at for one in seen.answers.values()), default=None)
        for place in sorted(served, key=lambda one: one or ""):
            here = [flow for flow in flows if flow.served_by_region == place]
            ttft_s = [each_s for flow in here for each_s in flow.ttft_s]
            requests, failed = (
                sum(flow.requests for flow in here),
                sum(flow.failed for flow in here),
            )
            yield TrafficRow(
                asked=name,
                served=place,
                rtt_s=seen.rtt_s.get(RegionId(place or "")),
                requests_per_s=requests / counted_s if counted_s else None,
                failed_per_s=failed / counted_s if counted_s else None,
                ttft_p50_s=percentile(ttft_s, 0.50),
                ttft_p99_s=percentile(ttft_s, 0.99),
                age_s=None if at is None else now - at,
            )

    def orders_of(self, region: RegionId) -> RegionControl | None:
        """What operators ordered there; None while that is not known."""
        return self._regions[region].orders

    def replica_lines(self, region: RegionId, name: ReplicaId, now: float) -> Iterator[str]:
        """All that is known of a replica, as text."""
        seen = self._regions[region]
        row = _replica(region, name, seen, now)
        yield f"replica {name} of {region}: {row.state}"
        orders = seen.orders or nothing_ordered(region)
        if orders.drains(name):
            why = f": {orders.reason}" if orders.reason else ""
            yield f"drained by {orders.by} (`{orders.command}`){why}"
        beat = seen.heartbeats.get(name)
        if beat is None:
            yield "no heartbeat was received"
            return
        yield f"last heartbeat {now - beat.at:.1f} s ago"
        yield ""
        for field_name, text in self.heartbeat_fields(region, name):
            yield f"{field_name:<22} {text}"

    def heartbeat_fields(self, region: RegionId, name: ReplicaId) -> Iterator[tuple[str, str]]:
        """What a replica's last heartbeat says; nothing where none was received."""
        beat = self._regions[region].heartbeats.get(name)
        if beat is None:
            return
        for each in fields(Heartbeat):
            value = getattr(beat.value, each.name)
            if value is not None and each.name not in ("v", "region", "replica", "cards"):
                yield each.name, _plain(value)


def percentile(values: Iterable[float], part: float) -> float | None:
    """By nearest rank; None of no values."""
    found = sorted(values)
    return found[max(0, ceil(part * len(found)) - 1)] if found else None


def _keep(table: dict[Any, Seen[T]], name: object, seen: Seen[T], most: int) -> bool:
    """Whether there was room for it: a full table gives up its oldest entry, if that is stale."""
    if name not in table and len(table) >= most:
        oldest = min(table, key=lambda one: table[one].at)
        if seen.at - table[oldest].at < STALE_S:
            return False
        del table[oldest]
    table[name] = seen
    return True


def _is_silent(last: Seen[Any] | None, since: float | None, now: float) -> bool:
    """Whether nothing came for too long although its bus has been connected since `since`."""
    if since is None:
        return False
    return now - max(since, since if last is None else last.at) > STALE_S


def _replica(region: RegionId, name: ReplicaId, seen: RegionSeen, now: float) -> ReplicaRow:
    last = seen.heartbeats.get(name)
    is_silent = _is_silent(last, seen.connected_at, now)
    if last is None:
        return ReplicaRow(region, name, SILENT if is_silent else seen.unseen)
    beat, age_s = last.value, now - last.at
    if is_silent:
        return ReplicaRow(region, name, SILENT, engine=beat.engine, models=beat.models, age_s=age_s)
    orders = seen.orders
    state: str = beat.state
    if beat.state is ReplicaState.DRAINING and orders is not None and orders.drains(name):
        state = "draining" if beat.outstanding else "drained"
    elif beat.down_reason:
        state = f"{state}: {beat.down_reason}"
    elif beat.state is ReplicaState.READY and beat.results is not None and beat.is_failing:
        state = f"failing: {beat.results.what}"
    elif beat.state is ReplicaState.READY:
        avoided = (one.value.avoided.get(name) for one in seen.digests.values())
        state = next(filter(None, avoided), state)
    return ReplicaRow(
        region=region,
        replica=name,
        state=state,
        pending=beat.pending,
        running=beat.running,
        outstanding=beat.outstanding,
        kv_used_ratio=beat.kv_used_ratio,
        prefix_hit_ratio=beat.prefix_hit_ratio,
        queued_tokens=beat.prefill_queued_tokens,
        decode_tokens_per_s=beat.decode_tokens_per_s if beat.running or beat.outstanding else None,
        served=beat.served_total,
        refused=beat.refused_total,
        engine=beat.engine if beat.kv is None else f"{beat.engine} {beat.kv.role}",
        models=beat.models if beat.kv is None else beat.kv.models,
        age_s=age_s,
    )


def _flows(seen: RegionSeen, now: float) -> tuple[list[RequestFlow], float]:
    """The last minute's requests at all routers of a region, and the seconds they count back."""
    answers = _answers(seen, now, COUNTED_S)
    counted_s = max((one.counted_s or 0.0 for one in answers), default=0.0)
    return [flow for one in answers for flow in one.flows], counted_s


def _answers(seen: RegionSeen, now: float, within_s: float) -> list[RouterRequests]:
    return [one.value for one in seen.answers.values() if now - one.at < within_s]


def _request(life: RequestLife) -> RequestRow:
    until = life.ended_at if life.started_at is None else life.started_at
    return RequestRow(
        arrived_at=life.arrived_at,
        request=life.request,
        region=life.region,
        served=life.served_by_region,
        replica=life.served_by_replica,
        status=life.status,
        outcome=life.outcome,
        wait_s=None if until is None else max(0.0, until - life.arrived_at),
        duration_s=None if life.ended_at is None else max(0.0, life.ended_at - life.arrived_at),
        prompt_tokens=life.prompt_tokens,
        cached_tokens=life.cached_tokens,
        output_tokens=life.output_tokens,
        model=life.model,
    )


def _plain(value: Any) -> str:
    if isinstance(value, EngineResults):
        return f"failed {value.words}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return fmean(known) if known else None


def _sum(values: Iterable[int | None]) -> int | None:
    known = [one for one in values if one is not None]
    return sum(known) if known else None
