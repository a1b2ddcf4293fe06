"""A world that does anything that may happen to a router, from one seed.

`Chaos.run` plays random events; `heal` then lets everyone be well and answer, and time pass.
Run as a module it prints a fingerprint of every effect, to be compared between processes.
"""

import hashlib
import sys
from collections.abc import Sequence
from random import Random

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES
from schemas.exchange import Priority, Refusal
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.state import ModelCapacity, ReplicaState
from tests.mesh.core import build
from tests.mesh.core.ledger import Case, Ledger

REPLICAS = ("us-0", "us-1", "us-2")
PEERS = ("eu", "ap")
MODELS = (ModelId("m"), ModelId("n"))
READY = ReplicaState.READY
STATES = (READY,) * 8 + (ReplicaState.DRAINING, ReplicaState.DOWN, ReplicaState.GONE)


class Chaos:
    """One router under random events, with a ledger that watches it."""

    def __init__(self, seed: int, policies: Sequence[str] = tuple(POLICIES)) -> None:
        self.dice = Random(seed)
        policy = self.dice.choice(policies)
        self.settings = {
            "policy": policy,
            "hold_max": self.dice.randint(1, 12),
            "hold_s_max": 5.0,
        }
        core = build.core(seed, **self.settings)
        self.ledger = Ledger(core, RouterSettings(**self.settings))
        self.core = core
        self.now = 50.0
        self.last_key = 0
        self.seqs: dict[str, int] = {}
        self.epochs = dict.fromkeys(REPLICAS, 1)
        self.history: list[tuple[ev.Event, float]] = []
        self.effects: list[list[fx.Effect]] = []

    def feed(self, event: ev.Event) -> None:
        self.history.append((event, self.now))
        self.effects.append(self.ledger.watch(event, self.now))

    def run(self, steps: int) -> None:
        """Anything, in any order."""
        acts = (
            [self.request] * 6 + [self.attempt_event] * 10 + [self.heartbeat] * 6
            + [self.digest] * 2 + [self.pass_time] * 4 + [self.stale_event, self.rtt, self.gone]
        )  # fmt: skip
        for _ in range(steps):
            if self.dice.random() < 0.01:
                self.feed(self.dice.choice((ev.BusLost(), ev.BusReturned())))
            self.dice.choice(acts)()

    def heal(self) -> None:
        """Everyone is well again and answers, until nothing is left to do."""
        self.feed(ev.BusReturned())
        for _ in range(600):
            for name in REPLICAS:
                self.heartbeat(name, healthy=True)
            for key in list(self.core.inflight):
                if (case := self.ledger.live(key)) is not None:
                    self.feed(ev.AnswerStarted(key, case.attempt))
                    self.feed(ev.AnswerEnded(key, case.attempt))
            self.now += 0.1
            self.feed(ev.Tick())
            if not self.core.inflight:
                break
        for _ in range(40):  # longer than anything is remembered of replicas and peers
            self.now += 0.1
            for name in REPLICAS:
                self.heartbeat(name, healthy=True)
            self.feed(ev.Tick())

    # What may happen.

    def request(self) -> None:
        self.last_key += 1
        make = build.foreign if self.dice.random() < 0.2 else build.request
        text = "".join(self.dice.choice("AB") for _ in range(self.dice.randint(0, 5)))
        asked = make(
            self.last_key,
            text,
            self.now,
            model=self.dice.choice(MODELS),
            deadline=self.now + self.dice.choice((0.5, 5.0, 600.0)),
            priority=self.dice.choice(tuple(Priority)),
            slo_ttft_s=self.dice.choice((None, None, 0.2, 3.0)),
        )
        self.feed(ev.RequestArrived(asked))

    def attempt_event(self) -> None:
        live = [key for key in self.core.inflight if self.ledger.live(key)]
        if live:
            key = self.dice.choice(live)
            self.feed(self._news(key, self.ledger.cases[key]))

    def _news(self, key: int, case: Case) -> ev.Event:
        attempt, peer = case.attempt, case.place in PEERS
        region = RegionId(case.place) if peer else build.US
        replica = ReplicaId(f"{case.place}-0") if peer else ReplicaId(case.place)
        kinds = [
            ev.AnswerStarted(key, attempt),
            ev.AnswerEnded(key, attempt, shows_ttft=True),
            ev.AttemptProgressed(key, attempt),
            ev.AttemptFailed(key, attempt, "it broke", 500 if self.dice.random() < 0.5 else None),
            ev.AttemptRefused(key, attempt, Refusal.FULL, region, replica, -1, -1),
        ]
        if peer:
            kinds.append(ev.PlacedByPeer(key, attempt, replica))
        return self.dice.choice(kinds)

    def stale_event(self) -> None:
        key = self.dice.randint(1, self.last_key + 1)
        case = self.ledger.cases.get(key)
        attempt = self.dice.randint(0, 9)
        if case is None or not case.live or attempt != case.attempt:
            old = Case(None, attempt=attempt, place=self.dice.choice(REPLICAS + PEERS))
            self.feed(self._news(key, old))

    def gone(self) -> None:
        key = self.dice.randint(1, self.last_key + 1)
        if key not in self.ledger.foreign:  # a peer's client is not reported
            self.feed(ev.ClientGone(key))

    def heartbeat(self, name: str | None = None, *, healthy: bool = False) -> None:
        name = name or self.dice.choice(REPLICAS)
        if self.dice.random() < 0.03:
            self.epochs[name] += 1
        dice = Random(self.dice.random())
        fields = {
            "state": READY if healthy else dice.choice(STATES),
            "models": MODELS if healthy or dice.random() < 0.7 else MODELS[:1],
            "pending": 0 if healthy else dice.choice((0, 0, 0, 1, None)),
            "running": 0 if healthy else dice.randint(0, 4),
            "batch_max": 4 if healthy else dice.choice((4, 4, None)),
            "full": not healthy and dice.random() < 0.1,
            "outstanding": 0 if healthy else dice.randint(0, 4),
            "taken": {build.ROUTER: self._taken(name, dice, healthy)},
            "next_within_s": None if healthy else dice.choice((None, None, 1.0)),
        }
        seq = self._seq(name)
        self.feed(ev.HeartbeatSeen(build.beat(name, seq, epoch=self.epochs[name], **fields)))

    def _taken(self, name: str, dice: Random, healthy: bool) -> int:
        seen = self.ledger.replicas.get(ReplicaId(name))
        sent = list(seen.sent) if seen is not None else []
        return max(sent, default=0) if healthy else dice.choice([0, *sent])

    def digest(self) -> None:
        name = self.dice.choice(PEERS)
        free = self.dice.randint(0, 2)
        said = build.digest(
            name,
            self._seq(name),
            free=free,
            models={model: ModelCapacity(ready=2, free=free) for model in MODELS},
            queue=self.dice.choice((0, 10, 11)),
            accepting=self.dice.random() < 0.9,
        )
        self.feed(ev.DigestSeen(said))

    def _seq(self, name: str) -> int:
        self.seqs[name] = self.seqs.get(name, 0) + 1
        return self.seqs[name]

    def rtt(self) -> None:
        self.feed(ev.RttMeasured(RegionId(self.dice.choice(PEERS)), self.dice.random() / 5))

    def pass_time(self) -> None:
        self.now += self.dice.choice((0.001, 0.05, 0.1, 0.1, 0.1, 0.3, 2.5))
        self.feed(ev.Tick())


def fingerprint(seed: int) -> str:
    """A hash over every effect of one run."""
    chaos = Chaos(seed)
    chaos.run(400)
    chaos.heal()
    return hashlib.sha256(repr(chaos.effects).encode()).hexdigest()


if __name__ == "__main__":
    print(fingerprint(int(sys.argv[1])))
