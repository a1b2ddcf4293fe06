"""Doing a fault to a running mesh, and waiting until what it killed is back."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

from infra.topology import Topology
from mesh.demo.local_mesh import DemoEvent, LocalMesh
from mesh.demo.options import DemoOptions
from mesh.demo.state_directory import StateDirectory
from mesh.supervisor.supervisor import ProgramDied, ProgramReady
from tests.programs.fault_run.schedule import Fault

BACK_WITHIN_S = 60.0
BY_KILL = f"was ended by {signal.SIGKILL.name}"


class Breakable:
    """A mesh in this process: its programs are started again when they end."""

    def __init__(self, topology: Topology, options: DemoOptions, state: StateDirectory) -> None:
        self.mesh = LocalMesh(topology, options, state, self._happened)
        self.ended_by_themselves: list[str] = []
        self._killed: set[str] = set()  # and not known to have ended
        self._away: set[str] = set()  # killed or ended, and not ready again
        self._changed = asyncio.Event()

    async def do(self, fault: Fault, killed: Callable[[str], None]) -> None:
        """Returns when it is over and what was killed is ready again. Raises TimeoutError.

        `killed` is called with the name of each program at its kill.
        """
        if fault.link is not None:
            await self._cut(fault.link, fault.lasts_s or 0.0)
        elif fault.lasts_s is None:
            await self._kill(fault.programs, killed)
        else:
            await self._stop(fault.programs, fault.lasts_s)

    async def _cut(self, link: frozenset[str], seconds: float) -> None:
        [way] = [way for ends, way in self.mesh.wan.items() if link == {*ends}]
        for wan in way:
            wan.cut()
        try:
            await asyncio.sleep(seconds)
        finally:
            for wan in way:
                await wan.heal()

    async def _stop(self, programs: Sequence[str], seconds: float) -> None:
        pids = await self._pids(programs)
        try:
            for pid in pids:
                send(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            for pid in pids:
                send(pid, signal.SIGCONT)

    async def _kill(self, programs: Sequence[str], killed: Callable[[str], None]) -> None:
        pids = await self._pids(programs)
        for name, pid in zip(programs, pids, strict=True):
            self._kill_one(name, pid, signal.SIGKILL, killed)
        async with asyncio.timeout(BACK_WITHIN_S):
            while self._away:
                self._changed.clear()
                await self._changed.wait()

    def _kill_one(
        self, name: str, pid: int, number: signal.Signals, killed: Callable[[str], None]
    ) -> None:
        self._killed.add(name)
        self._away.add(name)
        killed(name)
        send(pid, number)

    async def _pids(self, programs: Sequence[str]) -> list[int]:
        """Their processes; one that ended by itself is waited for."""
        async with asyncio.timeout(BACK_WITHIN_S):
            while not self.mesh.pids.keys() >= {*programs}:
                await asyncio.sleep(0.05)
        return [self.mesh.pids[name] for name in programs]

    def _happened(self, event: DemoEvent) -> None:
        if isinstance(event, ProgramReady):
            self._away.discard(event.program.name)
        elif isinstance(event, ProgramDied):
            self._away.add(event.program.name)
            if not self._is_ours(event):
                self.ended_by_themselves.append(f"{event.program.name} {event.how}\n{event.tail}")
            self._killed.discard(event.program.name)
        self._changed.set()

    def _is_ours(self, event: ProgramDied) -> bool:
        """Whether a fault is why it ended."""
        return event.how == BY_KILL and event.program.name in self._killed


def send(pid: int, number: signal.Signals) -> None:
    """To a program, which may have ended: what forked it waits for it, and tells us later."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
