"""A batch runner of the twin: the real OfflineCore and the real session over the region's store.

What the live runner does with JetStream is done here with `store`: a message there and back takes a
round trip on the region's bus.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mesh.core.model import events as ev
from mesh.core.model.request import Request
from mesh.core.offline import effects as ofx
from mesh.core.offline import events as oev
from mesh.core.offline.core import OfflineCore
from mesh.core.offline.forecast import ForecastState
from mesh.session.record import OpenRequest
from mesh.session.session import Session
from mesh.sim.config import MODEL
from mesh.sim.network import BUS_S
from mesh.sim.offline.store import ACK_WAIT_S, LineOutcome, LineResult, StoredJob
from mesh.sim.session_host import SessionHost, TwinRequest
from mesh.sim.workload import OpenTree, RequestNode, SentRequest, keys_of
from schemas.http_statuses import INVALID
from schemas.ids import RegionId, RequestId, RouterId
from schemas.state import Heartbeat, OfflineState

if TYPE_CHECKING:
    from mesh.sim.offline.work import OfflineWork
    from mesh.sim.world import World

STORE_S = 2 * BUS_S  # there and back
BYTES_PER_TOKEN = 4  # of a line's body


@dataclass(slots=True)
class FetchedLine:
    """A line that this runner has."""

    job: str
    number: int
    sent: SentRequest
    opened: TwinRequest | None = None  # while an attempt is under way


class SimBatchRunner(SessionHost):
    """`open` it with a core; `crash` and `open` again for a fault."""

    def __init__(self, world: "World", work: "OfflineWork", site: RegionId, name: RouterId) -> None:
        self.core: OfflineCore | None = None
        self.epoch = 0
        self._work = work
        self._store = work.stores[site]
        self._lines: dict[int, FetchedLine] = {}  # by key
        self._reported: dict[str, int] = {}  # answered lines of each job, as the core knows them
        self._forecast: ForecastState | None = None
        super().__init__(world, site, name)

    @property
    def is_up(self) -> bool:
        return self.core is not None

    def _new_session(self) -> Session:
        session = super()._new_session()
        performers: dict[type, Callable[[Any], None]] = {
            ofx.FetchLines: self._fetch,
            ofx.OpenLine: self._open_line,
            ofx.CloseLine: self._close_line,
            ofx.SettleLine: self._settle,
            ofx.ReleaseLine: self._release,
            ofx.JobPaced: self._work.paced,
            ofx.PublishOffline: lambda effect: self._work.publish(self, effect.state),
            ofx.SaveForecast: self._save_forecast,
        }
        session.performers |= performers
        return session

    def _decide(self, event: oev.OfflineEvent, now: float) -> list[ofx.OfflineEffect]:
        assert self.core is not None
        if isinstance(event, ev.AttemptRefused):
            self._work.was_refused(event.reason)
        return self.core.handle(event, now)

    def _peer(self, region: RegionId, request: Request) -> SessionHost:
        """Offline work goes to the peer's runners, a line that was raised to its routers."""
        if request.offline:
            return self._work.pick_runner(region)
        return self._world.pick_router(region)

    def open(self, core: OfflineCore, epoch: int) -> None:
        """Serve with this core; what an earlier one fetched comes again after ACK_WAIT_S."""
        self.core, self.epoch = core, epoch
        self._reported.clear()
        if self._forecast is not None:
            self.feed(oev.ForecastRestored(self._forecast))

    def crash(self) -> None:
        """The process ends."""
        self.core = None
        self._session = self._new_session()
        self._lines.clear()
        self._queue.after(ACK_WAIT_S, self._silent, self.epoch)

    def _silent(self, epoch: int) -> None:
        """The store has waited for acknowledgements of the runner that was killed."""
        self._store.abandon(f"{self.name} {epoch}")

    @property
    def _owner(self) -> str:
        return f"{self.name} {self.epoch}"

    @property
    def held_lines(self) -> int:
        """Lines that it has fetched and neither settled nor given back."""
        return len(self._lines)

    # Jobs.

    def see_jobs(self) -> None:
        """Report each job's record to the core, where it has changed."""
        for stored in tuple(self._store.jobs.values()):
            name = stored.job.name
            if stored.is_over:
                if self._reported.pop(name, None) is not None:
                    self.feed(oev.JobEnded(name))
            elif self._reported.get(name) != len(stored.results):
                self._reported[name] = len(stored.results)
                self.feed(oev.JobSeen(_as_core_knows(stored)))

    def receive_state(self, state: OfflineState) -> None:
        """What a runner of this region or of a peer publishes."""
        self.feed(oev.OfflineStateSeen(state))

    def receive_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Of a replica of this region."""
        self.feed(ev.HeartbeatSeen(heartbeat))

    # Lines.

    def _fetch(self, effect: ofx.FetchLines) -> None:
        self._queue.after(STORE_S, self._fetched, self.core, effect)

    def _fetched(self, core: OfflineCore, effect: ofx.FetchLines) -> None:
        if self.core is not core:
            return
        stored = self._store.jobs.get(effect.job)
        found = [] if stored is None else self._deliver(stored, effect)
        self.feed(oev.LinesFetched(effect.job, tuple(found)))

    def _deliver(self, stored: StoredJob, effect: ofx.FetchLines) -> list[oev.Line]:
        lines: list[oev.Line] = []
        size = 0
        for number in stored.deliver(effect.lines_max, self._owner):
            node = stored.lines[number - 1]
            size += BYTES_PER_TOKEN * node.prompt_tokens
            if lines and size > effect.bytes_max:
                stored.put_back(number, self._owner)
            else:
                lines.append(self._line(stored.job.name, number, node))
        return lines

    def _line(self, job: str, number: int, node: RequestNode) -> oev.Line:
        key = next(self._keys)
        keys = keys_of(node)
        prompt = self._work.estimate(keys.hashes, node.prompt_tokens)
        now = self._queue.now
        sent = SentRequest(key, self.site, node, OpenTree(None), keys, prompt, now)
        self._lines[key] = FetchedLine(job, number, sent)
        return oev.Line(
            key=key,
            job=job,
            number=number,
            request_id=RequestId(f"{job}-{number}"),
            model=MODEL,
            prompt=prompt,
            answer_tokens=node.answer.tokens,
            body_bytes=BYTES_PER_TOKEN * node.prompt_tokens,
        )

    def _open_line(self, effect: ofx.OpenLine) -> None:
        line = self._lines[effect.request.key]
        record = TwinRequest(request=effect.request, sent=line.sent, receiver=self)
        line.opened = record
        self._session.open(record)

    def _close_line(self, effect: ofx.CloseLine) -> None:
        line = self._lines.get(effect.key)
        if line is not None and line.opened is not None:
            self._session.close(line.opened)
            line.opened = None

    def _settle(self, effect: ofx.SettleLine) -> None:
        line = self._lines[effect.key]
        result = self._result(effect, line)
        self._queue.after(STORE_S, self._store_result, self.core, effect, result)

    def _store_result(self, core: OfflineCore, effect: ofx.SettleLine, result: LineResult) -> None:
        """The store has the result, whether this runner still lives or not."""
        stored = self._store.jobs[effect.job]
        is_first = stored.keep(effect.number, result)
        if self.core is core:
            self._lines.pop(effect.key, None)
            self.feed(oev.LineStored(effect.key))
        if is_first:
            self._work.settled(self.site, stored, result)

    def _result(self, effect: ofx.SettleLine, line: FetchedLine) -> LineResult:
        now, record = self._queue.now, line.opened
        answer = None if record is None else record.answer
        if effect.settlement is not ofx.Settlement.ANSWER or answer is None or answer.head is None:
            detail = effect.message or effect.code or str(effect.settlement)
            return LineResult(outcome=LineOutcome.FAILED, at=now, detail=detail)
        end, head = answer.end, answer.head
        is_good = head.status < INVALID
        return LineResult(
            outcome=LineOutcome.ANSWERED if is_good else LineOutcome.FAILED,
            at=now,
            detail="" if is_good else f"http_{head.status}",
            replica=answer.replica,
            region=answer.region,
            prompt_tokens=max(0, end.prompt_tokens) if end else 0,
            cached_tokens=max(0, end.cached_tokens) if end else 0,
            output_tokens=max(0, end.completion_tokens) if end else 0,
            attempts=answer.attempt,
        )

    def _release(self, effect: ofx.ReleaseLine) -> None:
        self._lines.pop(effect.key, None)
        stored = self._store.jobs.get(effect.job)
        if stored is not None:
            self._queue.after(STORE_S, stored.put_back, effect.number, self._owner)

    def _save_forecast(self, effect: ofx.SaveForecast) -> None:
        self._forecast = effect.state

    # Peers' lines.

    def send_ingress(
        self, record: OpenRequest, peer: RegionId, inbox: str, headers: dict[str, str]
    ) -> bool:
        """The line to one of the peer's runners, or routers."""
        self._work.forwarded(self.site, peer, headers)
        return super().send_ingress(record, peer, inbox, headers)

    def _received(self, request: Request, sent: SentRequest) -> Request:
        return replace(request, answer_tokens=sent.node.answer.tokens)


def _as_core_knows(stored: StoredJob) -> oev.OfflineJob:
    return oev.OfflineJob(
        id=stored.job.name,
        began_at=stored.submitted_at,
        deadline=stored.deadline,
        total=len(stored.lines),
        answered=len(stored.results),
    )
