"""One router as several processes: a parent that forks workers, restarts and stops them.

The parent serves no requests. Because it forks, its workers start with everything loaded and every
option checked, and an error in those is reported once. For the same reason the first worker starts
alone and the others once it serves. A worker that dies later is restarted, after waits that grow
to 8 s and without limit, also when the machine has no room for a process; a worker that ends
before it ever served stops the whole router.

Each worker holds one end of two pipes: by one it reports that it serves and, again and again, what
it does; by the other the parent requests a stop with one byte each; its end of file is the parent's
death, which also stops the worker. Under systemd with a watchdog, a worker that stops reporting is
killed and restarted, as systemd does with the parent. A stop that comes both as a signal and by the
pipe, because a terminal or a service manager signals the whole process group, counts once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from infra.address import Address
from infra.reloads import Reloads
from infra.service_manager import NO_SERVICE_MANAGER, ServiceManager, StatusReporter
from mesh.supervisor.supervisor import SupervisedProcess, how_it_ended

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
HANDLED_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD)
FORK_SIGNALS = (*HANDLED_SIGNALS, signal.SIGHUP)
FAILED = 1
STOP = b"s"  # once: drain; twice: leave at once
READY, STOPPING = "serving", "draining"
REPORT_BYTES_MAX = 4096  # a pipe takes so many at once or none
CLOSED = -1


class WorkerControl(StatusReporter):
    """A worker's ends of the pipes."""

    def __init__(self, stops: int, reports: int, every_s: float) -> None:
        self._stops, self._reports = stops, reports
        self.every_s = every_s
        os.set_blocking(reports, False)

    def report_ready(self) -> None:
        self.report(READY)

    def report_reloading(self) -> None:
        """The parent reports it for all of us."""

    def report_stopping(self) -> None:
        self.report(STOPPING)

    def report(self, status: str) -> None:
        line = f"{' '.join(status.split())}\n".encode()
        with contextlib.suppress(OSError):  # a parent that hangs reads nothing, a dead one neither
            os.write(self._reports, line[-REPORT_BYTES_MAX:])

    def on_stop(self, callback: Callable[[int], None]) -> None:
        """Call back on the running loop with the number of stops requested so far."""
        loop = asyncio.get_running_loop()
        stops = 0

        def read() -> None:
            nonlocal stops
            received = os.read(self._stops, 16)
            stops = stops + len(received) if received else max(stops, 1)
            if not received:  # the parent is gone
                loop.remove_reader(self._stops)
            callback(stops)

        loop.add_reader(self._stops, read)


WorkerMain = Callable[[int, WorkerControl], int]


async def _nothing_to_read() -> bool:
    return False


def run_workers(
    names: Sequence[str],
    main: WorkerMain,
    manager: ServiceManager = NO_SERVICE_MANAGER,
    read_again: Callable[[], Awaitable[bool]] = _nothing_to_read,
) -> int:
    """Run a worker per name until SIGTERM or SIGINT; the status to exit with.

    `main` is called in each worker's process with its number and returns its exit status. Ours is 0
    if all drained and left, else that of the first worker that failed to start or to stop.
    `manager` learns that we serve once the first worker does. `read_again` is awaited in the parent
    after SIGHUP: if it is true, the workers get the signal too. Workers start with it blocked.
    """
    return asyncio.run(_WorkerGroup(names, main, manager, read_again).run())


class _WorkerGroup:
    """The parent's side of all workers."""

    def __init__(
        self,
        names: Sequence[str],
        main: WorkerMain,
        manager: ServiceManager,
        read_again: Callable[[], Awaitable[bool]],
    ) -> None:
        self._read_again = read_again
        self.workers = [_ForkedWorker(number, name, self) for number, name in enumerate(names)]
        self.main = main
        self.manager = manager
        self.is_stopping = False
        self._tasks = asyncio.TaskGroup()
        self._besides: list[asyncio.Task[None]] = []
        self._status = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        self._besides.append(asyncio.create_task(self.manager.keep_reporting(self._examine)))
        try:
            async with self._tasks:
                self._tasks.create_task(self.workers[0].supervise())
        finally:
            for task in self._besides:
                task.cancel()
        return self._status

    async def _reload(self) -> None:
        if await self._read_again():
            for worker in self.workers:
                worker.send(signal.SIGHUP)

    def _examine(self) -> str:
        """What the workers do, in one line; those that hang are killed."""
        if self.manager.watchdog_s is not None:
            for worker in self.workers:
                worker.kill_if_silent(self.manager.watchdog_s)
        return "; ".join(worker.status for worker in self.workers)

    def first_serves(self) -> None:
        """The first worker is ready for the first time: all that workers need is right."""
        self.manager.report_ready()
        reloads = Reloads(self._reload, self.manager)  # SIGHUP is blocked until now
        self._besides.append(asyncio.create_task(reloads.run()))
        for worker in self.workers[1:]:
            self._tasks.create_task(worker.supervise())

    def worker_ended(self, worker: "_ForkedWorker", code: int) -> None:
        """One ended, and is not restarted."""
        status = 128 - code if code < 0 else code
        if not self.is_stopping:
            self._status = status or FAILED
            self._stop()
        elif worker.lifecycle.was_ready or code >= 0:  # else it had no requests to finish
            self._status = self._status or status

    def _stop(self) -> None:
        if not self.is_stopping:
            self.manager.report_stopping()
        self.is_stopping = True
        for worker in self.workers:
            worker.stop()

    def _reap(self) -> None:
        for worker in self.workers:
            worker.reap()


