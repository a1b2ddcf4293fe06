"""Keeps processes running: starts them, restarts those that die, and stops them all.

`SupervisedProcess` drives the states of `lifecycle` with asyncio, for commands (here) and for
forked workers (`forked_workers`). `Supervisor` is an async context manager over the programs of
`mesh up`: when its block ends, normally or by an exception, every program is stopped, kind by
kind (see `ProgramKind`), and killed with its process group if it is not gone within its grace.
If the supervisor itself is killed, `parent_death` makes the kernel kill the programs.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mesh.supervisor import parent_death
from mesh.supervisor.lifecycle import RESTARTS_MAX, ProcessLifecycle, ProcessPhase
from mesh.supervisor.preloaded import ForkedProcess, PreloadedPrograms
from mesh.supervisor.program import Program, ProgramKind, wait_until_ready

logger = logging.getLogger(__name__)

# Time in which neither a stopped program nor we wait for a core (`_until_ended`), so that
# on a busy machine idle programs end by themselves. Routers and agents are given less to drain
# (mesh.demo.commands).
GRACE_S = {
    ProgramKind.BATCH_RUNNER: 20.0,
    ProgramKind.ROUTER: 20.0,
    ProgramKind.AGENT: 15.0,
    ProgramKind.ENGINE: 15.0,
    ProgramKind.NATS: 15.0,
}
KILLED_WITHIN_S = 5.0
CHECK_S = 0.25
PROGRAMS_MAX = 512
TAIL_BYTES = 8192
TAIL_LINES = 12


class SupervisedProcess(ABC):
    """One process, kept running by `supervise` until `stop`."""

    def __init__(self, restarts_max: int | None = RESTARTS_MAX) -> None:
        self.pid: int | None = None
        self.lifecycle = ProcessLifecycle(restarts_max)
        self._stop_requested = asyncio.Event()

    @abstractmethod
    async def _run_once(self) -> int:
        """Start the process, wait for its end and return its exit code. Raises OSError."""

    @abstractmethod
    def _died(self, end: int | OSError, restart_in_s: float | None) -> None:
        """It ended with that exit code, or could not be started."""

    @abstractmethod
    def _request_end(self) -> None:
        """Request that the running process ends."""

    @property
    def is_stopping(self) -> bool:
        return self._stop_requested.is_set()

    async def supervise(self) -> None:
        """Run the process until it is stopped or not restarted any more."""
        now = asyncio.get_running_loop().time
        while self.lifecycle.phase is ProcessPhase.WAITING:
            self.lifecycle.started(now())
            try:
                end: int | OSError = await self._run_once()
            except OSError as error:
                end = error
            self.pid = None
            restart_in_s = self.lifecycle.ended(now())
            self._died(end, restart_in_s)
            if restart_in_s is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(restart_in_s):
                        await self._stop_requested.wait()

    def stop(self, grace_s: float | None = None) -> None:
        """End it for good; it is due to be killed after `grace_s`."""
        self.lifecycle.stop(asyncio.get_running_loop().time(), grace_s)
        self._stop_requested.set()
        if self.pid is not None:
            self._request_end()

    def _has_pid(self, pid: int) -> None:
        """Of `_run_once`: the process has been started."""
        self.pid = pid
        if self.is_stopping:  # since it was being started
            self._request_end()


@dataclass(frozen=True, slots=True)
class ProgramReady:
    """A program became ready, for the first time or again."""

    program: Program
    again: bool


@dataclass(frozen=True, slots=True)
class ProgramDied:
    """A program ended by itself."""

    program: Program
    how: str
    log: Path
    tail: str  # the last lines of its log, unless it was killed
    restart_in_s: float | None  # None: it is not restarted


ReportEvent = Callable[[ProgramReady | ProgramDied], None]


class ProgramFailed(RuntimeError):
    """A program ended before it was ready; `death` says how and shows its log."""

    def __init__(self, death: ProgramDied) -> None:
        super().__init__(f"{death.program.name} {death.how}")
        self.death = death


class SupervisedProgram(SupervisedProcess):
    """A command in a session of its own, which writes to a log.

    Ctrl-C in a terminal therefore reaches the supervisor alone, which decides what ends first.
    """

    def __init__(
        self, program: Program, log: Path, preloaded: PreloadedPrograms, report: ReportEvent
    ) -> None:
        super().__init__()
        self.program = program  # what the next start runs
        self._preloaded = preloaded
        self._log = log
        self._log_from = 0  # where the latest process began to write
        self._process: Process | ForkedProcess | None = None
        self._report = report
        self._settled = asyncio.Event()  # ready, or not restarted
        self._death: ProgramDied | None = None

    async def wait_ready(self) -> None:
        """Return when it has become ready once. Raises ProgramFailed if it ended instead."""
        await self._settled.wait()
        if not self.lifecycle.was_ready and self._death is not None:
            raise ProgramFailed(self._death)

    async def _run_once(self) -> int:
        self.program.ready.reset()
        self._process = process = await self._spawn()
        self._has_pid(process.pid)
        probing = asyncio.create_task(self._probe())
        try:
            return await process.wait()
        finally:
            self._process = None
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _spawn(self) -> Process | ForkedProcess:
        program = self.program
        with self._log.open("ab") as log:
            self._log_from = log.tell()
            if program.preloaded:
                return await self._preloaded.fork(program, log.fileno())
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                parent_death.__file__,
                str(os.getpid()),
                *program.command,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                cwd=program.folder,
                env={**os.environ, **program.environment},
                start_new_session=True,
            )

    async def _probe(self) -> None:
        await wait_until_ready(self.program.ready)
        again = self.lifecycle.became_ready()
        self._settled.set()
        self._report(ProgramReady(self.program, again))

    def _died(self, end: int | OSError, restart_in_s: float | None) -> None:
        if self.is_stopping:
            return
        # A killed process could not write why: its last lines are about something else.
        tail = "" if end == -signal.SIGKILL else _tail(self._log, self._log_from)
        self._death = ProgramDied(self.program, how_it_ended(end), self._log, tail, restart_in_s)
        self._report(self._death)
        if restart_in_s is None:
            self._settled.set()

    def _request_end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def queued_s(self) -> float:
        """For how long its main thread has waited for a core since its start; 0 if unknown."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class Supervisor:
    """Starts programs, keeps them running, stops them all."""

    def __init__(self, logs: Path, report: ReportEvent, preload: Sequence[str] = ()) -> None:
        """`logs`: the directory of one log per program. `preload`: the modules that preloaded
        programs find imported."""
        self._logs = logs
        self._report = report
        self._preloaded = PreloadedPrograms(preload, logs / "preloaded.log")
        self._programs: dict[str, SupervisedProgram] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._hurried = False

    @property
    def pids(self) -> dict[str, int]:
        return {name: one.pid for name, one in self._programs.items() if one.pid is not None}

    async def preload(self) -> None:
        """Begin to import what preloaded programs need, while the caller does something else."""
        with contextlib.suppress(OSError):  # the first that needs it tries again, and says so
            await self._preloaded.start()

    async def start(self, program: Program) -> SupervisedProgram:
        """Start a program and return when it is ready. Raises ProgramFailed if it ends instead."""
        supervised = self.launch(program)
        await supervised.wait_ready()
        return supervised

    def launch(self, program: Program) -> SupervisedProgram:
        """Start a program without waiting until it is ready."""
        assert program.name not in self._programs, f"{program.name} runs already"
        assert len(self._programs) < PROGRAMS_MAX
        log = self._logs / f"{program.name}.log"
        log.write_bytes(b"")
        supervised = SupervisedProgram(program, log, self._preloaded, self._report)
        self._programs[program.name] = supervised
        task = asyncio.create_task(supervised.supervise(), name=program.name)
        self._tasks[program.name] = task
        return supervised

    def hurry(self) -> None:
        """Kill what is being stopped, now and later, instead of waiting for its grace."""
        self._hurried = True
        for one in self._programs.values():
            if one.is_stopping:
                one.kill()

    async def stop(self) -> None:
        for kind in ProgramKind:
            await self._stop_all(
                [one for one in self._programs.values() if one.program.kind is kind]
            )
        await self._preloaded.close()

    async def _stop_all(self, programs: list[SupervisedProgram]) -> None:
        tasks = {self._tasks[one.program.name]: one for one in programs}
        for one in programs:
            one.stop(GRACE_S[one.program.kind])
            if self._hurried:
                one.kill()
        if not tasks:
            return
        for task in await self._until_ended(tasks):
            logger.warning("%s did not end in time and is killed", task.get_name())
            tasks[task].kill()
        await asyncio.wait(tasks, timeout=KILLED_WITHIN_S)

    async def _until_ended(
        self, tasks: Mapping[asyncio.Task[None], SupervisedProgram]
    ) -> set[asyncio.Task[None]]:
        """Wait until all have ended; those that have not in their grace.

        All programs of a kind end at once and share the cores with what else runs. How long one
        waits for a core says nothing about it, nor does a pause of this process.
        """
        now = asyncio.get_running_loop().time
        running = set(tasks)
        while True:
            asked_at, queued_s = now(), {task: tasks[task].queued_s() for task in running}
            _, running = await asyncio.wait(running, timeout=CHECK_S)
            overslept_s = now() - asked_at - CHECK_S
            for task in running:
                one = tasks[task]
                one.lifecycle.extend(max(0.0, overslept_s, one.queued_s() - queued_s[task]))
            if all(now() >= (tasks[task].lifecycle.due or 0.0) for task in running):
                return running

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def how_it_ended(end: int | OSError) -> str:
    """The exit code of a process in words; a negative one is that of a signal."""
    if isinstance(end, OSError):
        return f"could not be started: {end}"
    if end >= 0:
        return f"ended with status {end}"
    try:
        return f"was ended by {signal.Signals(-end).name}"
    except ValueError:
        return f"was ended by signal {-end}"


def _tail(log: Path, since: int) -> str:
    """The last lines of the log, of what was written from that byte on."""
    with log.open("rb") as file:
        file.seek(max(since, log.stat().st_size - TAIL_BYTES))
        text = file.read(TAIL_BYTES).decode("utf-8", "replace")
    return "\n".join(text.splitlines()[-TAIL_LINES:])
