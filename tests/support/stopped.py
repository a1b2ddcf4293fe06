"""A process that stands still for a while, as on a machine that swaps or in a debugger."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.until import until


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """All its threads stand still: the signal has been sent before they do."""
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: _states(pid) == {"T"})
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> set[str]:
    """Empty while threads come and go."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    try:
        return {task.read_text().rpartition(")")[2].split()[0] for task in tasks}
    except OSError:
        return set()
