"""Playing cases: each in a fresh world, two processes at a time, and none twice.

Throughput, of a closed loop: what is answered while clients ask, a second. What comes afterwards
only empties the fleet, and how long that takes depends on the longest answer alone. Of an open
loop, which ends when all is answered: nine tenths of what was asked for, over the time until it
was there; the last tenth is the tail again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context

from mesh.replay.tally import RequestOutcome
from mesh.sim.study.cells import workload_of, world_of
from mesh.sim.twin_policies import TwinPolicies
from mesh.sim.workload import RequestEnd, SentRequest, Workload
from mesh.sim.world import SETTLE_S, run
from tests.programs.studies.tables.ablation import with_ablations
from tests.programs.studies.tables.case import Case
from tests.programs.studies.tables.result_files import Result, ResultFiles

COUNTED = 0.9  # of an open loop's tokens

Show = Callable[[int, int, Case, float], None]  # done, of how many, which, wall seconds


class Throughput:
    """Tokens of the answers of one run; `add` is called with each request's end."""

    def __init__(self, workload: Workload) -> None:
        self._until_s = workload.until_s if workload.clients else None
        self._requested_tokens = 0
        self._complete: list[tuple[float, int]] = []  # time and tokens of every whole answer

    def add(self, sent: SentRequest, end: RequestEnd, now: float) -> None:
        """One request's end."""
        tokens = sent.node.answer.tokens
        self._requested_tokens += tokens
        if end.outcome is RequestOutcome.OK:
            self._complete.append((now - SETTLE_S, tokens))

    def tokens_per_s(self) -> float:
        """0 if nothing was answered."""
        if self._until_s is not None:
            return sum(n for at_s, n in self._complete if at_s <= self._until_s) / self._until_s
        tokens, last_s = 0, 1.0
        for at_s, answer_tokens in self._complete:
            tokens, last_s = tokens + answer_tokens, at_s
            if tokens >= COUNTED * self._requested_tokens:
                break
        return tokens / last_s


def play(case: Case) -> Result:
    """Run one case to its end. Raises ValueError for what can't be played."""
    began_at = time.perf_counter()
    workload, config = world_of(case.scenario, case.cell, workload_of(case.scenario))
    throughput = Throughput(workload)
    report = run(
        workload,
        replace(config, **case.world),
        perf=time.perf_counter,
        makers=with_ablations(TwinPolicies()),
        watch=throughput.add,
    )
    measured = {"throughput": throughput.tokens_per_s(), "wall_s": time.perf_counter() - began_at}
    return report | measured


def play_all(cases: Sequence[Case], files: ResultFiles, *, jobs: int, show: Show) -> list[Result]:
    """Every case's result, in their order; from its file where it has been played."""
    keys = [case.key() for case in cases]
    found = {key: files.get(key) for key in keys}
    missing = {key: case for key, case in zip(keys, cases, strict=True) if found[key] is None}
    for done, (key, result) in enumerate(_played(missing, jobs), 1):
        files.put(key, result)
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
