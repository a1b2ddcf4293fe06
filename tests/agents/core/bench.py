"""An AgentCore on a bench: a clock to turn, events to feed, and what it asked for by kind."""

from agents.core import effects, events
from agents.core.agent import AgentCore
from agents.core.events import EngineReading
from agents.core.replica_config import ReplicaConfig
from schemas.exchange import Outcome

MODEL = "org/llama"
HEADERS = {"Mesh-Model": "org=2Fllama", "Mesh-Path": "/v1/completions", "Mesh-Deadline-Ms": "5000"}
IDLE = EngineReading(waiting=0, running=0)


def inbox(number: int, router: str = "r1", region: str = "us") -> str:
    return f"_INBOX.{region}.{router}.{number}"


class Bench:
    """A core with a clock, and what it asked for by kind."""

    def __init__(self, **replica) -> None:
        values = {"outstanding_max": 4, "heartbeat_s": 0.1, "engine": "vllm", "epoch": 7}
        self.core = AgentCore(ReplicaConfig(region="us", replica="g0", **{**values, **replica}))
        self.now = 100.0
        self.beats = []

    def feed(self, event) -> list:
        done = self.core.handle(event, self.now)
        self.beats += [
            effect.heartbeat for effect in done if isinstance(effect, effects.PublishHeartbeat)
        ]
        return [effect for effect in done if not isinstance(effect, effects.PublishHeartbeat)]

    def read(self, reading=IDLE, models=(MODEL,)) -> list:
        return self.feed(events.EngineScraped(self.now, reading, models))

    def offline(self, number: int, body=b"{}", **headers) -> list:
        return self.work(number, body, **{"Mesh-Offline": "1", **headers})

    def work(self, number: int, body=b"{}", **headers) -> list:
        return self.feed(events.WorkArrived(inbox(number), {**HEADERS, **headers}, body))

    def end(self, number: int, outcome=Outcome.DONE, **more) -> list:
        return self.feed(events.RelayEnded(inbox=inbox(number), outcome=outcome, **more))

    def fail(self, times=3) -> None:
        for _ in range(times):
            self.feed(
                events.ScrapeFailed(
                    began_at=self.now, last_content_at=0, timed_out=False, detail=""
                )
            )

    def tick(self, seconds: float) -> list:
        """Let that much time pass, with a tick whenever the core wants one."""
        until, done = self.now + seconds, []
        while self.now < (wake_at := self.core.wake_at) < until:
            self.now = wake_at
            done += self.feed(events.TimerFired())
        self.now = until
        return [*done, *self.feed(events.TimerFired())]

    def stand_still(self, seconds: float) -> list:
        """Let that much time pass without a tick, as in a process that is stopped."""
        self.now += seconds
        return self.feed(events.TimerFired())

    @property
    def beat(self):
        return self.core.heartbeat(self.now)
