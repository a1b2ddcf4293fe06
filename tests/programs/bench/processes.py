"""The processes of a run: started, waited for, and ended whatever happens.

Each is tied to this one by `mesh.supervisor.parent_death`, so that nothing outlives even a kill -9
of the bench; each leads a session of its own, so that Ctrl-C reaches the bench alone, which then
ends them.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import aiohttp

from mesh.supervisor import parent_death

READY_WITHIN_S = 60.0
LOOK_EVERY_S = 0.05
END_WITHIN_S = 5.0
TAIL_CHARS = 300

Look = Callable[[], Awaitable[bool]]


class Absent(RuntimeError):
    """Something can't be measured here; the message has the reason, in a line for the report."""


class Processes:
    """An async context manager: what was started inside is ended at its end."""

    def __init__(
        self,
        logs: Path,
        *,
        ready_within_s: float = READY_WITHIN_S,
        end_within_s: float = END_WITHIN_S,
    ) -> None:
        self._logs = logs
        self._ready_within_s, self._end_within_s = ready_within_s, end_within_s
        self._running: list[Process] = []

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        for process in reversed(self._running):
            _signal(process, signal.SIGTERM)
        await asyncio.gather(*(_ended(each, self._end_within_s) for each in self._running))

    async def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        ready: Look | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> int:
        """Start a program, wait until `ready`, and return its process id. Raises Absent."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())),
                *command,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                cwd=directory,
                start_new_session=True,
            )
        self._running.append(process)
        if ready is not None:
            await self._until(name, process, ready, log)
        return process.pid

    def answers(self, url: str) -> Look:
        """Whether the URL answers 200, with whichever certificate."""

        async def look() -> bool:
            async with self._http.get(url, ssl=False) as answer:
                return answer.status == 200

        return look

    def takes(self, url: str, body: bytes) -> Look:
        """Whether the URL answers this JSON with 200."""

        async def look() -> bool:
            kind = {"content-type": "application/json"}
            async with self._http.post(url, data=body, headers=kind, ssl=False) as answer:
                await answer.read()
                return answer.status == 200

        return look

    async def until(self, what: str, look: Look) -> None:
        """Wait until it is so. Raises Absent."""
        try:
            async with asyncio.timeout(self._ready_within_s):
                while not await _holds(look):
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            raise Absent(f"{what} did not answer within {self._ready_within_s:g} s") from None

    async def _until(self, name: str, process: Process, look: Look, log: Path) -> None:
        waiting = asyncio.create_task(self.until(name, look))
        ending = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((waiting, ending), return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                status = ending.result()
                raise Absent(f"{name} ended with status {status}: {_last_line(log)}")
            await waiting
        finally:
            for task in (waiting, ending):
                task.cancel()
            await asyncio.gather(waiting, ending, return_exceptions=True)


async def output_of(command: Sequence[str], *, given: bytes = b"", within_s: float) -> bytes:
    """Run a program that ends by itself; what it printed. Raises Absent."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())),
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(within_s):
            output, errors = await process.communicate(given)
    except TimeoutError:
        raise Absent(f"{command[0]} did not end within {within_s:g} s") from None
    finally:
        _signal(process, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip()[-TAIL_CHARS:]
        raise Absent(f"{command[0]} ended with status {process.returncode}: {last}")
    return output


async def _holds(look: Look) -> bool:
    try:
        return await look()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def _ended(process: Process, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        _signal(process, signal.SIGKILL)
        await process.wait()


def _signal(process: Process, number: signal.Signals) -> None:
    """To the process and all that it started."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][-TAIL_CHARS:] if lines else "it printed nothing"
