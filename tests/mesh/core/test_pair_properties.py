"""What holds for attempts on pairs, whatever happens to them: random events from a seed."""

from collections import Counter
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.policies import POLICIES
from schemas.exchange import Refusal
from schemas.ids import ReplicaId
from schemas.state import ReplicaState
from tests.mesh.core import build
from tests.mesh.core.pair_region import ENDS, Region, part


class Disorder(Region):
    """Anything that may happen to pairs, from one seed, with books of what is open."""

    NAMES = ("p1", "p2", "d1", "d2", "s1", "s2", "whole")
    PARTS = (
        part("prefill"), part("prefill"), part("decode"), part("decode"),
        part("prefill", "sglang"), part("decode", "sglang", address=None), None,
    )  # fmt: skip

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        super().__init__(self.dice.choice(tuple(POLICIES)), seed, hold_s_max=5.0)
        self.keys = 0
        self.theirs: set[int] = set()
        self.ended: Counter[int] = Counter()
        self.stages: dict[int, tuple[int, str]] = {}  # prefill stages at a replica: attempt, name
        self.answers: dict[int, tuple[int, str]] = {}  # of own clients' requests
        self.started: set[int] = set()
        for name, kv in zip(self.NAMES, self.PARTS, strict=True):
            self.says(name, kv)

    def feed(self, event: ev.Event) -> list[fx.Effect]:
        effects = super().feed(event)
        for effect in effects:
            self._watch(effect)
        return effects

    def _watch(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.DispatchPrefill):
            key = effect.work.key
            assert key not in self.stages, "two prefill stages of one request"
            assert key not in self.started and not self.ended[key]
            self.stages[key] = effect.work.attempt, effect.work.replica
        elif isinstance(effect, fx.CancelPrefill):
            open_one = self.stages.pop(effect.key, None)  # none if it has failed just now
            assert open_one in (None, (effect.attempt, effect.replica))
        elif isinstance(effect, fx.Dispatch) and effect.answer_inbox is None:
            assert effect.key not in self.answers and effect.key not in self.started
            self.answers[effect.key] = effect.attempt, effect.replica
        elif isinstance(effect, fx.CancelAttempt):
            self.answers.pop(effect.key, None)
        elif isinstance(effect, ENDS):
            self.ended[effect.key] += 1
            self.answers.pop(effect.key, None)

    def step(self) -> None:
        acts = [self.ask] * 4 + [self.stage] * 6 + [self.answer] * 8 + [self.beat] * 5
        self.dice.choice([*acts, self.time, self.time, self.gone])()

    def ask(self) -> None:
        self.keys += 1
        foreign = self.dice.random() < 0.3
        if foreign:
            self.theirs.add(self.keys)
        self.asks(self.keys, foreign=foreign, tokens=self.dice.choice((20, 900, 9000)))

    def stage(self, *, well: bool = False) -> None:
        if not self.stages:
            return
        key = self.dice.choice(sorted(self.stages))
        attempt, name = self.stages.pop(key)
        us, replica = build.US, ReplicaId(name)
        events = [
            ev.PrefillEnded(key, attempt),
            ev.AttemptFailed(key, attempt, "broke", self.dice.choice((None, 500)), prefill=True),
            ev.AttemptRefused(key, attempt, Refusal.FULL, us, replica, -1, -1, prefill=True),
        ]
        event = events[0] if well else self.dice.choice(events)
        self.feed(event)

    def answer(self, *, well: bool = False) -> None:
        if not self.answers:
            return
        key = self.dice.choice(sorted(self.answers))
        attempt, name = self.answers[key]
        us, replica = build.US, ReplicaId(name)
        what = "started" if well else self.dice.choice(("started", "failed", "refused"))
        if what == "started" or key in self.started:
            self.feed(ev.AnswerStarted(key, attempt))
            self.started.add(key)
            if well or self.dice.random() < 0.5:
                del self.answers[key]
                self.ended[key] += 1
                self.feed(ev.AnswerEnded(key, attempt))
            return
        del self.answers[key]
        if what == "failed":
            status = self.dice.choice((None, None, 500))
            self.feed(ev.AttemptFailed(key, attempt, "broke", status))
        else:
            self.feed(ev.AttemptRefused(key, attempt, Refusal.FULL, us, replica, -1, -1))

    def beat(self, name: str | None = None, *, well: bool = False) -> None:
        states = (ReplicaState.READY,) * 6 + (ReplicaState.DOWN, ReplicaState.DRAINING)
        state = ReplicaState.READY if well else self.dice.choice(states)
        self.says(
            name or self.dice.choice(self.NAMES),
            state=state,
            taken={build.ROUTER: self.core.replicas._last_handoff},
        )

    def time(self) -> None:
        self.now += self.dice.choice((0.02, 0.3, 1.2))
        self.feed(ev.Tick())

    def gone(self) -> None:
        key = self.dice.randint(1, self.keys + 1)
        if key in self.core.inflight and key not in self.theirs:
            self.ended[key] += 1
            self.feed(ev.ClientGone(key))
            assert key not in self.stages, "its prefill stage was left running"
            self.answers.pop(key, None)

    def heal(self) -> None:
        for _ in range(400):
            for name in self.NAMES:
                self.beat(name, well=True)
            while self.stages or self.answers:
                self.stage(well=True)
                self.answer(well=True)
            self.now += 0.1
            self.feed(ev.Tick())
            if not self.core.inflight:
                break


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
@example(1)
def test_every_request_ends_once_and_no_stage_stays_behind(seed):
    world = Disorder(seed)
    for _ in range(250):
        world.step()
    world.heal()
    assert not world.core.inflight and not world.stages
    own = [key for key in range(1, world.keys + 1) if key not in world.theirs]
    assert [(key, world.ended[key]) for key in own if world.ended[key] != 1] == []
    for replica in world.core.replicas:
        world.beat(replica.heartbeat.replica, well=True)
        sent = replica.on_the_way
        assert (len(sent), sent.tokens, sent.waiting, sent.prefill_tokens) == (0, 0, 0, 0)
