"""One run from settings to report: read the trace, check the endpoints, play, sum up.

The loop is open: requests are sent when the plan has them, whatever the state of those before them.
A closed loop (so many users, each waiting for an answer) slows down with the system it measures and
never shows the queue that real arrivals would have built: "coordinated omission" (Tene). So there
is no back-pressure; `max_in_flight` bounds memory, and a request due beyond it is counted as failed
with its own reason, never delayed.
"""

import asyncio
import random
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mesh.replay.client import EndpointClient, choose_model, new_session, request_body
from mesh.replay.prompt_text import Prompts
from mesh.replay.report import RunReport, build_report
from mesh.replay.schedule import Departure, departures
from mesh.replay.settings import ReplaySettings
from mesh.replay.tally import RequestOutcome, RequestResult, RunTally
from mesh.replay.trace_formats import load_trace

SendRequest = Callable[[str, bytes, float], Awaitable[RequestResult]]  # region, body, due at
IN_FLIGHT_LIMIT = "in_flight_limit"
INTERRUPTED = "interrupted"
FILES_BESIDE_STREAMS = 64
BAR_EVERY_S = 0.25
LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class PreparedReplay:
    """A run that is ready to start: its files have been read and checked."""

    settings: ReplaySettings
    plan: tuple[Departure, ...]
    prompts: Prompts

    def body(self, departure: Departure, model: str) -> bytes:
        prompt = self.prompts.text(departure.request, departure.number)
        return request_body(model, prompt, departure.request.output_tokens)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A run's report, and the signal that ended it early, if one did."""

    report: RunReport
    stopped_by: int | None


def prepare(settings: ReplaySettings) -> PreparedReplay:
    """Read the trace and plan the run. Raises ValueError, whose message is one clear line."""
    trace = load_trace(settings.trace, settings.format).scaled(settings.scale_lengths)
    prompts = Prompts(trace.block_tokens, settings.bytes_per_token, settings.salt)
    raise_open_files_limit(settings.max_in_flight)
    plan = departures(
        trace,
        settings.weights,
        assign=settings.assign,
        speed=settings.speed,
        limit=settings.limit,
        rng=random.Random(settings.seed),
    )
    return PreparedReplay(settings, plan, prompts)


def raise_open_files_limit(streams: int) -> None:
    """Let this process open files for so many streams. Raises ValueError if it can't."""
    wanted = streams + FILES_BESIDE_STREAMS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--max-in-flight {streams} needs {wanted} open files, more than this process may "
            "have: lower it, or raise `ulimit -Hn`"
        ) from error


async def play(job: PreparedReplay, console: Console) -> ReplayResult:
    """Play a run to its end, or to SIGINT or SIGTERM; `console` shows the progress.

    Raises EndpointError, before anything is sent, if an endpoint can't be used.
    """
    settings = job.settings
    api_key = settings.api_key.get_secret_value() if settings.api_key else None
    tally = RunTally(settings.url, random.Random(settings.seed))
    async with new_session(timeout_s=settings.timeout_s, api_key=api_key) as session:
        model = await choose_model(session, settings.url, settings.model)
        loop = OpenLoop(
            job.plan,
            EndpointClient(session, settings.url).send,
            lambda departure: job.body(departure, model),
            tally,
            max_in_flight=settings.max_in_flight,
        )
        with _stopped_by_signals(loop) as signals:
            async with progress_shown(loop, console):
                duration_s = await loop.run()
    facts = {
        **settings.model_dump(mode="json", exclude={"out"}),
        "model": model,
        "weight": settings.weights,
        "planned": len(job.plan),
        "interrupted": bool(signals),
    }
    report = build_report(tally, duration_s, facts)
    return ReplayResult(report, signals[0] if signals else None)


class OpenLoop:
    """One run of a plan. `run` once; `stop` from a signal handler ends it early."""

    def __init__(
        self,
        plan: Sequence[Departure],
        send: SendRequest,
        body: Callable[[Departure], bytes],
        tally: RunTally,
        *,
        max_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.tally = tally
        self.sent = 0
        self._send = send
        self._body = body
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._in_flight: set[asyncio.Task[RequestResult]] = set()
        self._stopped = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def counts(self) -> str:
        """How many requests ended how, in words."""
        outcomes = self.tally.total.outcomes
        ends = ", ".join(f"{outcomes[outcome]} {outcome.value}" for outcome in RequestOutcome)
        return f"{ends}, {self.in_flight} in flight"

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
                self._start(group, departure, body, due_s)
        assert self.tally.total.requests == self.sent, "a request was lost or counted twice"
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

    def _start(
        self, group: asyncio.TaskGroup, departure: Departure, body: bytes, due_s: float
    ) -> None:
        self.sent += 1
        if self.in_flight >= self._max_in_flight:
            self._count(departure, RequestResult(RequestOutcome.FAILED, IN_FLIGHT_LIMIT))
            return
        task = group.create_task(self._result(departure, body, due_s))
        self._in_flight.add(task)
        task.add_done_callback(lambda task: self._ended(departure, task))

    async def _result(self, departure: Departure, body: bytes, due_s: float) -> RequestResult:
        return await self._send(departure.region, body, due_s)

    def _ended(self, departure: Departure, task: asyncio.Task[RequestResult]) -> None:
        # Counted here and not in the task: a task cancelled before its first step never runs.
        self._in_flight.discard(task)
        if task.cancelled():
            self._count(departure, RequestResult(RequestOutcome.FAILED, INTERRUPTED))
        elif not task.exception():
            self._count(departure, task.result())

    def _count(self, departure: Departure, result: RequestResult) -> None:
        self.tally.add(departure.region, result, departure.request.input_tokens)


@asynccontextmanager
async def progress_shown(
    loop: OpenLoop, console: Console, *, line_every_s: float = LINE_EVERY_S
) -> AsyncIterator[None]:
    """Show a bar on a terminal, or a line now and then anywhere else, while the block runs."""
    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    )
    row = bar.add_task("", total=len(loop.plan))

    async def watch() -> None:
        while console.is_terminal:
            bar.update(row, completed=loop.tally.total.requests, description=loop.counts)
            bar.refresh()
            await asyncio.sleep(BAR_EVERY_S)
        while True:
            await asyncio.sleep(line_every_s)
            line = f"{loop.sent} of {len(loop.plan)} sent: {loop.counts}"
            console.print(line, highlight=False)

    with bar:
        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()


@contextmanager
def _stopped_by_signals(loop: OpenLoop) -> Iterator[list[int]]:
    events = asyncio.get_running_loop()
    seen: list[int] = []

    def stop(number: int) -> None:
        seen.append(number)
        loop.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        events.add_signal_handler(number, stop, number)
    try:
        yield seen
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            events.remove_signal_handler(number)
