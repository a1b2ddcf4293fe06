"""An event loop whose time jumps, and processes on it that can be stopped and killed."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

WORLDS = "tests.seeds"
TURNS_MAX = 20_000  # of the loop at one moment: more are a task that spins


class StandsStill(Exception):
    """Something goes on and on without waiting."""


class Process:
    """What runs in its `context` is this process's: `stop` is SIGSTOP, `kill` is SIGKILL."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self.at_kill: list[Callable[[], object]] = []  # what its death closes
        self._loop = loop
        self._waiting: list[asyncio.Handle] = []

    def do(self, call: Callable[..., object], *args: object) -> None:
        """Have it make the call soon."""
        self._loop.call_soon(call, *args, context=self.context)

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        """In the order in which all came, or its own timers first: a task that reads from a socket
        is woken after them."""
        self.is_stopped = False
        waiting, self._waiting = self._waiting, []
        if Random(f"{self.name} {self._loop.time()}").random() < 0.5:
            waiting.sort(key=_is_brought)
        self._loop.ready_again(waiting)

    def kill(self) -> None:
        """It ends between two of its steps: nothing of it runs any more."""
        self.is_alive = False
        self._waiting.clear()
        for close in tuple(self.at_kill):  # each leaves the list
            close()

    def runs(self, handle: asyncio.Handle) -> bool:
        """Whether it may take this step now; one that is stopped takes it later."""
        if self.is_alive and self.is_stopped:
            self._waiting.append(handle)
        return self.is_alive and not self.is_stopped


def _is_brought(handle: asyncio.Handle) -> bool:
    """Whether sockets, buses or clients of these worlds bring it."""
    return (getattr(handle._callback, "__module__", None) or "").startswith(WORLDS)


_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def this_process() -> Process | None:
    """The one whose code runs."""
    return _PROCESS.get()


class Listeners:
    """As asyncio.Server, of one address."""

    sockets = ()

    def __init__(self, loop: "VirtualLoop", host: str) -> None:
        self._loop, self._host = loop, host

    def close(self) -> None:
        self._loop.listening.pop(self._host, None)

    async def wait_closed(self) -> None:
        """Nothing is left to close."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Hosts are names; every process listens on a host of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._turns = 0  # without any time passing
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()
        self._selector = None
        self.listening: dict[str, tuple[Callable[[], asyncio.Protocol], Process | None]] = {}
        self.connect: Callable[[str, asyncio.Protocol], asyncio.Transport]  # see `sockets`
        self.problems: list[str] = []
        self.set_exception_handler(self._problem)

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        if when <= self._now:  # as uvloop: a handle without a time
            return self.call_soon(callback, *args, context=context)  # type: ignore[return-value]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _problem(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    def ready_again(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and (not ready or timers[0][0] <= self._now or timers[0][2]._cancelled):
            when, _, timer = heappop(timers)
            if not timer._cancelled:
                if when > self._now:
                    self._now, self._turns = when, 0
                ready.append(timer)
        assert ready, "nothing will ever happen"
        self._turns += 1
        if self._turns > TURNS_MAX:
            raise StandsStill(f"at {self._now:.3f} time stands still: {list(ready)[:3]}")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_PROCESS)
            if process is None or process.runs(handle):
                handle._run()

    def _check_closed(self) -> None:
        """What was killed may still be taken apart when all is over."""

    def _process_events(self, event_list: object) -> None:
        """There are no sockets."""

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, *_: Any, **__: Any
    ) -> Any:
        protocol = protocol_factory()
        transport = self.connect(host, protocol)
        return transport, protocol

    async def create_server(
        self, protocol_factory: Any, host: Any = None, *_: Any, **__: Any
    ) -> Any:
        if host in self.listening:
            raise OSError(98, f"{host} is taken")
        process = this_process()
        self.listening[host] = protocol_factory, process
        listeners = Listeners(self, host)
        if process is not None:
            process.at_kill.append(listeners.close)
        return listeners

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Threads would be chance."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as problem:
            future.set_exception(problem)
        return future
