"""Playing cases: each in a fresh world, two processes at a time, and none twice.

Throughput, of a closed loop: what is answered while clients ask, a second. What comes afterwards
only empties the fleet, and how long that takes depends on the longest answer alone. Of an open
loop, which ends when all is answered: nine tenths of what was asked for, over the time until it
was there; the last tenth is the tail again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context

from mesh.replay.tally import RequestOutcome
from mesh.sim.clients import OnRequestEnd
from mesh.sim.config import WorldConfig
from mesh.sim.study.cells import workload_of, world_of
from mesh.sim.twin_policies import TwinPolicies
from mesh.sim.workload import RequestEnd, SentRequest, Workload
from mesh.sim.world import SETTLE_S, run
from tests.programs.studies.tables.ablation import with_ablations
from tests.programs.studies.tables.case import Case
from tests.programs.studies.tables.client_view import ClientView
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
    began_at, cpu_s = time.perf_counter(), time.process_time()
    workload, config = world_of(case.scenario, case.cell, workload_of(case.scenario))
    config = replace(config, **case.world)
    if case.patience_s is not None:
        found = _judged(case, workload, config, case.patience_s)
    else:
        throughput = Throughput(workload)
        found = _run(workload, config, throughput.add)
        found |= {"throughput": throughput.tokens_per_s()}
    took = {"wall_s": time.perf_counter() - began_at, "cpu_s": time.process_time() - cpu_s}
    return found | took


def _judged(case: Case, workload: Workload, config: WorldConfig, patience_s: float) -> Result:
    """What the clients got, and of the report what that doesn't have."""
    view = ClientView(
        workload,
        [profile for fleet in config.profiles().values() for profile in fleet],
        patience_s=patience_s,
        warm_up=case.warm_up,
    )
    report = _run(workload, replace(config, patience_s=patience_s), view.add)
    kept = {name: report[name] for name in ("batch_occupancy", "failures", "forwarded", "digest")}
    return kept | view.figures()


def _run(workload: Workload, config: WorldConfig, watch: OnRequestEnd) -> Result:
    makers = with_ablations(TwinPolicies())
    return run(workload, config, perf=time.process_time, makers=makers, watch=watch)


def play_all(cases: Sequence[Case], files: ResultFiles, *, jobs: int, show: Show) -> list[Result]:
    """Every case's result, in their order; from its file where it has been played."""
    play_missing(cases, files, jobs=jobs, show=show)
    return [result for case in cases if (result := files.get(case.key())) is not None]


def play_missing(
    cases: Sequence[Case],
    files: ResultFiles,
    *,
    jobs: int,
    show: Show,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Play the cases that have no file yet, and keep each as soon as it has ended.

    A process that is killed loses the runs that were being played. Once `until` is true no more
    runs begin.
    """
    missing = {key: case for case in cases if not files.has(key := case.key())}
    for done, (key, result) in enumerate(_played(missing, jobs, until), 1):
        files.put(key, result)
        show(done, len(missing), missing[key], result["wall_s"])


def _played(
    cases: dict[str, Case], jobs: int, until: Callable[[], bool]
) -> Iterator[tuple[str, Result]]:
    # Spawned, not forked: a fork would copy threads. The pool ends its processes with the block.
    waiting = iter(cases.items())
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        playing: dict[Future[Result], str] = {}
        try:
            while True:
                while len(playing) < jobs and not until() and (one := next(waiting, None)):
                    playing[pool.submit(play, one[1])] = one[0]
                if not playing:
                    return
                for future in wait(playing, return_when=FIRST_COMPLETED).done:
                    yield playing.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
