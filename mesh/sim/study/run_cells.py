"""Running a study's cells one after the other here, or several at a time in processes.

A worker process is given its scenario and cell alone, because a workload's generators can't be
pickled. It reports progress through a queue, and ends when this process closes its end of a pipe
or dies.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from threading import Thread

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from mesh.sim.study.cells import Cell, CellResult, play
from mesh.sim.study.scenario import Scenario

UPDATE_EVERY_S = 0.1

PerfClock = Callable[[], float]
ShowProgress = Callable[[int, int, float], None]  # which cell, requests ended, share of its run
ProgressQueue = SimpleQueue[tuple[int, int, float]]

_progress: ProgressQueue  # of a worker process


class RunFailed(Exception):
    """A run ended without a result; the message says why."""


def play_all(
    scenario: Scenario, cells: Sequence[Cell], *, jobs: int, perf: PerfClock, show: ShowProgress
) -> Iterator[tuple[int, CellResult]]:
    """Each cell's number and result, as they are done. Raises ValueError or RunFailed.

    Closing the iterator ends the runs that are not done.
    """
    if jobs > 1 and len(cells) > 1:
        yield from _play_in_processes(scenario, cells, jobs, perf, show)
        return
    for number, cell in enumerate(cells):
        yield number, play(scenario, cell, perf=perf, progress=partial(show, number))


def _play_in_processes(
    scenario: Scenario, cells: Sequence[Cell], jobs: int, perf: PerfClock, show: ShowProgress
) -> Iterator[tuple[int, CellResult]]:
    context = multiprocessing.get_context("spawn")  # fork would copy a process with threads
    progress: ProgressQueue = context.SimpleQueue()
    parent_end, own_end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, context, _start_worker, (progress, parent_end))
    running = {
        pool.submit(_play_in_worker, scenario, number, cell, perf): number
        for number, cell in enumerate(cells)
    }
    try:
        while running:
            done, _ = wait(running, UPDATE_EVERY_S, return_when=FIRST_COMPLETED)
            while not progress.empty():
                show(*progress.get())
            for future in done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise RunFailed(
            "a run's process ended without a result: if memory was short, use fewer --jobs"
        ) from error
    finally:
        if running:
            own_end.close()  # the workers exit at once
        pool.shutdown(cancel_futures=True)
        for end in (own_end, parent_end, progress):
            end.close()


def _start_worker(progress: ProgressQueue, parent_end: Connection) -> None:
    global _progress
    _progress = progress
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    Thread(target=_exit_with_parent, args=(parent_end,), daemon=True).start()


def _exit_with_parent(parent_end: Connection) -> None:
    parent_end.poll(None)  # readable when the other end is closed; nothing is ever sent
    os._exit(1)


def _play_in_worker(scenario: Scenario, number: int, cell: Cell, perf: PerfClock) -> CellResult:
    def progress(ended: int, share: float) -> None:
        _progress.put((number, ended, share))

    try:
        return play(scenario, cell, perf=perf, progress=progress)
    except ValueError as error:
        raise ValueError(str(error)) from None  # some subclasses can't be pickled


@contextmanager
def progress_bar(runs: int, console: Console) -> Iterator[ShowProgress]:
    """One bar over all runs on a terminal, nothing anywhere else."""
    shares, requests = [0.0] * runs, [0] * runs
    bar = Progress(
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    row = bar.add_task("", total=float(runs))

    def show(run: int, ended: int, share: float) -> None:
        shares[run], requests[run] = share, ended
        done = sum(share >= 1.0 for share in shares)
        text = f"{sum(requests)} requests, {done} of {runs} runs"
        bar.update(row, completed=sum(shares), description=text)

    with bar:
        yield show
