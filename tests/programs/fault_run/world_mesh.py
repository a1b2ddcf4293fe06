"""A mesh of real processes to which the faults of a world are done, several at once."""

import asyncio
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from infra.address import Address
from mesh.supervisor.supervisor import ProgramDied, SupervisedProgram
from tests.programs.fault_run.breaking import BACK_WITHIN_S, BY_KILL, Breakable
from tests.programs.fault_run.world_plan import DIES, LEAVES, LINKS, ORDERS, STOPS, program_of
from tests.seeds.world import Line
from tests.support.mesh_command import mesh_command
from tests.support.ports import free_ports

ORDER_AGAIN_S = 0.5
ENDED = BY_KILL, f"was ended by {signal.SIGTERM.name}", "ended with status 0"
HAS_NAMESAKE, NO_BUS = "runs already", "no bus at"  # why programs end by themselves, and rightly


class WorldMesh(Breakable):
    """What dies stays dead until its fault is over."""

    def __init__(self, topology: Any, options: Any, state: Any) -> None:
        super().__init__(topology, options, state)
        self._config, self._state = options.config, state
        self._down: Counter[str] = Counter()  # faults that keep it from being started
        self._reasons: set[tuple[str, str]] = set()  # to end by itself: of a program or a region

    def hold_starts(self) -> None:
        """From now on none of its programs starts while a fault keeps it dead. Call it once."""
        for name, one in self._programs.items():
            one._spawn = partial(self._spawned, name, one._spawn)  # type: ignore[method-assign]

    async def _spawned(self, name: str, spawn: Callable[[], Awaitable[Any]]) -> Any:
        while self._down[name]:
            await asyncio.sleep(0.02)
        return await spawn()

    @property
    def _programs(self) -> dict[str, SupervisedProgram]:
        return self.mesh._supervisor._programs

    async def play(self, line: Line, killed: Callable[[str], None]) -> None:
        """One fault, to its end; what died is perhaps not ready then. Raises TimeoutError."""
        if line.what in ORDERS:
            await self._order(line)
        else:
            async with self._fault(line, killed):
                await asyncio.sleep(line.number("for"))

    async def all_back(self) -> None:
        """What ended is ready again. Raises TimeoutError."""
        async with asyncio.timeout(BACK_WITHIN_S):
            while self._killed:
                await asyncio.sleep(0.05)

    def _fault(
        self, line: Line, killed: Callable[[str], None]
    ) -> AbstractAsyncContextManager[None]:
        if line.what in LINKS:
            return self._link(line)
        name = program_of(line)
        if "bus" in line.what or line.what == "store_empties":
            self._reasons.add((NO_BUS, line.of["region"]))
        if line.what in DIES:
            emptied = self._state.jetstream / line.of["region"] if "store" in line.what else None
            return self._dead(name, signal.SIGKILL, killed, emptied)
        if line.what in LEAVES:
            return self._dead(name, signal.SIGTERM, lambda _: None)
        return self._stopped(name) if line.what in STOPS else self._namesake(name)

    @asynccontextmanager
    async def _dead(
        self, name: str, number: signal.Signals, killed: Callable[[str], None], emptied: Any = None
    ) -> AsyncIterator[None]:
        self._down[name] += 1
        try:
            if (pid := self.mesh.pids.get(name)) is not None:
                self._killed.add(name)
                killed(name)
                os.kill(pid, number)
            yield
        finally:
            if emptied is not None:
                shutil.rmtree(emptied, ignore_errors=True)
            self._down[name] -= 1

    @asynccontextmanager
    async def _stopped(self, name: str) -> AsyncIterator[None]:
        pid = self.mesh.pids.get(name)
        try:
            if pid is not None:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            if pid is not None and self.mesh.pids.get(name) == pid:
                os.kill(pid, signal.SIGCONT)

    @asynccontextmanager
    async def _namesake(self, name: str) -> AsyncIterator[None]:
        """A second process of that name, on other ports. It leaves, or the first does."""
        program = self._programs[name].program
        words = list(program.command)
        for at, word in enumerate(words):
            if word in ("--http", "--metrics", "--console"):
                words[at + 1] = str(Address("127.0.0.1", free_ports(1)[0]))
            elif word == "--ready-file":
                words[at + 1] += ".again"
        self._reasons.add((HAS_NAMESAKE, name))
        with (self._state.logs / f"{name}-again.log").open("ab") as log:
            again = replace(program, name=f"{name}-again", command=tuple(words))
            second = await self.mesh._supervisor._preloaded.fork(again, log.fileno())
        try:
            yield
        finally:
            if not second.exit_code.done():
                os.kill(second.pid, signal.SIGKILL)
            await second.wait()

    @asynccontextmanager
    async def _link(self, line: Line) -> AsyncIterator[None]:
        one, other = line.of["one"], line.of["other"]
        [(ends, way)] = [(at, way) for at, way in self.mesh.wan.items() if {*at} == {one, other}]
        ways = (int(one != ends[0]),) if line.what in ("cut_one_way", "late") else (0, 1)
        async with AsyncExitStack() as faults:
            for wan in way:
                fault = wan.flapping() if line.what == "flap" else wan.faulty(line.what, ways)
                await faults.enter_async_context(fault)
            yield

    async def _order(self, line: Line) -> None:
        """As an operator gives it, again until it is acknowledged; likewise its end."""
        now, region = asyncio.get_running_loop().time, line.of["region"]
        until = now() + line.number("for")
        if line.what == "drain":
            target = line.of.get("replica", region)
            begin, end = ("cordon", target), ("undrain", target)
        else:
            words = region, "--within-s", 0.1
            begin = ("routing", "set", *words, f"policy={line.of['policy']}")
            end = ("routing", "clear", *words)
        await self._ordered(*begin)
        await asyncio.sleep(until - now())
        await self._ordered(*end)

    async def _ordered(self, *words: object) -> None:
        files = ("--config", self._config, "--credentials", self._state.config)
        async with asyncio.timeout(BACK_WITHIN_S):
            while True:
                status, out, _ = await mesh_command(*words, *files)
                if status == 0 or "the order holds" in out:
                    return
                await asyncio.sleep(ORDER_AGAIN_S)

    def _is_ours(self, event: ProgramDied) -> bool:
        """Also why it ended by itself: another has its name, or its bus was away for too long."""
        name, is_killed = event.program.name, event.program.name in self._killed
        self._killed.add(name)
        return (is_killed and event.how in ENDED) or any(
            words in event.tail and of in (name, event.program.region)
            for words, of in self._reasons
        )
