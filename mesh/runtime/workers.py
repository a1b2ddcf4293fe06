"""One router as several processes: a parent that forks them, passes stops on, and starts them anew.

The parent serves nobody and runs no event loop, so it can fork at any time and its children begin
with everything loaded and every option checked: what is wrong with those was said once. The first
worker starts alone for the same reason; once it serves, the others follow. A worker that dies
later is started again, after waits that grow to 8 s and for as long as it takes, also while the
machine has no room for a process; one that never served ends the whole.

Each worker holds one end of a pipe. A byte is a stop to pass on, and the end of the pipe is the
end of the parent, after which nobody would end the worker. A stop that comes both ways, because a
terminal or a service manager tells every process of a group, is one stop.

Rejected: a command for each (secrets and options would be read and complained of once more for
each), and `multiprocessing` (a process of its own to keep track of what none of ours uses).
"""

import asyncio
import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from infra.address import Address
from infra.restarts import Restarts

log = logging.getLogger(__name__)

STOPS = (signal.SIGTERM, signal.SIGINT)
HEARD = (*STOPS, signal.SIGCHLD)
FAILED = 1
STOP = b"s"  # once: drain; twice: leave at once


class Orders:
    """A worker's end of the pipes: it says that it serves, and hears when to stop."""

    def __init__(self, heard: int, ready: int) -> None:
        self._heard, self._ready = heard, ready

    def say_ready(self) -> None:
        """This worker serves."""
        os.write(self._ready, b"r")

    def listen(self, on_stop: Callable[[int], None]) -> None:
        """Call `on_stop` on the running loop with how many stops have been passed on so far."""
        loop = asyncio.get_running_loop()
        stops = 0

        def hear() -> None:
            nonlocal stops
            said = os.read(self._heard, 16)
            stops = stops + len(said) if said else max(stops, 1)
            if not said:  # the parent is gone
                loop.remove_reader(self._heard)
            on_stop(stops)

        loop.add_reader(self._heard, hear)


Work = Callable[[int, Orders], int]


@dataclass(slots=True)
class _Worker:
    """What the parent knows of one worker."""

    number: int
    name: str
    due: float | None = None  # when it is to be started
    pid: int | None = None
    orders: int = -1  # we write
    ready: int = -1  # we read
    started_at: float = 0.0
    served: bool = False  # at any time
    restarts: Restarts = field(default_factory=lambda: Restarts(most=None))


