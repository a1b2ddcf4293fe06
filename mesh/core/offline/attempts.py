"""Attempts of lines: begun, and over by an answer, a refusal, a failure, a loss, or silence.

A line that an attempt leaves unanswered waits again at its old place. Failures are counted, and
after `failures_max` of them the line's result is an error. Refusals and preemptions are not
counted, but the place that refused gets nothing for a while. An attempt that was under way when
the connection to the bus was lost is not counted as the line's failure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Request, Served
from mesh.core.offline.effects import (
    CloseLine,
    OfflineEffect,
    OpenLine,
    ReleaseLine,
    SettleLine,
    Settlement,
)
from mesh.core.offline.forecast import Forecast
from mesh.core.offline.jobs import Jobs, served_tokens
from mesh.core.offline.lines import Attempt, LineRecord, LineState, Window
from mesh.core.offline.pace import Pace
from mesh.core.offline.prefixes import PrefixMemory
from mesh.core.offline.regions import Regions
from mesh.core.offline.room import Backoff
from mesh.core.offline.settings import OfflineSettings
from mesh.core.view.replica_table import ReplicaTable
from schemas.exchange import SILENCE_S_MAX, Priority, Refusal
from schemas.http import Fault
from schemas.ids import RegionId, ReplicaId

PEER_REPLY_S_MAX = 5.0  # for a peer to place or refuse a line
STATUS_TRY_AGAIN = 429
# Of a replica that refused or failed: another runner of the region may have taken its room.
BACKOFF_S, BACKOFF_S_MAX = 0.1, 5.0


@dataclass(slots=True)
class OfflineCounts:
    """Since the start."""

    given: int = 0  # attempts at replicas of this region
    forwarded: int = 0  # attempts through peers
    raised: int = 0  # of both, with online priority
    answered: int = 0
    refused: int = 0
    preempted: int = 0
    failed: int = 0
    errors: int = 0  # lines whose result is an error of ours
    released: int = 0
    peer_lines: int = 0  # peers' lines placed here
    peer_lines_refused: int = 0
    tokens: int = 0  # prompts and answers of lines answered


class Attempts:
    """All attempts under way."""

    def __init__(
        self,
        *,
        region: RegionId,
        settings: OfflineSettings,
        window: Window,
        jobs: Jobs,
        replicas: ReplicaTable,
        regions: Regions,
        pace: Pace,
        forecast: Forecast,
        memory: PrefixMemory,
        effects: list[OfflineEffect],
    ) -> None:
        self.counts = OfflineCounts()
        self.backoff = Backoff(BACKOFF_S, BACKOFF_S_MAX)  # of this region's replicas
        self.term: int | None = None  # of the lease by which this region owns its replicas
        self._region = region
        self._settings = settings
        self._window = window
        self._jobs = jobs
        self._replicas = replicas
        self._regions = regions
        self._pace = pace
        self._forecast = forecast
        self._memory = memory
        self._effects = effects
        # By key, the oldest first: when it began; when the last frame came; when a peer was asked.
        self._began_at: dict[int, float] = {}
        self._last_frame_at: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}
        self._at_replica: dict[ReplicaId, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._last_frame_at) + len(self._asked_at)

    # Begun.

    def give(
        self, record: LineRecord, replica: ReplicaId, now: float, raised: Priority | None = None
    ) -> None:
        """Give the line to a replica of this region; `raised`: with this online priority."""
        line = record.line
        held = self._memory.held_blocks(replica, line.prompt.hashes)
        prefill_tokens = line.prompt.uncached_tokens(held)
        handoff = self._replicas.hand_off(replica, line.tokens, prefill_tokens, now)
        self._memory.given(replica, line.prompt.hashes)
        attempt = Attempt(now, replica, None, handoff, held, raised is None, raised or Priority.LOW)
        self._begin(record, attempt, now)
        self.counts.given += 1
        self._last_frame_at[line.key] = now
        self._at_replica.setdefault(replica, {})[line.key] = None
        self._effects.append(
            fx.Dispatch(
                line.key,
                record.number,
                replica,
                handoff,
                None,
                prefill_tokens,
                term=self.term,
            )
        )

    def forward(
        self, record: LineRecord, peer: RegionId, now: float, raised: Priority | None = None
    ) -> None:
        """Ask a peer to place the line."""
        self._regions.sent(peer, record.line.tokens, now)
        attempt = Attempt(now, None, peer, None, 0, raised is None, raised or Priority.LOW)
        self._begin(record, attempt, now)
        self.counts.forwarded += 1
        self._asked_at[record.line.key] = now
        self._effects.append(fx.Forward(record.line.key, record.number, peer))

    def _begin(self, record: LineRecord, attempt: Attempt, now: float) -> None:
        self._window.attempt(record, attempt)
        self._began_at[record.line.key] = now
        self.counts.raised += not attempt.offline
        self._effects.append(OpenLine(self._request(record, attempt, now)))

    def _request(self, record: LineRecord, attempt: Attempt, now: float) -> Request:
        line, job = record.line, self._jobs.get(record.line.job)
        assert job is not None, "lines of jobs that have ended are not handed out"
        return Request(
            key=line.key,
            request_id=line.request_id,
            model=line.model,
            prompt=line.prompt,
            arrived_at=record.fetched_at,
            deadline=min(job.job.deadline, now + self._settings.attempt_s_max),
            hops=0,
            origin=self._region,
            priority=attempt.priority,
            residency=job.job.residency,
            wants_receipt=False,
            offline=attempt.offline,
            answer_tokens=line.answer_tokens,
        )

    # Under way.

    def progressed(self, event: ev.AttemptProgressed, now: float) -> None:
        record = self._window.current(event.key, event.attempt)
        if record is not None and record.attempt is not None:
            self._frame_came(event.key, now)
            if record.attempt.replica is not None:  # it has taken the line
                self.backoff.answered(record.attempt.replica)

    def placed_by_peer(self, event: ev.PlacedByPeer, now: float) -> None:
        record = self._window.current(event.key, event.attempt)
        if record is not None and record.attempt is not None and record.attempt.peer is not None:
            self._window.placed_by_peer(record, event.replica)
            self._frame_came(event.key, now)

    def _frame_came(self, key: int, now: float) -> None:
        self._asked_at.pop(key, None)
        self._last_frame_at.pop(key, None)
        self._last_frame_at[key] = now

    # Over.

    def answered(self, event: ev.AnswerEnded, now: float) -> None:
        record = self._window.current(event.key, event.attempt)
        if record is None or record.attempt is None:
            return
        attempt, tokens = record.attempt, self._count(record, record.attempt, event.served)
        if attempt.peer is not None:
            self._regions.answered(attempt.peer, tokens)
        elif attempt.replica is not None:
            self.backoff.answered(attempt.replica)
        self.counts.answered += 1
        self.counts.tokens += tokens
        self.settle(record, Settlement.ANSWER)

    def _count(self, record: LineRecord, attempt: Attempt, served: Served | None) -> int:
        line, job = record.line, self._jobs.get(record.line.job)
        tokens = served_tokens(line, served)
        if attempt.peer is not None:  # what it claims speeds up jobs, and what it is sent
            tokens = min(tokens, line.tokens)
        if job is not None:
            job.served(tokens)
        if attempt.offline and attempt.peer is None:
            self._forecast.computed(line.model, tokens)
        speeds = self._pace.speeds(line.model)
        if attempt.offline and attempt.peer is None:
            if line.model in self._pace.saturated:
                speeds.home.add(tokens)
        elif line.model in self._window.waiting_lines:
            (speeds.peers if attempt.offline else speeds.raised).add(tokens)
        return tokens

    def refused(self, event: ev.AttemptRefused, now: float) -> None:
        record = self._window.current(event.key, event.attempt)
        if record is None or record.attempt is None:
            return
        attempt = record.attempt
        if event.reason == Refusal.BAD_WORK:
            self._fail(record, "the replica could not read the request", None, now)
            return
        self.counts.refused += 1
        if attempt.peer is not None:
            self._regions.penalize(attempt.peer, now)
            self._window.avoid(record, now)  # it may be too long for any single replica there
        elif attempt.replica is not None:
            self._replicas.refused(attempt.replica, now)
            self.backoff.penalize(attempt.replica, now)
        self._put_back(record)

    def failed(self, event: ev.AttemptFailed, now: float) -> None:
        record = self._window.current(event.key, event.attempt)
        if record is None or record.attempt is None:
            return
        if event.preempted:
            self.counts.preempted += 1
            if record.attempt.replica is not None:
                self._replicas.refused(record.attempt.replica, now)  # until its next heartbeat
            else:
                self._penalize_place(record.attempt, now)
            self._put_back(record, computed=True)
        elif event.status == STATUS_TRY_AGAIN:
            self.counts.refused += 1
            self._penalize_place(record.attempt, now)
            self._put_back(record)
        else:
            self._fail(record, event.detail, event.status, now)

    def _fail(
        self,
        record: LineRecord,
        detail: str,
        status: int | None,
        now: float,
        *,
        same_again: bool = False,
    ) -> None:
        """The attempt failed: another one later, or the line's result is an error.

        `same_again`: the place may be tried again at once, as another process runs there now.
        """
        assert record.attempt is not None, "only attempts fail"
        self.counts.failed += 1
        self._window.failed(record, status, now, avoid=not same_again)
        if not same_again:
            self._penalize_place(record.attempt, now)
        if record.is_worth_another(self._settings.failures_max):
            self._put_back(record)
        elif status is not None:
            self.settle(record, Settlement.ENGINE_ERROR)
        else:
            self.settle_error(record, Fault.ENGINE_FAILED.value.code, detail)

    def _penalize_place(self, attempt: Attempt, now: float) -> None:
        if attempt.peer is not None:
            self._regions.penalize(attempt.peer, now)
        elif attempt.replica is not None:
            self.backoff.penalize(attempt.replica, now)

    # Time and losses.

    def expire(self, now: float) -> None:
        """Give up attempts of which no frame has come for too long, and those past their deadline:
        a peer's claims that it works are not believed for ever."""
        bus = self._replicas.bus
        for since, most_s in (
            (self._asked_at, PEER_REPLY_S_MAX),
            (self._last_frame_at, SILENCE_S_MAX),
            (self._began_at, self._settings.attempt_s_max + SILENCE_S_MAX),
        ):
            while since:
                key, since_at = next(iter(since.items()))
                if bus.silent_s(since_at, now) <= most_s:
                    break
                self._silent(key, now)

    def _silent(self, key: int, now: float) -> None:
        record = self._window.get(key)
        assert record is not None and record.attempt is not None, "it is under way"
        self._cancel(record)
        if record.attempt.began_at < self._replicas.bus.returned_at:
            self._put_back(record)
        elif record.attempt.peer is not None and key in self._asked_at:
            self._regions.penalize(record.attempt.peer, now)
            self._put_back(record)
        else:
            self._fail(record, "its answer has not come in time", None, now)

    def replica_lost(self, replica: ReplicaId, why: str, now: float) -> None:
        """Its process is gone: its lines go back."""
        self._memory.lost(replica)
        for key in list(self._at_replica.get(replica, ())):
            record = self._window.get(key)
            assert record is not None, "it is under way"
            self._cancel(record)
            self._fail(record, f"replica {replica} was lost: {why}", None, now, same_again=True)

    # Ends of lines.

    def settle(self, record: LineRecord, settlement: Settlement) -> None:
        """The attempt's answer, or its engine's error, is the line's result."""
        line = record.line
        self._effects.append(SettleLine(line.key, line.job, line.number, settlement))
        self._leave(record)
        self._window.settle(record)

    def settle_error(self, record: LineRecord, code: str, message: str) -> None:
        """An error is the line's result; an attempt under way is over already, or is cancelled by
        the caller."""
        line, kind = record.line, Settlement.ERROR
        self.counts.errors += 1
        self._effects.append(SettleLine(line.key, line.job, line.number, kind, code, message))
        self._leave(record)
        self._window.settle(record)

    def end(self, records: Iterable[LineRecord], error: tuple[str, str] | None = None) -> None:
        """No result is wanted any more: cancel what runs. Lines are released, or get that error
        (code and message)."""
        for record in list(records):
            if record.state is LineState.SETTLED:
                continue
            if record.attempt is not None:
                self._cancel(record)
            if error is not None:
                self.settle_error(record, *error)
                continue
            self.counts.released += 1
            self._leave(record)
            line = record.line
            self._effects.append(ReleaseLine(line.key, line.job, line.number))
            self._window.release(record)

    def _put_back(self, record: LineRecord, *, computed: bool = False) -> None:
        """`computed`: the replica may have some of the prompt in its cache."""
        attempt = record.attempt
        if attempt is not None and attempt.replica is not None and not computed:
            new_blocks = record.line.prompt.hashes[attempt.held_blocks :]
            self._memory.given_back(attempt.replica, new_blocks)
        self._leave(record)
        self._window.put_back(record)

    def _cancel(self, record: LineRecord) -> None:
        attempt = record.attempt
        assert attempt is not None, "only attempts are cancelled"
        replica = attempt.replica or record.peer_replica
        region = attempt.peer or self._region
        self._effects.append(fx.CancelAttempt(record.line.key, record.number, region, replica))

    def _leave(self, record: LineRecord) -> None:
        """Forget the attempt under way, if there is one. The line's next state follows."""
        attempt, key = record.attempt, record.line.key
        if attempt is None:
            return
        for since in (self._began_at, self._last_frame_at, self._asked_at):
            since.pop(key, None)
        if attempt.replica is not None:
            here = self._at_replica[attempt.replica]
            del here[key]
            if not here:
                del self._at_replica[attempt.replica]
        elif attempt.peer is not None:
            self._regions.over(attempt.peer, record.line.tokens)
        self._effects.append(CloseLine(key))
