"""Requests that have ended at this router, for the access log and for `mesh explain`.

A client's request ends once, whatever became of it: answered, failed, shed, refused before it was
read, or left by its client. A peer's ends here when it is placed or refused. What is kept is its
`Ending`, as it was at hand; it is put into words when somebody asks.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import nlargest
from itertools import islice
from math import isfinite

from mesh.adapters.access_log import REFUSED, VALUE_CHARS_MAX, AccessLog, plain, shown_outcome
from mesh.adapters.refused import RequestRefused
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.requests.fair_shares import ANSWER_FACTOR
from mesh.session.client_request import SENT, ClientRequest, lost
from mesh.session.record import STEPS_MAX, Ending, OpenRequest, Step
from schemas import explain
from schemas.decision import Decision, rounded
from schemas.engine_routes import error_form
from schemas.exchange import Placed
from schemas.explain import LifeStep, RequestFlow, RequestLife, RouterRequests, TenantWork
from schemas.http import Fault, error_body
from schemas.ids import UNLISTED_KEY, RegionId, RouterId
from schemas.state import rounded as rounded_s

STATUS_CLIENT_GONE = 499  # not sent; for traces and logs
KEPT = 2000  # requests; with the decisions of each some 10 MB
KEPT_MAX = 100_000
LEFT = "client_gone"
NOBODYS: Mapping[str, int] = {}
NOT_FAILED = ("ok", "placed", REFUSED, LEFT)  # outcomes


class EndedRequests:
    """Those of one router: each is logged, and the last ones are kept."""

    def __init__(
        self,
        region: RegionId,
        router: RouterId,
        clock: Callable[[], float],
        log: AccessLog | None = None,
        kept_max: int = KEPT,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._region, self._router, self._clock = region, router, clock
        self._wall_clock = wall_clock
        self._kept: deque[Ending] = deque(maxlen=kept_max)
        self._keep = self._kept.append
        self._write = _unwritten if log is None else log.write
        self._unwritten: list[Ending] = [] if log is None else log.waiting

    def add(self, ended: Ending) -> None:
        """A request has ended so."""
        self._keep(ended)
        if self._unwritten:  # as most times: without a call
            self._unwritten.append(ended)
        else:
            self._write(ended)

    def of_http(
        self,
        request_id: str,
        *,
        route: str,
        status: int,
        method: str = "POST",
        outcome: str = "",
        fault: Fault | None = None,
        model: str = "",
        tenant: str = "",
        detail: str = "",
        sent_bytes: int = 0,
        arrived_at: float | None = None,
    ) -> None:
        """A request that was never placed: refused, or about something else than work.

        Its route and method may be any text of its client's: of a long one the beginning is kept.
        """
        now = self._clock()
        route, method = route[:VALUE_CHARS_MAX], method[:VALUE_CHARS_MAX]
        code = "" if fault is None else fault.value.code
        outcome = outcome or shown_outcome("ok", status)
        arrived_at = now if arrived_at is None else arrived_at
        self.add(
            Ending(
                outcome,
                status,
                detail=detail,
                ended_at=now,
                request=request_id,
                method=method,
                route=route,
                model=model,
                tenant=tenant,
                sent_bytes=sent_bytes,
                fault=code,
                arrived_at=arrived_at,
            )
        )

    def refused(
        self, request_id: str, route: str, refused: RequestRefused, method: str = "POST"
    ) -> None:
        """A request for work that was refused before it was placed."""
        body = error_body(refused.fault, refused.message, refused.param, error_form(route))
        self.of_http(
            request_id,
            route=route,
            method=method,
            status=refused.fault.value.status,
            fault=refused.fault,
            model=refused.model,
            tenant=refused.tenant,
            detail=refused.detail,
            sent_bytes=len(body),
        )

    def client_gone(
        self, request_id: str, route: str, method: str = "POST", arrived_at: float | None = None
    ) -> None:
        """A client left before its request was whole, or before its answer was."""
        self.of_http(
            request_id,
            route=route,
            method=method,
            status=STATUS_CLIENT_GONE,
            outcome=LEFT,
            arrived_at=arrived_at,
        )

    # Answers.

    def find(self, name: str, opened: Iterable[OpenRequest] = ()) -> RouterRequests:
        """Those of that request or trace id, the newest last. `opened`: requests under way."""
        found = [one for one in self._kept if name in (one.request, one.trace)]
        for record in opened:
            if name not in (record.request.request_id, record.spans.trace_id):
                continue
            is_clients = isinstance(record, ClientRequest) and not record.request.shadow
            if is_clients or record.request.answer_inbox is not None:
                found.append(record.ending_at(self._clock(), explain.OPEN))
        return self._answer(found[-explain.LIVES_MAX :])

    def nothing(self) -> RouterRequests:
        """No request, but how many are kept."""
        return self._answer([])

    def slowest(self, number: int) -> RouterRequests:
        """Clients' requests that failed, whose stream broke and went on elsewhere, or that took
        longest to their first byte, the worst last: an answer that is too large leaves out its
        first ones."""
        work = (one for one in self._kept if one.decided is not None and not one.origin)
        worst = nlargest(min(number, explain.SLOWEST_MAX), work, key=_badness)
        return self._answer(worst[::-1])

    def recent(self, number: int, waiting: Mapping[str, int] = NOBODYS) -> RouterRequests:
        """Clients' requests that ended last, the newest last, and counts of the last minute's.
        `waiting`: how many requests of each tenant are held."""
        now, counted = self._clock(), list[Ending]()
        is_forgetting = len(self._kept) == self._kept.maxlen
        reaches_s = now - self._kept[0].ended_at if is_forgetting else explain.COUNTED_S
        for one in reversed(self._kept):
            if one.ended_at < now - explain.COUNTED_S:
                break
            if len(counted) == explain.COUNTED_MAX:
                reaches_s = now - counted[-1].ended_at
                break
            if one.decided is not None and not one.origin:
                counted.append(one)
        counted_s = max(0.0, min(reaches_s, explain.COUNTED_S))
        newest = counted[: min(number, explain.RECENT_MAX)]
        answer = self._answer([one._replace(steps=()) for one in reversed(newest)])
        tenants = _tenants(counted, waiting)
        return replace(answer, flows=_flows(counted), counted_s=counted_s, tenants=tenants)

    def _answer(self, found: list[Ending]) -> RouterRequests:
        wall_s = self._wall_clock() - self._clock()
        return RouterRequests(
            region=self._region,
            router=self._router,
            kept=len(self._kept),
            since=self._kept[0].ended_at + wall_s if self._kept else None,
            requests=tuple(self._life(one, wall_s) for one in found),
        )

    def _life(self, one: Ending, wall_s: float) -> RequestLife:
        """`wall_s`: what the event loop's clock lacks to the time of day."""
        prompt, cached, output, agent_ttft_s = one.numbers
        prefill_replica = None if one.decided is None else one.decided.decision.prefill
        return RequestLife(
            request=plain(one.request),
            trace=one.trace or None,
            region=self._region,
            router=self._router,
            origin=one.origin or None,
            method=one.method or None,
            route=plain(one.route),
            status=one.status or None,
            outcome=shown_outcome(one.outcome, one.status),
            model=plain(one.model) or None,
            asked_model=plain(one.asked) or None,
            is_copy=one.is_copy,
            tenant=one.tenant or None,
            served_by_region=one.region or None,
            served_by_replica=one.replica or None,
            peer_held_s=one.peer_held_s,
            agent_ttft_s=agent_ttft_s if isfinite(agent_ttft_s) and agent_ttft_s >= 0.0 else None,
            prefill_replica=prefill_replica,
            prefill_s=None if prefill_replica is None else _prefill_s(one),
            prompt_tokens=_known(prompt),
            cached_tokens=_known(cached),
            output_tokens=_known(output),
            sent_bytes=one.sent_bytes,
            is_stream=one.is_stream,
            fault=one.fault or None,
            detail=plain(one.detail) or None,
            arrived_at=one.arrived_at + wall_s,
            started_at=None if one.started_at is None else one.started_at + wall_s,
            ended_at=None if one.outcome == explain.OPEN else one.ended_at + wall_s,
            steps=tuple(islice(_life_steps(one.steps, wall_s), STEPS_MAX)),
        )


