"""The open loop: requests leave when the plan says, whatever became of those before them.

A closed loop (so many users, each waiting for an answer) slows down with the system it measures
and never shows the queue that real arrivals would have built: "coordinated omission" (Tene).
Hence no back-pressure here. What bounds memory is `max_in_flight`: a request due beyond it is
counted as failed with its own reason, never delayed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from mesh.replay.schedule import Departure
from mesh.replay.tally import Answer, Ledger, Outcome

Ask = Callable[[str, bytes, float], Awaitable[Answer]]
IN_FLIGHT_LIMIT = "in_flight_limit"
INTERRUPTED = "interrupted"


class Replay:
    """One run of a plan. `run` once; `stop` from a signal handler ends it early."""

    def __init__(
        self,
        plan: Sequence[Departure],
        ask: Ask,
        body: Callable[[Departure], bytes],
        ledger: Ledger,
        *,
        max_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.ledger = ledger
        self.sent = 0
        self._ask = ask
        self._body = body
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._in_flight: set[asyncio.Task[Answer]] = set()
        self._stopped = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests that have left and not ended."""
        return len(self._in_flight)

    def stop(self) -> None:
        """Send nothing more; what is in flight ends as failed, with reason `interrupted`."""
        self._stopped.set()
        for task in self._in_flight:
            task.cancel()

    async def run(self) -> float:
        """Play the plan to the end of its last answer. Returns how long that took, in seconds."""
        started_s = self._clock()
        async with asyncio.TaskGroup() as group:
            for departure in self.plan:
                body = self._body(departure)  # before it is due: making it takes a while
                due_s = started_s + departure.due_s
                await self._sleep_until(due_s)
                if self._stopped.is_set():
                    break
                self._leave(group, departure, body, due_s)
        assert self.ledger.total.requests == self.sent, "a request was lost or counted twice"
        return self._clock() - started_s

    async def _sleep_until(self, due_s: float) -> None:
        delay_s = due_s - self._clock()
        if delay_s <= 0:
            await asyncio.sleep(0)  # a late plan must still let answers be read
            return
        try:
            async with asyncio.timeout(delay_s):
                await self._stopped.wait()
        except TimeoutError:
            pass

    def _leave(
        self, group: asyncio.TaskGroup, departure: Departure, body: bytes, due_s: float
    ) -> None:
        self.sent += 1
        if len(self._in_flight) >= self._max_in_flight:
            self._count(departure, Answer(Outcome.FAILED, IN_FLIGHT_LIMIT))
            return
        task = group.create_task(self._send(departure, body, due_s))
        self._in_flight.add(task)
        task.add_done_callback(lambda task: self._ended(departure, task))

    async def _send(self, departure: Departure, body: bytes, due_s: float) -> Answer:
        return await self._ask(departure.region, body, due_s)

    def _ended(self, departure: Departure, task: asyncio.Task[Answer]) -> None:
        # Counted here and not in the task: a task cancelled before its first step never runs.
        self._in_flight.discard(task)
        if task.cancelled():
            self._count(departure, Answer(Outcome.FAILED, INTERRUPTED))
        elif not task.exception():
            self._count(departure, task.result())

    def _count(self, departure: Departure, answer: Answer) -> None:
        self.ledger.add(departure.region, answer, departure.request.input_tokens)
