"""The property that matters most: each work item ends exactly once, whatever happens when."""

from hypothesis import given, settings
from hypothesis import strategies as st

from agents.core import effects, events
from agents.core.events import EngineReading
from schemas.exchange import Outcome
from tests.agents.core.bench import HEADERS, Bench, inbox

ARRIVALS = ("work", "parts", "bad", "part", "hole")
ENDINGS = ("cancel", "begin", "end", "lost", "tick")
SURROUNDINGS = ("alive", "restart", "read", "busy", "fail")
STEP = st.sampled_from(ARRIVALS + ENDINGS + SURROUNDINGS)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(STEP, st.integers(0, 5)), max_size=80))
def test_each_work_item_ends_exactly_once(steps) -> None:
    world = World()
    for step, number in steps:
        getattr(world, step)(number)
        assert world.bench.core.outstanding == len(world.open)
    world.finish()
    assert world.bench.core.outstanding == 0
    assert all(count == 1 for count in world.ends.values()), world.ends
    assert world.bench.core.state.requests.online.held_bytes == 0
    assert not world.bench.core.state.requests.online._receiving
    assert not any(router.requests for router in world.bench.core.state.routers._routers.values())


class World:
    """Performs effects the way the runtime does, and counts the ends of each work item."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.bench.read()
        self.count = 0
        self.epoch = 1
        self.open: dict[str, str] = {}  # inbox → "body" or "relay"
        self.ends: dict[str, int] = {}

    def perform(self, found: list) -> None:
        for effect in found:
            match effect:
                case effects.Refuse(inbox=name) | effects.SendEnd(inbox=name):
                    self.ended(name)
                case effects.RequestBody(inbox=name):
                    self.open[name] = "body"
                case effects.StartRelay(inbox=name):
                    self.open[name] = "relay"
                case effects.AbortRelay(inbox=name, outcome=outcome):
                    self.relay_ends(name, outcome)

    def ended(self, name: str) -> None:
        self.ends[name] += 1
        self.open.pop(name, None)

    def relay_ends(self, name: str, outcome: Outcome) -> None:
        assert self.open[name] == "relay"
        self.ended(name)
        self.perform(self.bench.feed(events.RelayEnded(inbox=name, outcome=outcome)))

    def pick(self, number: int, phase: str) -> str | None:
        names = [name for name, now in self.open.items() if now == phase]
        return names[number % len(names)] if names else None

    def _arrive(self, **headers) -> None:
        self.count += 1
        name = inbox(self.count, f"r{self.count % 2}")
        self.ends[name] = 0
        self.perform(self.bench.feed(events.WorkArrived(name, {**HEADERS, **headers}, b"{}")))

    def work(self, number: int) -> None:
        self._arrive()

    def parts(self, number: int) -> None:
        self._arrive(**{"Mesh-Body-Bytes": "2"})

    def bad(self, number: int) -> None:
        self._arrive(**{"Mesh-Model": ""})

    def part(self, number: int) -> None:
        if name := self.pick(number, "body"):
            self.perform(self.bench.feed(events.BodyPartArrived(name, 0, b"{}")))

    def hole(self, number: int) -> None:
        if name := self.pick(number, "body"):
            self.perform(self.bench.feed(events.BodyPartArrived(name, 1, b"}")))

    def cancel(self, number: int) -> None:
        name = self.pick(number, "body" if number % 2 else "relay") or inbox(number)
        self.perform(self.bench.feed(events.CancelArrived(name)))

    def begin(self, number: int) -> None:
        if name := self.pick(number, "relay"):
            self.perform(self.bench.feed(events.RelayBegan(name)))

    def end(self, number: int) -> None:
        if name := self.pick(number, "relay"):
            self.relay_ends(name, Outcome.DONE)

    def lost(self, number: int) -> None:
        if name := self.pick(number, "relay"):
            self.relay_ends(name, Outcome.ENGINE_LOST)

    def tick(self, number: int) -> None:
        self.perform(self.bench.tick(0.3 * number))

    def alive(self, number: int) -> None:
        self.perform(self.bench.feed(events.AliveArrived("us", f"r{number % 2}", self.epoch)))

    def restart(self, number: int) -> None:
        self.epoch += 1
        self.alive(number)

    def read(self, number: int) -> None:
        self.bench.read()

    def busy(self, number: int) -> None:
        self.bench.read(EngineReading(waiting=number, running=4))

    def fail(self, number: int) -> None:
        self.bench.fail(number)

    def finish(self) -> None:
        self.perform(self.bench.feed(events.StopRequested()))
        self.perform(self.bench.feed(events.DrainFinished()))
