"""A runner's surroundings as a model: a store, replicas, peers; every effect is checked.

What it checks, with each effect: a line is in one place; each fetched line ends once; nothing goes
to a replica beyond the room of its last heartbeat, or where residency forbids it; attempts are
opened and closed in turn; no more is fetched than the window takes.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Request, Served
from mesh.core.offline import effects as ofx
from mesh.core.offline import events as oev
from mesh.core.offline.core import OfflineCore
from mesh.core.offline.jobs import FETCH_S_MAX
from mesh.core.offline.settings import OfflineSettings
from mesh.core.offline.state import RunnerState
from schemas.exchange import Refusal
from schemas.ids import ModelId, RegionId, ReplicaId, RequestId, RouterId
from schemas.residency import Label, Labels, ground
from schemas.state import Heartbeat, OfflineCapacity, OfflineState
from tests.mesh.core.build import AP, EU, MODEL, US, beat

RUNNER = RouterId("batch-0")
TICK_S = 0.05
GERMANY, EUROPE = Label("de"), Label("eu")
GROUND = ground({US: (), EU: (EUROPE,), AP: (EUROPE,)})


def job(name: str = "j", lines: int = 10, *, window_s: float = 3600.0, **fields: Any) -> Any:
    """A job that began at 0."""
    known: dict[str, Any] = {"began_at": 0.0, "deadline": window_s, "total": lines}
    return oev.OfflineJob(id=name, **(known | fields))


def offline_state(region: str, seq: int = 1, **fields: Any) -> OfflineState:
    """A peer that has room for MODEL, unless said otherwise."""
    room, slack = fields.pop("room", 100_000), fields.pop("slack", ())
    model = fields.pop("model", MODEL)
    known: dict[str, Any] = {
        "region": RegionId(region),
        "router": RUNNER,
        "epoch": 1,
        "seq": seq,
        "accepting": True,
        "models": {model: OfflineCapacity(room_tokens=room, slack_tokens=slack)},
    }
    return OfflineState(**(known | fields))


def peer_line(key: int, *, tokens: int = 100, deadline: float = 1e6, **fields: Any) -> Request:
    """A peer's line."""
    known: dict[str, Any] = {
        "key": key,
        "request_id": RequestId(f"peer_line-{key}"),
        "model": MODEL,
        "prompt": Prompt(tokens, ()),
        "arrived_at": 0.0,
        "deadline": deadline,
        "hops": 1,
        "origin": EU,
        "answer_inbox": f"inbox-{key}",
        "offline": True,
        "answer_tokens": 10,
    }
    return Request(**(known | fields))


@dataclass
class FakeReplica:
    """An agent: takes what fits, and names its room in heartbeats."""

    name: ReplicaId
    room_max: int = 10_000
    models: tuple[ModelId, ...] = (MODEL,)
    epoch: int = 1
    seq: int = 0
    silent: bool = False
    labels: Labels | None = None
    inside: dict[tuple[int, int], int] = field(default_factory=dict)  # attempts, and their tokens
    last_handoff: int = 0
    room_told: int = 0
    given_since: int = 0
    fields: dict[str, Any] = field(default_factory=dict)  # of its heartbeats

    def beat(self) -> Heartbeat:
        self.seq += 1
        self.room_told = max(0, self.room_max - sum(self.inside.values()))
        self.given_since = 0
        known: dict[str, Any] = {
            "epoch": self.epoch,
            "models": self.models,
            "residency": self.labels,
            "offline_room_tokens": self.room_told,
            "taken": {RUNNER: self.last_handoff},
            "kv_used_ratio": 0.0,
        }
        return beat(self.name, self.seq, **(known | self.fields))


@dataclass
class OpenAttempt:
    """One that the runner has under way."""

    request: Request
    attempt: int = 0
    replica: ReplicaId | None = None
    peer: RegionId | None = None
    handoff: int | None = None


