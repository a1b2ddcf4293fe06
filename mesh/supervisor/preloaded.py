"""Python programs as forks of one process that has imported them all.

A mesh on one machine runs some thirty Python processes. Each would import the same modules, 0.7 s
of a core and 40 MB; a fork starts in milliseconds and shares that memory until it writes to it. The
preloaded process has one thread and no event loop, opens nothing and serves nobody: it reads what
to fork from a socket whose other end the supervisor holds, and reports which of its children ended.
Its children die with it, and it dies with the supervisor (`parent_death`).
"""

import asyncio
import contextlib
import errno
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from mesh.supervisor import parent_death
from mesh.supervisor.program import Program

logger = logging.getLogger(__name__)

FORKED_WITHIN_S = 60.0  # with all its imports, on a machine that has other work
MESSAGE_BYTES_MAX = 65536  # a command line and the environment that a program adds to ours


class ForkedProcess:
    """The supervisor's side of one fork; what it needs of an `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await self.exit_code

    def terminate(self) -> None:
        if not self.exit_code.done():
            os.kill(self.pid, signal.SIGTERM)


class PreloadedPrograms:
    """The supervisor's side of the preloaded process, which starts with `start` or `fork`."""

    def __init__(self, modules: Sequence[str], log: Path) -> None:
        """`modules`: what it imports; `log`: what it prints, which is nothing if all is well."""
        self._modules = modules
        self._log = log
        self._socket: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._is_closing = False
        self._reading: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        # Of the fork that was asked for last.
        self._started: asyncio.Future[ForkedProcess] | None = None
        self._running: dict[int, ForkedProcess] = {}

    async def fork(self, program: Program, log: int) -> ForkedProcess:
        """Run a program, `python -m MODULE …`, which writes to that open file.

        Raises OSError if it can't be forked. A preloaded process that does not fork for so long
        hangs: it is killed, with all that it forked, and the next fork starts another.
        """
        _, _, module, *arguments = program.command
        message = orjson.dumps([program.name, module, arguments, dict(program.environment)])
        if len(message) > MESSAGE_BYTES_MAX:
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
        async with self._one_at_a_time:
            running = await self._running_socket()
            try:
                socket.send_fds(running, [message], [log])
            except OSError as error:
                raise self._ended() from error
            self._started = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._started], timeout=FORKED_WITHIN_S)
            if not self._started.done():
                logger.error("the preloaded process forks nothing for %g s", FORKED_WITHIN_S)
                self._kill()
            return await self._started

    async def start(self) -> None:
        """Have it import while the caller does something else. Raises OSError."""
        async with self._one_at_a_time:
            await self._running_socket()

    async def _running_socket(self) -> socket.socket:
        if self._socket is None:
            if self._reading is not None:
                await self._reading
            self._socket = await self._start()
        return self._socket

    async def close(self) -> None:
        """End the preloaded process; what still runs of its children dies."""
        self._is_closing = True
        self._kill()
        if self._reading is not None:
            await self._reading

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # whatever it does, it holds nothing

    async def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, self._log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-I",
                    "-S",
                    parent_death.__file__,
                    str(os.getpid()),
                    sys.executable,
                    "-u",  # a log shows what a process printed before it died
                    "-m",
                    __name__,
                    str(theirs.fileno()),
                    *self._modules,
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        self._process = process
        self._reading = asyncio.create_task(self._read(ours, process))
        return ours

    async def _read(self, reports: socket.socket, process: asyncio.subprocess.Process) -> None:
        """Until the preloaded process has ended, and with it all that it forked."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while message := await loop.sock_recv(reports, MESSAGE_BYTES_MAX):
                self._report(*orjson.loads(message))
        reports.close()
        self._socket = None  # the next fork starts another
        if self._started is not None and not self._started.done():
            self._started.set_exception(self._ended())
        status = await process.wait()
        if not self._is_closing:
            logger.error(
                "the preloaded process ended (%d), and all it forked: %s", status, self._log
            )
        for forked in self._running.values():
            forked.exit_code.set_result(-signal.SIGKILL)
        self._running.clear()

    def _ended(self) -> OSError:
        return OSError(f"the preloaded process ended, see {self._log}")

    def _report(self, pid: int, status: int | None) -> None:
        """A process was forked (no status), could not be (pid 0, the error), or has ended."""
        assert self._started is not None, "a report without a fork"
        if status is None:
            self._running[pid] = ForkedProcess(pid)
            self._started.set_result(self._running[pid])
        elif pid == 0:
            self._started.set_exception(OSError(status, os.strerror(status)))
        else:
            self._running.pop(pid).exit_code.set_result(status)


def serve(control: socket.socket, modules: Sequence[str]) -> None:
    """The preloaded process: fork what is asked for until the supervisor is gone.

    Returns in each forked process too, where its program has ended.
    """
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to all that is shared, and so copy it
    ended, ended_write = os.pipe()
    os.set_blocking(ended_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended_write)
    while True:
        readable, _, _ = select.select([control.fileno(), ended], [], [])
        if ended in readable:
            os.read(ended, 4096)
            for pid, status in _ended_children():
                control.sendall(orjson.dumps([pid, status]))
        if control.fileno() in readable:
            message, logs, *_ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 1)
            if not message:
                return  # and the kernel kills our children
            [log] = logs
            parent = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                control.sendall(orjson.dumps([0, error.errno]))
            else:
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    control.close()
                    os.close(ended)
                    os.close(ended_write)
                    _become(*orjson.loads(message), parent=parent, log=log)
                    return
                with contextlib.suppress(OSError):  # it has ended
                    os.setpgid(pid, pid)  # before anyone knows it: it is killed as a group
                control.sendall(orjson.dumps([pid, None]))
            os.close(log)


def _ended_children() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _become(
    name: str, module: str, arguments: list[str], added: dict[str, str], *, parent: int, log: int
) -> None:
    """Run a program in this fork, as if the interpreter had been started with it."""
    parent_death.die_with(parent, name)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    os.environ.update(added)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
