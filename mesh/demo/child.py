"""One program kept running: started, watched, started again when it ends by itself.

Each child leads a session of its own, so Ctrl-C in a terminal reaches the supervisor alone and
the supervisor decides who ends first. All it prints goes to its log.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.restarts import Restarts
from mesh.demo import leash
from mesh.demo.program import Program, passed

TAIL_BYTES = 8192
TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Ready:
    """A program became ready, for the first time or again."""

    program: Program
    again: bool


@dataclass(frozen=True, slots=True)
class Died:
    """A program ended by itself."""

    program: Program
    how: str
    log: Path
    tail: str  # the last lines of its log, where they can tell why
    restart_in_s: float | None  # None: it will not be started again


Report = Callable[[Ready | Died], None]


class GaveUp(RuntimeError):
    """A program ended and will not be started again; `death` says how and shows its log."""

    def __init__(self, death: Died) -> None:
        super().__init__(f"{death.program.name} {death.how}")
        self.death = death


class Child:
    """Keeps one program running from `keep` until `end`."""

    def __init__(self, program: Program, log: Path, report: Report) -> None:
        self.program = program  # what the next start runs
        self.pid: int | None = None
        self._log = log
        self._report = report
        self._restarts = Restarts()
        self._process: Process | None = None
        self._was_ready = False
        self._settled = asyncio.Event()  # ready, or given up
        self._ending = asyncio.Event()
        self._death: Died | None = None
        self._log_from = 0  # of the process that runs, or ran last

    async def wait_ready(self) -> None:
        """Return when it has become ready once. Raises GaveUp if it ended instead."""
        await self._settled.wait()
        if not self._was_ready and self._death is not None:
            raise GaveUp(self._death)

    async def keep(self) -> None:
        """Run the program until `end` is called or it ends too often."""
        loop = asyncio.get_running_loop()
        while not self._ending.is_set():
            started = loop.time()
            how = await self._run_once()
            if self._ending.is_set():
                return
            wait_s = self._restarts.after_death(loop.time() - started, was_ready=self._was_ready)
            # Who is killed has no time to say of what: its last lines are about other things.
            last_words = "" if how == _how(-signal.SIGKILL) else _tail(self._log, self._log_from)
            self._death = Died(self.program, how, self._log, last_words, wait_s)
            self._report(self._death)
            if wait_s is None:
                self._settled.set()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ending.wait()

    def end(self) -> None:
        """Ask the program to end, for good."""
        self._ending.set()
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the program and whatever it started, at once and for good."""
        self._ending.set()
        self._signal(signal.SIGKILL)

    async def _run_once(self) -> str:
        """Start the program, wait until it ends, and say how it ended."""
        self.program.ready.forget()
        try:
            process = await self._spawn()
        except OSError as error:
            return f"could not be started: {error}"
        self._process, self.pid = process, process.pid
        if self._ending.is_set():  # asked to end while it was being started
            self._signal(signal.SIGTERM)
        probing = asyncio.create_task(self._probe())
        try:
            return _how(await process.wait())
        finally:
            self._process = self.pid = None
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _spawn(self) -> Process:
        with self._log.open("ab") as log:
            self._log_from = log.tell()
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid())),
                *self.program.command,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.program.environment},
                start_new_session=True,
            )

    async def _probe(self) -> None:
        await passed(self.program.ready)
        again, self._was_ready = self._was_ready, True
        self._settled.set()
        self._report(Ready(self.program, again))

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _tail(log: Path, since: int) -> str:
    """What was written last, of what was written from that byte on."""
    with log.open("rb") as file:
        file.seek(max(since, log.stat().st_size - TAIL_BYTES))
        text = file.read(TAIL_BYTES).decode("utf-8", "replace")
    return "\n".join(text.splitlines()[-TAIL_LINES:])