def _unwritten(one: Ending) -> None:
    """Where there is no access log."""


def _badness(one: Ending) -> tuple[bool, bool, float]:
    began_at = one.ended_at if one.started_at is None else one.started_at
    went_on = any(isinstance(step.what, fx.Decided) and step.at > began_at for step in one.steps)
    return one.outcome not in NOT_FAILED, went_on, began_at - one.arrived_at


def _flows(ended: Iterable[Ending]) -> tuple[RequestFlow, ...]:
    """These requests, counted by the region that served them."""
    places: dict[str, list[Ending]] = {}
    for one in ended:
        places.setdefault(one.region, []).append(one)
    return tuple(
        RequestFlow(
            served_by_region=place or None,
            requests=len(served),
            failed=sum(one.outcome not in NOT_FAILED for one in served),
            ttft_s=tuple(
                rounded_s(one.started_at - one.arrived_at)
                for one in served
                if one.is_stream and one.started_at is not None
            ),
        )
        for place, served in sorted(places.items())[: explain.FLOWS_MAX]
    )


def _tenants(ended: Iterable[Ending], waiting: Mapping[str, int]) -> tuple[TenantWork, ...]:
    """Whose these requests were, and whose wait. Who has no tenant is not told by its key."""
    held, work = Counter[str](), Counter[str]()
    for tenant, count in waiting.items():
        held["" if tenant.startswith(UNLISTED_KEY) else tenant] += count
    for one in ended:
        work[one.tenant] += one.cost.uncached + round(ANSWER_FACTOR * one.cost.output)
    names = sorted({*held, *work}, key=lambda one: (-held[one], -work[one], one))
    named = names if len(names) <= explain.TENANTS_MAX else names[: explain.TENANTS_MAX - 1]
    for name in names[len(named) :]:
        held[explain.OTHERS] += held[name]
        work[explain.OTHERS] += work[name]
    shown = named if named is names else [*named, explain.OTHERS]
    return tuple(TenantWork(tenant=one, waiting=held[one], tokens=work[one]) for one in shown)


