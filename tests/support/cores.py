"""Cores for processes that a test starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """This process, and those that it starts meanwhile, run on these cores; on all if none."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
