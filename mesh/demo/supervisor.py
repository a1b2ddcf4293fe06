"""Every process of a demo under one roof: none is forgotten, none stays behind.

An async context manager. Whatever ends the block, an answer or an exception, every program is
ended kind by kind (see `Kind`), each kind within its grace, and what has not ended by then is
killed with its process group. If the supervisor itself is killed, `leash` does the rest.
"""

import asyncio
import logging
from pathlib import Path
from typing import Self

from mesh.demo.child import Child, Report
from mesh.demo.program import Kind, Program

logger = logging.getLogger(__name__)

# Routers and agents drain what they have; engines and servers have nothing to wait for.
GRACE_S = {Kind.ROUTER: 10.0, Kind.AGENT: 5.0, Kind.ENGINE: 3.0, Kind.NATS: 5.0}
KILLED_WITHIN_S = 5.0
PROGRAMS_MAX = 512


class Supervisor:
    """Starts programs, keeps them running, ends them all."""

    def __init__(self, logs: Path, report: Report) -> None:
        """`logs`: the directory of one log a program; `report` is told what happens to them."""
        self._logs = logs
        self._report = report
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._hurry = asyncio.Event()

    @property
    def pids(self) -> dict[str, int]:
        """The process of every program that runs now."""
        return {name: child.pid for name, child in self._children.items() if child.pid is not None}

    async def start(self, program: Program) -> Child:
        """Start a program and return when it is ready. Raises GaveUp if it ends instead."""
        child = self.launch(program)
        await child.wait_ready()
        return child

    def launch(self, program: Program) -> Child:
        """Start a program; the caller may wait until it is ready."""
        assert program.name not in self._children, f"{program.name} runs already"
        assert len(self._children) < PROGRAMS_MAX
        log = self._logs / f"{program.name}.log"
        log.write_bytes(b"")
        child = Child(program, log, self._report)
        self._children[program.name] = child
        self._keepers[program.name] = asyncio.create_task(child.keep(), name=program.name)
        return child

    def hurry(self) -> None:
        """Skip what is left of every grace: kill at once."""
        self._hurry.set()

    async def stop(self) -> None:
        """End every program, kind by kind."""
        for kind in Kind:
            await self._stop_kind(kind)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _stop_kind(self, kind: Kind) -> None:
        children = [child for child in self._children.values() if child.program.kind is kind]
        keepers = {self._keepers[child.program.name] for child in children}
        if not keepers:
            return
        for child in children:
            child.end()
        await self._unless_hurried(keepers, GRACE_S[kind])
        for child in children:
            if not self._keepers[child.program.name].done():
                if not self._hurry.is_set():
                    logger.warning("%s did not end in time and is killed", child.program.name)
                child.kill()
        await asyncio.wait(keepers, timeout=KILLED_WITHIN_S)

    async def _unless_hurried(self, keepers: set[asyncio.Task[None]], grace_s: float) -> None:
        """Wait until all have ended, the grace is over, or there is a hurry."""
        ended = asyncio.create_task(asyncio.wait(keepers))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({ended, hurry}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        hurry.cancel()