class World:
    """Everything around one core; the test plays the host."""

    def __init__(self, seed: int = 1, **settings: Any) -> None:
        known = {"ground": GROUND} | settings
        self.settings = OfflineSettings(**known)
        self.core = OfflineCore(
            RunnerState(
                region=US,
                runner=RUNNER,
                epoch=1,
                settings=self.settings,
                dice=Random(seed),
                unix_at_zero=1_000_000_000.0,
            )
        )
        self.now = 0.0
        self.keys = 0
        self.replicas: dict[ReplicaId, FakeReplica] = {}
        self.peer_labels: dict[RegionId, Labels] = {}
        self.jobs: dict[str, oev.OfflineJob] = {}
        self.store: dict[str, dict[int, oev.Line]] = {}  # lines that nobody has fetched
        self.out: dict[int, oev.Line] = {}  # fetched, and without a result
        self.results: dict[tuple[str, int], ofx.SettleLine] = {}
        self.storing: list[int] = []
        self.fetches: list[ofx.FetchLines] = []
        self.fetched_at: dict[int, float] = {}
        self.open: dict[int, OpenAttempt] = {}
        self.peer_lines: dict[int, list[fx.Dispatch | fx.RefusePeer]] = {}
        self.attempts: dict[int, int] = {}
        self.lost_reports: list[fx.TellLost] = []
        self.paced: dict[str, ofx.JobPaced] = {}
        self.published: list[OfflineState] = []
        self.saved: list[ofx.SaveForecast] = []
        self.prefill_tokens = 0  # of the last line that was given to a replica
        self.cancelled: list[fx.CancelAttempt] = []
        self.performers = {
            ofx.FetchLines: self.on_fetch,
            ofx.OpenLine: self.on_open,
            ofx.CloseLine: self.on_close,
            ofx.SettleLine: self.on_settle,
            ofx.ReleaseLine: self.on_release,
            ofx.JobPaced: lambda effect: self.paced.update({effect.job: effect}),
            ofx.PublishOffline: lambda effect: self.published.append(effect.state),
            ofx.SaveForecast: self.saved.append,
            fx.Dispatch: self.on_dispatch,
            fx.Forward: self.on_forward,
            fx.CancelAttempt: self.on_cancel,
            fx.RefusePeer: lambda effect: self.peer_lines[effect.key].append(effect),
            fx.TellLost: self.lost_reports.append,
        }

    def feed(self, event: oev.OfflineEvent) -> list[ofx.OfflineEffect]:
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self.performers[type(effect)](effect)
        return effects

    # What happens.

    def submit(self, name: str = "j", lines: int = 10, **fields: Any) -> oev.OfflineJob:
        """A job whose lines `line` makes: `shape` of a line's number, or `tokens` and no prefix."""
        shape = fields.pop("shape", None)
        tokens, model = fields.pop("tokens", 100), fields.pop("model", MODEL)
        made = self.jobs[name] = job(name, lines, **fields)
        self.store[name] = {}
        for number in range(1, lines + 1):
            hashes = shape(number) if shape is not None else (hash((name, number)) & 2**63 - 1,)
            self.store[name][number] = self.line(name, number, tokens, hashes, model)
        self.feed(oev.JobSeen(made))
        return made

    def line(
        self, name: str, number: int, tokens: int, hashes: tuple[int, ...], model: ModelId = MODEL
    ) -> oev.Line:
        self.keys += 1
        return oev.Line(
            key=self.keys,
            job=name,
            number=number,
            request_id=RequestId(f"{name}-{number}"),
            model=model,
            prompt=Prompt(tokens - 10, hashes),
            answer_tokens=10,
            body_bytes=4 * tokens,
        )

    def replica(self, name: str, **fields: Any) -> FakeReplica:
        made = self.replicas[ReplicaId(name)] = FakeReplica(ReplicaId(name), **fields)
        return made

    def beats(self) -> None:
        for one in list(self.replicas.values()):
            if not one.silent:
                self.feed(ev.HeartbeatSeen(one.beat()))

    def tick(self, seconds: float = TICK_S) -> None:
        self.now += seconds
        self.feed(ev.Tick())

    def run(self, seconds: float, *, answer: bool = False, step_s: float = 0.1) -> None:
        """Heartbeats, ticks, fetches answered; attempts too, if `answer`."""
        until = self.now + seconds
        while self.now < until:
            self.tick(step_s)
            self.beats()
            self.answer_fetches()
            if answer:
                for key in list(self.open):
                    self.end(key)

    def answer_fetches(self) -> None:
        while self.fetches:
            self.answer_fetch(self.fetches.pop(0))

    def answer_fetch(self, fetch: ofx.FetchLines) -> None:
        waiting, lines, room = self.store.get(fetch.job, {}), [], fetch.bytes_max
        for number in list(waiting)[: fetch.lines_max]:
            if waiting[number].body_bytes > room:
                break
            line = waiting.pop(number)
            self.keys += 1
            line = oev.Line(
                **{name: getattr(line, name) for name in LINE_FIELDS} | {"key": self.keys}
            )
            room -= line.body_bytes
            lines.append(line)
            self.out[line.key] = line
        self.feed(oev.LinesFetched(fetch.job, tuple(lines), fetch.number))

    def stored(self) -> None:
        while self.storing:
            self.feed(oev.LineStored(self.storing.pop()))

    def end(self, key: int, served: Served | None = None) -> None:
        self.leave_replica(key)
        attempt = self.open[key].attempt
        self.feed(ev.AnswerEnded(key, attempt, served or Served(None, None, 10)))

    def refuse(self, key: int, reason: str = Refusal.NO_OFFLINE_ROOM) -> None:
        one = self.open[key]
        self.leave_replica(key)
        region = one.peer or US
        self.feed(ev.AttemptRefused(key, one.attempt, reason, region, one.replica, -1, -1))

    def fail(self, key: int, status: int | None = None, **how: bool) -> None:
        self.leave_replica(key)
        failed = ev.AttemptFailed(key, self.open[key].attempt, "why", status, **how)
        self.feed(failed)

    def leave_replica(self, key: int) -> None:
        one = self.open[key]
        if one.replica in self.replicas:
            self.replicas[one.replica].inside.pop((key, one.attempt), None)

    def restart(self, name: ReplicaId) -> None:
        one = self.replicas[name]
        one.epoch, one.seq, one.last_handoff = one.epoch + 1, 0, 0
        one.inside.clear()

    # What the core does.

    def on_fetch(self, fetch: ofx.FetchLines) -> None:
        assert not self.core.draining
        self.fetched_at[fetch.number] = self.now
        fresh = [
            one for one in self.fetches if self.now < self.fetched_at[one.number] + FETCH_S_MAX
        ]
        assert fetch.job not in [one.job for one in fresh], "one fetch of a job at a time"
        self.fetches.append(fetch)
        fresh.append(fetch)
        reserved = sum(one.lines_max for one in fresh)
        held = len(self.out) + len(self.storing)
        assert held + reserved <= self.settings.window_lines
        body_bytes = sum(line.body_bytes for line in self.out.values())
        assert body_bytes + sum(one.bytes_max for one in fresh) <= self.settings.window_bytes

    def on_open(self, effect: ofx.OpenLine) -> None:
        request = effect.request
        assert request.key in self.out, "only lines that were fetched and have no result"
        assert request.key not in self.open, "one attempt at a time"
        assert not self.core.draining, "nothing new"
        assert self.out[request.key].job in self.jobs
        assert request.deadline <= self.jobs[self.out[request.key].job].deadline
        self.open[request.key] = OpenAttempt(request)

    def on_dispatch(self, effect: fx.Dispatch) -> None:
        one = self.replicas[effect.replica]
        if effect.answer_inbox is not None:
            self.peer_lines[effect.key].append(effect)
            assert one.given_since + 110 <= one.room_told, "no more than its heartbeat named"
            one.given_since += 110
            one.last_handoff = effect.handoff
            return
        attempt, line = self.open[effect.key], self.out[effect.key]
        assert attempt.attempt == 0, "one attempt for each OpenLine"
        assert effect.attempt == self.attempts.get(effect.key, 0) + 1
        self.attempts[effect.key] = attempt.attempt = effect.attempt
        attempt.replica, attempt.handoff = effect.replica, effect.handoff
        self.prefill_tokens = effect.prefill_tokens
        assert line.model in one.models
        wanted = self.jobs[line.job].residency
        assert self.may_hold(US, one.labels, wanted), "residency"
        if attempt.request.offline:
            assert one.given_since + line.tokens <= one.room_told, "no more than it has room for"
        one.given_since += line.tokens
        one.inside[effect.key, effect.attempt] = line.tokens
        one.last_handoff = effect.handoff

    def on_forward(self, effect: fx.Forward) -> None:
        attempt, line = self.open[effect.key], self.out[effect.key]
        assert attempt.attempt == 0
        assert effect.attempt == self.attempts.get(effect.key, 0) + 1
        self.attempts[effect.key] = attempt.attempt = effect.attempt
        attempt.peer = effect.peer
        named = self.peer_labels.get(effect.peer, ())
        assert self.may_hold(effect.peer, named, self.jobs[line.job].residency), "residency"

    def may_hold(self, region: RegionId, named: Labels | None, wanted: Labels) -> bool:
        carried = self.settings.ground.carried_by(region)
        if named is not None:
            carried &= set(named)
        return not wanted or not carried.isdisjoint(wanted)

    def on_cancel(self, effect: fx.CancelAttempt) -> None:
        assert self.open[effect.key].attempt == effect.attempt
        self.leave_replica(effect.key)
        self.cancelled.append(effect)

    def on_close(self, effect: ofx.CloseLine) -> None:
        del self.open[effect.key]

    def on_settle(self, effect: ofx.SettleLine) -> None:
        line = self.out.pop(effect.key)
        assert (line.job, line.number) == (effect.job, effect.number)
        assert (line.job, line.number) not in self.results, "one result a line"
        if effect.settlement is not ofx.Settlement.ERROR:
            assert effect.key in self.open, "the host needs the answer that it is made from"
        self.results[line.job, line.number] = effect
        self.storing.append(effect.key)
        if line.job in self.jobs:
            self.count(line.job)

    def count(self, name: str) -> None:
        """Its record has changed; the host will report it."""
        known = self.jobs[name]
        answered = sum(one == name for one, _ in self.results)
        self.jobs[name] = job(
            name,
            known.total,
            began_at=known.began_at,
            deadline=known.deadline,
            residency=known.residency,
            answered=answered,
        )

    def on_release(self, effect: ofx.ReleaseLine) -> None:
        line = self.out.pop(effect.key)
        assert effect.key not in self.open, "its attempt is over"
        self.store[line.job][line.number] = line

    # What can be seen.

    def attempted(self, name: str | ReplicaId) -> list[int]:
        """Numbers of lines under way at that replica or region, in order of hand-out."""
        keys = [key for key, one in self.open.items() if name in (one.replica, one.peer)]
        return [self.out[key].number for key in keys]

    def keys_at(self, name: str) -> list[int]:
        return [key for key, one in self.open.items() if name in (one.replica, one.peer)]


LINE_FIELDS = [name for name in oev.Line.__dataclass_fields__ if name != "key"]