class Workers:
    """The parent. `run` once."""

    def __init__(self, names: Sequence[str], work: Work) -> None:
        """`work` is called in each worker's process, with its number; it returns its status."""
        self._workers = [_Worker(number, name) for number, name in enumerate(names)]
        self._work = work
        self._selector = selectors.DefaultSelector()
        self._stops = 0
        self._status = 0

    def run(self) -> int:
        """Run them until SIGTERM or SIGINT, and return the status to end with.

        0 if all drained and left; that of a worker which could not begin, or failed at the end.
        """
        self._workers[0].due = time.monotonic()
        with _hearing() as signals:
            self._selector.register(signals, selectors.EVENT_READ, None)
            while True:
                self._start_due()
                if not any(worker.pid or worker.due is not None for worker in self._workers):
                    return self._status
                self._wait(signals)

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.due is not None and worker.due <= now:
                self._start(worker)

    def _wait(self, signals: socket.socket) -> None:
        dues = [worker.due for worker in self._workers if worker.due is not None]
        wait_s = max(0.0, min(dues) - time.monotonic()) if dues else None
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                for number in signals.recv(4096):
                    if number in STOPS:
                        self._stop()
            else:
                self._hear(key.data)
        for worker in self._workers:
            self._reap(worker)

    def _start(self, worker: _Worker) -> None:
        worker.due = None
        orders_read = ready_write = -1
        try:
            orders_read, worker.orders = os.pipe()
            worker.ready, ready_write = os.pipe()
            self._selector.register(worker.ready, selectors.EVENT_READ, worker)
            worker.pid = self._fork(worker.number, Orders(orders_read, ready_write))
            worker.started_at = time.monotonic()
        except OSError as error:
            self._not_started(worker, error.strerror or str(error))
        finally:
            _close(orders_read, ready_write)

    def _fork(self, number: int, orders: Orders) -> int:
        _flush()
        # A signal in between would be heard by handlers that are the parent's.
        signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        try:
            pid = os.fork()
            if pid == 0:
                self._become(number, orders)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)

    def _not_started(self, worker: _Worker, why: str) -> None:
        """The machine has no room for it just now."""
        with contextlib.suppress(KeyError, ValueError):  # it did not come to that
            self._selector.unregister(worker.ready)
        _close(worker.orders, worker.ready)
        worker.orders, worker.ready = -1, -1
        wait_s = worker.restarts.after_death(0.0, was_ready=worker.served)
        if wait_s is None:
            log.error("can't start worker %s (%s)", worker.name, why)
            self._status = FAILED
            self._stop()
            return
        log.error("can't start worker %s (%s); trying again in %g s", worker.name, why, wait_s)
        worker.due = time.monotonic() + wait_s

    def _become(self, number: int, orders: Orders) -> NoReturn:
        """The worker's process, from its first moment to its last."""
        status = FAILED
        try:
            signal.set_wakeup_fd(-1)
            for each in HEARD:
                signal.signal(each, signal.SIG_DFL)
            self._selector.close()
            for worker in self._workers:  # a pipe that its siblings hold would never end
                _close(worker.orders, worker.ready)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
            status = self._work(number, orders)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else FAILED
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                _flush()
            os._exit(status)

    def _hear(self, worker: _Worker) -> None:
        """A worker says that it serves, or its pipe has ended with it."""
        self._selector.unregister(worker.ready)
        if not os.read(worker.ready, 1):
            return
        worker.served = True
        if not self._stops:
            for other in self._workers:  # once one serves, all that it needs is right
                if other.pid is None and other.due is None:
                    other.due = time.monotonic()

    def _reap(self, worker: _Worker) -> None:
        if worker.pid is None:
            return
        pid, ended = os.waitpid(worker.pid, os.WNOHANG)
        if pid == 0:
            return
        if worker.ready in self._selector.get_map():
            self._hear(worker)
        _close(worker.orders, worker.ready)
        worker.pid, worker.orders, worker.ready = None, -1, -1
        self._ended(worker, os.waitstatus_to_exitcode(ended))

    def _ended(self, worker: _Worker, code: int) -> None:
        status = 128 - code if code < 0 else code
        if self._stops:
            if worker.served or code >= 0:  # one that had not begun has nothing to lose
                self._status = self._status or status
            return
        ran_s = time.monotonic() - worker.started_at
        wait_s = worker.restarts.after_death(ran_s, was_ready=worker.served)
        if wait_s is None:
            self._status = status or FAILED
            self._stop()
            return
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        log.error("worker %s ended %s; it starts again in %g s", worker.name, how, wait_s)
        worker.due = time.monotonic() + wait_s

    def _stop(self) -> None:
        self._stops += 1
        for worker in self._workers:
            worker.due = None
            if worker.pid is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    os.write(worker.orders, STOP)


def reserve(where: Address) -> socket.socket:
    """Hold the address that workers will share; close it to let it go. Raises OSError.

    It must be nobody's first: with SO_REUSEPORT alone, two routers would share one port by mistake.
    """
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as alone:
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        alone.bind(where)
        alone.listen(1)
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(where)
    except OSError:
        held.close()
        raise
    return held


@contextlib.contextmanager
def _hearing() -> Iterator[socket.socket]:
    """Signals as bytes to read: no handler runs in the middle of anything."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    before = {number: signal.signal(number, _ignore) for number in HEARD}
    woken = signal.set_wakeup_fd(writer.fileno())
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def _ignore(number: int, frame: object) -> None:
    """It is read from the socket."""


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _flush() -> None:
    """What was printed must neither be printed twice nor be lost."""
    sys.stdout.flush()
    sys.stderr.flush()
