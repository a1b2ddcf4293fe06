"""Ports on which nobody listens, for servers of tests.

A port is free only until somebody binds it, and two processes of one test run that look at the
same moment find the same one. So each process of a run has a stretch of its own, goes through it
once before it gives a port again, and begins anywhere, so that two runs seldom meet.
"""

import contextlib
import os
import random
import socket

# Below the range that the kernel hands out for outgoing connections.
PORTS = range(20_000, 32_000)


def stretch(worker: str | None, workers: int) -> range:
    """What one of a test run's processes may give: worker `gw3` of 4 the last quarter. One that
    replaces a worker that ended, as `gw4`, shares another's."""
    workers = max(workers, 1)
    number = int(worker.removeprefix("gw")) % workers if worker else 0
    size = len(PORTS) // workers
    return PORTS[number * size : (number + 1) * size]


class Stretch:
    """Free ports of one stretch, in turn."""

    def __init__(self, own: range, at: int) -> None:
        self._own, self._at = own, at

    def row(self, count: int) -> range:
        """So many ports in a row on which nobody listens."""
        for _ in self._own:
            if self._at + count > len(self._own):
                self._at = 0
            row = self._own[self._at : self._at + count]
            self._at += count
            with contextlib.ExitStack() as held, contextlib.suppress(OSError):
                for port in row:
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
                return row
        raise AssertionError(f"not {count} free ports in a row in {self._own}")


_own = stretch(
    os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
)
_stretch = Stretch(_own, random.randrange(len(_own)))


def free_row(count: int) -> range:
    """So many ports in a row on which nobody listens."""
    return _stretch.row(count)


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens, all different."""
    return [free_row(1)[0] for _ in range(count)]
