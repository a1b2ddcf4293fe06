"""Runs beside each other leave nothing behind (their results: tests/mesh/cli/test_sim.py)."""

import multiprocessing
import os
import time

import pytest

from mesh.sim.study.run_cells import RunFailed, play_all
from mesh.sim.study.settings import SimSettings
from tests.mesh.sim.study.small import settings


def test_an_error_of_a_child_is_raised_in_the_parent() -> None:
    given = SimSettings.model_validate(
        {"workload": "tot", "load": "0.5,0.7", "regions": ("us=1,eu=1,ap=1",)}
    )
    with pytest.raises(ValueError, match="closed loop"):
        list(play_all(given, given.cells(), jobs=2, perf=time.perf_counter, show=print))
    assert multiprocessing.active_children() == []


def killed() -> float:
    """A clock whose process is gone when it is read, as one that ran out of memory."""
    os._exit(9)


def test_a_process_that_dies_is_a_failed_run() -> None:
    given = settings(topology="mesh,central:us")
    runs = play_all(given, given.cells(), jobs=2, perf=killed, show=lambda *progress: None)
    with pytest.raises(RunFailed, match="use fewer --jobs"):
        list(runs)
    assert multiprocessing.active_children() == []


def test_who_stops_listening_ends_what_runs() -> None:
    class Interrupted(Exception):
        """As Ctrl-C would be, in the midst of runs that take minutes."""

    def stop(number: int, ended: int, share: float) -> None:
        assert multiprocessing.active_children() != []
        raise Interrupted

    given = SimSettings.model_validate(
        {"workload": "chat", "duration_s": 3600, "policy": "round-robin,least-load"}
    )
    with pytest.raises(Interrupted):
        list(play_all(given, given.cells(), jobs=2, perf=time.perf_counter, show=stop))
    assert multiprocessing.active_children() == []