class _ForkedWorker(SupervisedProcess):
    """The parent's side of one worker."""

    def __init__(self, number: int, name: str, group: _WorkerGroup) -> None:
        super().__init__(restarts_max=None)  # a service restarts without limit
        self._number, self._name, self._group = number, name, group
        self._stops = CLOSED  # we write
        self._reports = CLOSED  # we read
        self._reported = ""  # its last line
        self._reported_at = 0.0
        self._exit_code: asyncio.Future[int]

    @property
    def status(self) -> str:
        """What it does, in a few words."""
        return f"{self._name}: {self._reported or self.lifecycle.phase.name.lower()}"

    def kill_if_silent(self, limit_s: float) -> None:
        """Kill the process if it served and has reported nothing for so long: it hangs."""
        silent_s = asyncio.get_running_loop().time() - self._reported_at
        if self.pid is not None and self._reported and silent_s > limit_s:
            log.error("worker %s hangs: it reported nothing for %.0f s", self._name, silent_s)
            os.kill(self.pid, signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """If the process runs."""
        if self.pid is not None and not self._exit_code.done():
            os.kill(self.pid, number)

    async def _run_once(self) -> int:
        self._exit_code = asyncio.get_running_loop().create_future()
        try:
            self._fork()
            return await self._exit_code
        finally:
            self._stop_reading()
            _close(self._stops)
            self._stops = CLOSED

    def reap(self) -> None:
        """If the process has ended, take its exit code."""
        if self.pid is None or self._exit_code.done():
            return
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            if self._reports != CLOSED:  # it may have served for a moment
                self._read_report()
            self._exit_code.set_result(os.waitstatus_to_exitcode(status))

    def close_pipes(self) -> None:
        """Of a new worker: a pipe that its siblings hold would never end."""
        _close(self._stops, self._reports)

    def _fork(self) -> None:
        stops_read = reports_write = CLOSED
        self._reported = ""
        try:
            stops_read, self._stops = os.pipe()
            self._reports, reports_write = os.pipe()
            _flush()
            # The parent's handlers must not run in the worker.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, FORK_SIGNALS)
            try:
                pid = os.fork()
                if pid == 0:
                    every_s = self._group.manager.every_s
                    self._become_worker(WorkerControl(stops_read, reports_write, every_s))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        finally:
            _close(stops_read, reports_write)
        asyncio.get_running_loop().add_reader(self._reports, self._read_report)
        self._has_pid(pid)

    def _become_worker(self, control: WorkerControl) -> NoReturn:
        """The worker's process, from its first moment to its last."""
        status = FAILED
        try:
            signal.set_wakeup_fd(-1)
            for number in FORK_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            for worker in self._group.workers:
                worker.close_pipes()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
            status = self._group.main(self._number, control)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else FAILED
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                _flush()
            os._exit(status)

    def _read_report(self) -> None:
        lines = os.read(self._reports, REPORT_BYTES_MAX).decode(errors="replace").splitlines()
        if not lines:  # it has ended
            self._stop_reading()
            return
        self._reported, self._reported_at = lines[-1], asyncio.get_running_loop().time()
        if not self.lifecycle.became_ready() and self._number == 0:
            self._group.first_serves()

    def _stop_reading(self) -> None:
        if self._reports != CLOSED:
            asyncio.get_running_loop().remove_reader(self._reports)
            _close(self._reports)
            self._reports = CLOSED

    def _request_end(self) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            os.write(self._stops, STOP)

    def _died(self, end: int | OSError, restart_in_s: float | None) -> None:
        if isinstance(end, OSError):
            then = "" if restart_in_s is None else f"; trying again in {restart_in_s:g} s"
            log.error("can't start worker %s (%s)%s", self._name, end.strerror or end, then)
        elif restart_in_s is not None:
            how = how_it_ended(end).removeprefix("was ")
            log.error("worker %s %s; it starts again in %g s", self._name, how, restart_in_s)
        if restart_in_s is None:
            self._group.worker_ended(self, FAILED if isinstance(end, OSError) else end)


def reserve_port(where: Address) -> socket.socket:
    """Hold the address that workers will share; close it to let it go. Raises OSError.

    No other process may listen there: by SO_REUSEPORT alone, two routers could share it by mistake.
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


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor != CLOSED:
            os.close(descriptor)


def _flush() -> None:
    """Buffered output would otherwise be printed by both processes, or be lost."""
    sys.stdout.flush()
    sys.stderr.flush()
