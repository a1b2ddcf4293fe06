"""One router that may warm, replicas that follow, and a log of its effects."""

from random import Random

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Served
from schemas.ids import ReplicaId
from schemas.residency import Label, ground
from tests.mesh.core.build import AP, EU, US, beat, core, digest, request

HOME, ABROAD = Label("home"), Label("abroad")
GROUND = ground({US: (HOME,), EU: (ABROAD,), AP: (ABROAD, HOME)})
S_PER_TOKEN = 0.0005
SYSTEM = "S" * 10
WARM = (fx.KeepPrefix, fx.DropPrefix, fx.OpenWarmUp, fx.CloseWarmUp, fx.StopForwarded)


class World:
    """Time passes in ticks of 50 ms; `effects` are those of all events, with their times."""

    def __init__(self, seed: int = 1, replicas: int = 2, **settings) -> None:
        known = {"warm_idle_share": 0.5, "warm_trend_s": 60.0, "ground": GROUND}
        self.core = core(seed, **(known | settings))
        self.dice = Random(seed)
        self.now = 100.0
        self.names = [ReplicaId(f"us-{number}") for number in range(replicas)]
        self.fields = {name: {"kv_used_ratio": 0.1} for name in self.names}
        self.inside: dict[ReplicaId, set[int]] = {name: set() for name in self.names}
        self.seq = self.key = 0
        self.bodies: dict[int, int] = {}
        self.open: dict[int, fx.OpenWarmUp] = {}
        self.closed: list[int] = []
        self.effects: list[tuple[float, fx.Effect]] = []
        self.last: list[fx.Effect] = []

    def feed(self, event: ev.Event) -> list[fx.Effect]:
        """One event; what is kept is said to be, as the edge does, after it."""
        self.last = found = self.core.handle(event, self.now)
        self.effects += [(self.now, effect) for effect in found]
        for effect in found:
            self._see(effect)
        for effect in found:
            if isinstance(effect, fx.KeepPrefix):
                size = self.keep(effect)
                self.feed(ev.PrefixKept(effect.prefix, size))
        return found

    def keep(self, effect: fx.KeepPrefix) -> int | None:
        """The edge keeps it in a body as long as its text."""
        self.bodies[effect.prefix] = 256 * effect.blocks
        return self.bodies[effect.prefix]

    def _see(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.OpenWarmUp):
            assert effect.prefix in self.bodies, "only what is kept can be sent"
            assert effect.request.key not in self.open
            self.open[effect.request.key] = effect
        elif isinstance(effect, fx.CloseWarmUp):
            del self.open[effect.key]
            self.closed.append(effect.key)
        elif isinstance(effect, fx.DropPrefix):
            self.bodies.pop(effect.prefix, None)
        elif isinstance(effect, fx.Dispatch) and effect.replica in self.inside:
            self.inside[effect.replica].add(effect.key)
        elif isinstance(effect, fx.CancelAttempt) and effect.replica in self.inside:
            self.inside[effect.replica].discard(effect.key)

    def beat(self, name: ReplicaId, **fields) -> None:
        """A heartbeat: it has taken all."""
        self.seq += 1
        load = len(self.inside[name])
        told = {
            "running": load,
            "outstanding": load,
            "prefill_queued_tokens": 0,
            "prefill_s_per_token": S_PER_TOKEN,
            "prefill_base_s": 0.02,
            "kv_capacity_tokens": 100_000,
            "taken": {"r1": 10**9},
            "residency": (HOME,),
        }
        self.feed(ev.HeartbeatSeen(beat(name, self.seq, **(told | self.fields[name] | fields))))

    def digest(self, region, **fields) -> None:
        self.seq += 1
        self.feed(ev.RttMeasured(region, 0.1))
        self.feed(ev.DigestSeen(digest(region, self.seq, **fields)))

    def pass_time(self, seconds: float) -> None:
        """Heartbeats and ticks; nothing else happens."""
        for step in range(round(seconds / 0.05)):
            self.now += 0.05
            if step % 2:
                for name in self.names:
                    self.beat(name)
            self.feed(ev.Tick())

    def ask(self, text: str, **fields) -> int:
        """A client's request, left to its replica."""
        self.key += 1
        self.feed(ev.RequestArrived(request(self.key, text, self.now, **fields)))
        return self.key

    def answer(self, key: int) -> None:
        """It is served at once."""
        record = self.core.inflight.get(key) or self.core.warming._under_way.get(key)
        if record is None or record.held_since is not None:
            return
        if key > 0:
            self.feed(ev.AnswerStarted(key, record.attempt))
        self.feed(ev.AnswerEnded(key, record.attempt, Served(100, 0, 1)))
        for load in self.inside.values():
            load.discard(key)

    def unlike(self) -> str:
        return "".join(self.dice.choices("ABCDEFGHIJKLMNOPQRTUVWXYZ", k=4))

    def share(self, text: str = SYSTEM, times: int = 4, **fields) -> None:
        """So many clients ask with that beginning, and are answered."""
        for _ in range(times):
            self.answer(self.ask(text + self.unlike(), **fields))
            self.pass_time(0.1)

    def sent(self, kind: type = fx.OpenWarmUp) -> list:
        return [effect for _, effect in self.effects if isinstance(effect, kind)]
