"""A mesh of real processes to which the faults of a world are done, several at once."""

import asyncio
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
from tests.programs.fault_run.breaking import BACK_WITHIN_S, BY_KILL, Breakable, send
from tests.programs.fault_run.world_plan import (
    BUS_AWAY,
    DIES,
    LEAVES,
    LINKS,
    NAMESAKES,
    ORDERS,
    STOPS,
    program_of,
)
from tests.seeds.world import Line
from tests.support.mesh_command import mesh_command
from tests.support.ports import free_ports

ORDER_AGAIN_S = 0.5
ENDED = BY_KILL, f"was ended by {signal.SIGTERM.name}", "ended with status 0"
HAS_NAMESAKE, NO_BUS = "runs already", "no bus at"  # why programs end by themselves, and rightly
# After the fault: a program that was started meanwhile looks for its bus for ten seconds.
EXCUSED_S = 20.0


class WorldMesh(Breakable):
    """What dies stays dead until its fault is over."""

    def __init__(self, topology: Any, options: Any, state: Any) -> None:
        super().__init__(topology, options, state)
        self._config, self._state = options.config, state
        self._down: Counter[str] = Counter()  # faults that keep it from being started
        # To end by itself: (why, of a program or a region) → until when.
        self._reasons: dict[tuple[str, str], float] = {}
        # Processes and signals: after a second SIGTERM a router cuts its requests.
        self._told: set[tuple[int, int]] = set()

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
            self._excuse(line)
            async with self._fault(line, killed):
                await asyncio.sleep(line.number("for"))

    async def all_back(self) -> None:
        """What ended is ready again. Raises TimeoutError."""
        async with asyncio.timeout(BACK_WITHIN_S):
            while self._away:
                await asyncio.sleep(0.05)

    def _excuse(self, line: Line) -> None:
        """Those that this fault lets end by themselves, until a while after its end."""
        if line.what in NAMESAKES:
            reason = HAS_NAMESAKE, program_of(line)
        elif line.what in BUS_AWAY:
            reason = NO_BUS, line.of["region"]
        else:
            return
        until = asyncio.get_running_loop().time() + line.number("for") + EXCUSED_S
        self._reasons[reason] = max(until, self._reasons.get(reason, until))

    def _fault(
        self, line: Line, killed: Callable[[str], None]
    ) -> AbstractAsyncContextManager[None]:
        if line.what in LINKS:
            return self._link(line)
        name = program_of(line)
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
        pid = self.mesh.pids.get(name)
        try:
            if pid is not None and (pid, number) not in self._told:
                self._told.add((pid, number))
                self._kill_one(name, pid, number, killed)
            yield
        finally:
            if emptied is not None and pid is not None:
                shutil.rmtree(emptied, ignore_errors=True)
            self._down[name] -= 1

    @asynccontextmanager
    async def _stopped(self, name: str) -> AsyncIterator[None]:
        pid = self.mesh.pids.get(name)
        try:
            if pid is not None:
                send(pid, signal.SIGSTOP)
            yield
        finally:
            if pid is not None and self.mesh.pids.get(name) == pid:
                send(pid, signal.SIGCONT)

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
        with (self._state.logs / f"{name}-again.log").open("ab") as log:
            again = replace(program, name=f"{name}-again", command=tuple(words))
            second = await self.mesh._supervisor._preloaded.fork(again, log.fileno())
        try:
            yield
        finally:
            if not second.exit_code.done():
                send(second.pid, signal.SIGKILL)
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
            # `cordon` is a `drain` that does not wait, but has no `--move`.
            move = ("drain", "--move", "--timeout-s", 0, target)
            begin = move if "move" in line.of else ("cordon", target)
            end = ("undrain", target)
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
        name, now = event.program.name, asyncio.get_running_loop().time()
        return (name in self._killed and event.how in ENDED) or any(
            words in event.tail and of in (name, event.program.region) and now < until
            for (words, of), until in self._reasons.items()
        )
