"""A router of the twin: the real core and the real session, with the world's clients.

What routers send beside requests is in `control_plane`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mesh.core.membership.known_models import LOOKS_EVERY_S
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Request
from mesh.core.router import RouterCore
from mesh.replay.tally import RequestOutcome
from mesh.session.session import Session
from mesh.sim.config import MODEL
from mesh.sim.network import BUS_S
from mesh.sim.session_host import SessionHost, TwinRequest
from mesh.sim.workload import (
    RequestEnd,
    SentRequest,
)
from schemas.exchange import Priority
from schemas.http import Fault
from schemas.http_statuses import OK
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.state import Digest, Heartbeat

if TYPE_CHECKING:
    from mesh.sim.world import World

SHED = (Fault.SATURATED, Fault.TOO_LATE, Fault.NO_REPLICA, Fault.DRAINING)
NO_CONNECTION, CONNECTION_LOST = "no_connection", "connection_lost"
READ_LAST_S = 2 * BUS_S  # from a router's start: a request to the stream, and its answers


class SimRouter(SessionHost):
    """`open` it with a core; `crash` and `open` again for a fault."""

    def __init__(self, world: "World", site: RegionId, name: RouterId) -> None:
        super().__init__(world, site, name)
        self.core: RouterCore | None = None
        self._by_number: dict[int, TwinRequest] = {}
        # The region's last-value stream, which a crash of the router doesn't clear.
        self._last_heartbeats: dict[ReplicaId, Heartbeat] = {}

    def _new_session(self) -> Session:
        session = super()._new_session()
        session.performers |= self._world.control_performers(self)
        return session

    def _peer(self, region: RegionId, request: Request) -> SessionHost:
        return self._world.pick_router(region)

    def _decide(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """The core's effects; decisions on requests are timed by the meter's clock."""
        assert self.core is not None
        if type(event) is not ev.RequestArrived:
            return self.core.handle(event, now)
        # A policy may be shared with other routers, so it learns at once.
        meter = self._world.meter
        began = meter.clock() if meter.clock else 0.0
        effects = [*self.core.handle(event, now), *self.core.finish()]
        meter.seconds += meter.clock() - began if meter.clock else 0.0
        meter.decisions += 1
        return effects

    @property
    def is_up(self) -> bool:
        return self.core is not None

    @property
    def open_requests(self) -> int:
        """Clients that wait for an answer."""
        return len(self._session)

    def open(self, core: RouterCore) -> None:
        """Serve with this core, which soon receives the last heartbeat of each replica."""
        self.core = core
        self._queue.after(READ_LAST_S, self._read_last, core)

    def _read_last(self, core: RouterCore) -> None:
        if self.core is core:
            for heartbeat in tuple(self._last_heartbeats.values()):
                self.feed(ev.HeartbeatSeen(heartbeat))

    def crash(self) -> None:
        """The process ends, and its clients' connections with it."""
        self.core = None
        for record in self._session:
            assert isinstance(record, TwinRequest)
            self._answer(record.sent, RequestEnd(RequestOutcome.FAILED, CONNECTION_LOST))
        self._session = self._new_session()
        self._by_number.clear()

    # Clients.

    def receive_request(self, sent: SentRequest) -> None:
        if wait_s := self._world.config.decides_after_s:
            self._queue.after(wait_s, self._take, sent)
        else:
            self._take(sent)

    def _take(self, sent: SentRequest) -> None:
        if sent.ended:  # its client hung up meanwhile
            return
        if self.core is None:
            self._answer(sent, RequestEnd(RequestOutcome.FAILED, NO_CONNECTION))
        elif self.core.may_hear_of((_model(sent),)):
            self._queue.after(LOOKS_EVERY_S, self._take, sent)
        elif _model(sent) not in self.core.known_models():
            status = Fault.MODEL_UNKNOWN.value.status
            self._answer(sent, RequestEnd(RequestOutcome.FAILED, f"http_{status}"))
        else:
            self._admit(sent)

    def _admit(self, sent: SentRequest) -> None:
        now = self._queue.now
        request = Request(
            key=next(self._keys),
            request_id=sent.request_id,
            model=_model(sent),
            prompt=sent.prompt,
            session=sent.session,
            arrived_at=now,
            deadline=now + self._world.config.settings.request_s_max,
            hops=0,
            origin=self.site,
            priority=Priority(sent.node.priority),
            slo_ttft_s=sent.node.slo_ttft_s,
            wants_receipt=False,
            tenant=sent.node.tenant,
        )
        changed = partial(self._changed, sent.number)
        record = TwinRequest(
            request=request, tenant=request.tenant, sent=sent, receiver=self, changed=changed
        )
        self._by_number[sent.number] = record
        self._session.admit(record)

    def receive_hang_up(self, sent: SentRequest) -> None:
        if (record := self._by_number.get(sent.number)) is not None:
            self.feed(ev.ClientGone(record.request.key))
            self._close(record)

    def _changed(self, number: int) -> None:
        """Send the client what has arrived for it."""
        record = self._by_number.get(number)
        if record is None:
            return
        answer, failure = record.answer, record.failure
        if failure is not None:
            outcome = RequestOutcome.SHED if failure.fault in SHED else RequestOutcome.FAILED
            code = failure.fault.value.code
            self._end(record, RequestEnd(outcome, code, failure.retry_after_s))
        elif record.pass_engine_error:
            self._end(record, RequestEnd(RequestOutcome.FAILED, "engine_error"))
        elif answer is not None and answer.end is not None:
            self._end(record, _complete(record))
        elif not record.began and answer is not None and answer.is_startable:
            record.began = True
            self._http(record.sent, self._world.clients.first_byte, record.sent)
            self._session.started(record)

    def _end(self, record: TwinRequest, end: RequestEnd) -> None:
        self._close(record)
        self._answer(record.sent, end)

    def _close(self, record: TwinRequest) -> None:
        self._session.close(record)
        self._by_number.pop(record.sent.number, None)

    def _http(self, sent: SentRequest, call: Callable[..., object], *args: Any) -> None:
        self._network.send_http(self.site, sent.region, call, *args)

    def _answer(self, sent: SentRequest, end: RequestEnd) -> None:
        self._http(sent, self._world.clients.answered, sent, end)

    # Messages of the bus.

    def receive_digest(self, digest: Digest) -> None:
        self.feed(ev.DigestSeen(digest))

    def receive_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Of a replica of this region, or of one that this region has adopted."""
        if heartbeat.region == self.site:
            self._last_heartbeats[heartbeat.replica] = heartbeat
        self.feed(ev.HeartbeatSeen(heartbeat))


def _complete(record: TwinRequest) -> RequestEnd:
    """The end of a request whose answer is complete."""
    answer = record.answer
    assert answer is not None and answer.head is not None and answer.end is not None
    status = answer.head.status
    return RequestEnd(
        RequestOutcome.OK if status == OK else RequestOutcome.FAILED,
        "" if status == OK else f"http_{status}",
        replica=answer.replica,
        cached_tokens=max(0, answer.end.cached_tokens),
        hops=int(answer.asked is not None),
        attempts=answer.attempt,
    )


def _model(sent: SentRequest) -> ModelId:
    return ModelId(sent.node.adapter) if sent.node.adapter else MODEL
