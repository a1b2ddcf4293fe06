"""`mesh router`, and on SIGUSR1 what no metric has: heartbeats missed, and time of decisions.

    python -m tests.programs.live.load.watched_router FILE BLOCKS REPLICAS --region us …

It writes FILE anew each time, and begins with so many blocks in its index, held by so many
replicas. Everything after those is for `mesh router`. The core's two methods are wrapped before it
is made; that costs a microsecond a call, and is in what is reported.
"""

import signal
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from random import Random
from typing import Any

import orjson

from mesh.cli.main import main
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import make_policy
from mesh.core.router import RouterCore
from mesh.core.view.replica_table import ReplicaTable
from tests.programs.studies import decide

DECISIONS_KEPT = 20_000  # the last ones: those with the fullest index


class Watch:
    """What was seen of heartbeats and decisions."""

    def __init__(self) -> None:
        self.beats = self.missed = 0
        self.decided_s: deque[float] = deque(maxlen=DECISIONS_KEPT)

    def wrap(self) -> None:
        """Look on from now on."""
        see, handle = ReplicaTable.see, RouterCore.handle

        def seeing(table: ReplicaTable, beat: Any, now: float) -> Any:
            known = table.get(beat.replica)
            self.beats += 1
            if known is not None:
                ahead = beat.seq - known.heartbeat.seq
                self.missed += ahead - 1 if ahead > 0 else -(ahead < 0)  # late ones are not missed
            return see(table, beat, now)

        def handling(core: RouterCore, event: Any, now: float) -> Any:
            if type(event) is not ev.RequestArrived:
                return handle(core, event, now)
            began = time.perf_counter()
            effects = handle(core, event, now)
            self.decided_s.append(time.perf_counter() - began)
            return effects

        ReplicaTable.see, RouterCore.handle = seeing, handling  # type: ignore[method-assign]

    def figures(self) -> dict[str, float]:
        """For the benchmark: microseconds are wall time, so the median counts."""
        found: dict[str, float] = {"beats": self.beats, "missed": self.missed}
        if len(self.decided_s) > 1:
            tenths = statistics.quantiles(self.decided_s, n=10)
            found |= dict(zip(("p10_s", "p50_s", "p90_s"), tenths[::4], strict=True))
        return found


def _fill(blocks: int, replicas: int) -> None:
    """Let every core begin as one that has placed prompts for hours."""
    begin = RouterCore.__init__

    def beginning(core: RouterCore, *, settings: RouterSettings, **others: Any) -> None:
        policy = make_policy(settings.policy, settings, Random(2))
        decide.filled(policy, replicas, blocks, Random(1), time.monotonic())
        makers = {settings.policy: lambda settings, dice: policy}
        begin(core, settings=settings, makers=makers, **others)

    RouterCore.__init__ = beginning  # type: ignore[method-assign]


def _run(file: Path, blocks: int, replicas: int, arguments: list[str]) -> None:
    watch = Watch()
    watch.wrap()
    if blocks:
        _fill(blocks, replicas)

    def write_figures(*_: object) -> None:
        beside = file.with_suffix(".new")
        beside.write_bytes(orjson.dumps(watch.figures()))
        beside.replace(file)

    signal.signal(signal.SIGUSR1, write_figures)
    main(["router", *arguments])


if __name__ == "__main__":
    _run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
