"""Playing cases: each in a fresh world, two processes at a time, and none twice.

Throughput is counted inside the time in which clients ask (a closed loop's duration, an open
loop's last arrival): what is answered afterwards only empties the fleet, and how long that takes
depends on the longest answer alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context

from mesh.replay.tally import Outcome
from mesh.sim.ask import Answered, Ask
from mesh.sim.run import run
from mesh.sim.study.cells import workload_of, world_of
from mesh.sim.twin_policies import TwinPolicies
from mesh.sim.workload import Workload
from mesh.sim.world import SETTLE_S
from tests.benchmarks.study.ablation import with_ablations
from tests.benchmarks.study.case import Case
from tests.benchmarks.study.shelf import Result, Shelf

Show = Callable[[int, int, Case, float], None]  # done, of how many, which, wall seconds


class Window:
    """Output tokens and answers that were complete before clients stopped asking."""

    def __init__(self, workload: Workload) -> None:
        last_s = workload.arrivals[-1].at_s if workload.arrivals else 0.0
        self.length_s = max(workload.until_s or 0.0, last_s)
        self._tokens = 0
        self._answers = 0

    def add(self, ask: Ask, answered: Answered, now: float) -> None:
        """One request's end."""
        if answered.outcome is Outcome.OK and now - SETTLE_S <= self.length_s:
            self._tokens += ask.node.answer.tokens
            self._answers += 1

    def rates(self) -> dict[str, float]:
        """Per second of the window."""
        return {
            "window_tokens_per_s": self._tokens / self.length_s,
            "window_answers_per_s": self._answers / self.length_s,
        }


def play(case: Case) -> Result:
    """Run one case to its end. Raises ValueError for what can't be played."""
    began_at = time.perf_counter()
    workload, config = world_of(case.scenario, case.cell, workload_of(case.scenario))
    window = Window(workload)
    report = run(
        workload,
        replace(config, **case.world),
        perf=time.perf_counter,
        makers=with_ablations(TwinPolicies()),
        watch=window.add,
    )
    return report | window.rates() | {"wall_s": time.perf_counter() - began_at}


def play_all(cases: Sequence[Case], shelf: Shelf, *, jobs: int, show: Show) -> list[Result]:
    """Every case's result, in their order; from the shelf where it has been played."""
    keys = [case.key() for case in cases]
    found = {key: shelf.get(key) for key in keys}
    missing = {key: case for key, case in zip(keys, cases, strict=True) if found[key] is None}
    for done, (key, result) in enumerate(_played(missing, jobs), 1):
        shelf.put(key, result)
        found[key] = result
        show(done, len(missing), missing[key], result["wall_s"])
    return [result for key in keys if (result := found[key]) is not None]


def _played(cases: dict[str, Case], jobs: int) -> Iterator[tuple[str, Result]]:
    # Spawned, not forked: a fork would copy threads. The pool ends its processes with the block.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        playing = {pool.submit(play, case): key for key, case in cases.items()}
        try:
            for future in as_completed(playing):
                yield playing[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
