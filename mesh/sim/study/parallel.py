"""Running cells: one after the other here, or several at a time, each in a process of its own.

A process a run, told by its scenario and cell alone: workloads hold generators, which can't be
sent, and a fresh process gives its memory back. A child speaks through its pipe and ends by
itself when nobody listens any more, so nothing is left behind by a parent that was killed.

Rejected: a process pool. It can't tell progress without a second channel and a thread.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from mesh.sim.study.cells import Cell, Played, play
from mesh.sim.study.scenario import Scenario

Clock = Callable[[], float]
Show = Callable[[int, int, float], None]  # which cell, requests ended, share of its run done


class RunFailed(Exception):
    """A run ended without a result; the message says why."""


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    process: BaseProcess
    pipe: Connection


def play_all(
    scenario: Scenario, cells: Sequence[Cell], *, jobs: int, perf: Clock, show: Show
) -> Iterator[tuple[int, Played]]:
    """Each cell's number and result, as they are done. Raises ValueError or RunFailed.

    Closing the iterator ends what runs.
    """
    if jobs == 1 or len(cells) == 1:
        for number, cell in enumerate(cells):
            yield number, _play_here(scenario, number, cell, perf, show)
        return
    yield from _play_beside(scenario, cells, jobs, perf, show)


def _play_here(scenario: Scenario, number: int, cell: Cell, perf: Clock, show: Show) -> Played:
    def progress(ended: int, share: float) -> None:
        show(number, ended, share)

    return play(scenario, cell, perf=perf, progress=progress)


def _play_beside(
    scenario: Scenario, cells: Sequence[Cell], jobs: int, perf: Clock, show: Show
) -> Iterator[tuple[int, Played]]:
    waiting = list(enumerate(cells))[::-1]
    running: list[_Job] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, cell = waiting.pop()
                running.append(_start(scenario, number, cell, perf))
            ready = wait([job.pipe for job in running])
            for job in [job for job in running if job.pipe in ready]:
                played = _hear(job, show)
                if played is not None:
                    running.remove(job)
                    _end(job)
                    yield job.number, played
    finally:
        for job in running:
            job.process.terminate()
            _end(job)


def _start(scenario: Scenario, number: int, cell: Cell, perf: Clock) -> _Job:
    context = multiprocessing.get_context("spawn")  # fork would copy a process with threads
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, scenario, cell, perf), daemon=True)
    process.start()
    there.close()
    return _Job(number, process, here)


def _hear(job: _Job, show: Show) -> Played | None:
    try:
        said = job.pipe.recv()
    except EOFError as error:
        job.process.join()
        raise RunFailed(
            f"run {job.number + 1} ended with status {job.process.exitcode}: "
            "if memory was short, use fewer --jobs"
        ) from error
    if isinstance(said, Played):
        return said
    if isinstance(said, ValueError):
        raise said
    ended, share = said
    show(job.number, ended, share)
    return None


def _end(job: _Job) -> None:
    job.process.join()
    job.process.close()
    job.pipe.close()


def _child(pipe: Connection, scenario: Scenario, cell: Cell, perf: Clock) -> None:
    def progress(ended: int, share: float) -> None:
        pipe.send((ended, share))

    try:
        pipe.send(play(scenario, cell, perf=perf, progress=progress))
    except ValueError as error:
        pipe.send(ValueError(str(error)))
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # nobody wants to know any more