def _prefill_s(one: Ending) -> float | None:
    """From the last attempt's dispatch until its prefill replica had computed the prompt; None
    where the first byte came before that."""
    dispatched_at = prefill_s = None
    for step in one.steps:
        if one.started_at is not None and step.at > one.started_at:
            break
        if isinstance(step.what, fx.Decided):
            dispatched_at, prefill_s = step.at, None
        elif isinstance(step.what, ev.PrefillEnded) and dispatched_at is not None:
            prefill_s = rounded_s(step.at - dispatched_at)
    return prefill_s


def _life_steps(steps: Iterable[Step], wall_s: float) -> Iterator[LifeStep]:
    """All but the end of a prefill stage, which tools of the version before can't read: it is in
    `prefill_s`. An attempt that another decision follows without a word was lost: the core returns
    such a request to the hold queue by itself."""
    sent: Decision | None = None  # of the attempt under way
    for step in steps:
        what = step.what
        if isinstance(what, fx.Decided):
            if sent is not None:
                at = step.at - max(0.0, what.decision.held_s - sent.held_s)
                yield LifeStep(at=at + wall_s, what="failed", detail=plain(lost(sent)))
            sent = what.decision if what.decision.placement in SENT else None
        elif isinstance(what, ev.AttemptRefused | ev.AttemptFailed):
            sent = None
        if not isinstance(what, ev.PrefillEnded):
            yield _step(step.at + wall_s, what)


def _step(at: float, what: fx.Decided | ev.AttemptRefused | ev.AttemptFailed | Placed) -> LifeStep:
    if isinstance(what, fx.Decided):
        return LifeStep(at=at, what="decided", decision=_decision(what))
    if isinstance(what, ev.AttemptRefused):
        detail = plain(what.reason)
        return LifeStep(
            at=at, what="refused", region=what.region, replica=what.replica or None, detail=detail
        )
    if isinstance(what, ev.AttemptFailed):
        return LifeStep(at=at, what="failed", detail=plain(what.detail))
    held_s = max(0.0, what.held_s)
    return LifeStep(at=at, what="placed", region=what.region, replica=what.replica, held_s=held_s)


def _decision(decided: fx.Decided) -> Decision:
    """The receipt, with its candidates also where nobody had read them."""
    decision, unlisted = decided.decision, decided.unlisted
    if unlisted is not None:
        candidates, considered = unlisted.candidates(), unlisted.considered
        decision = replace(decision, candidates=candidates, considered=considered)
    return rounded(decision)


def _known(count: int) -> int | None:
    return count if count >= 0 else None
