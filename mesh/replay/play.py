"""One run from settings to report: check the endpoints, play, watch for signals, sum up."""

import asyncio
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from mesh.replay.client import Client, choose_model, new_session, request_body
from mesh.replay.formats import load_trace
from mesh.replay.progress import ProgressView
from mesh.replay.report import Report, build_report
from mesh.replay.run import Replay
from mesh.replay.schedule import Departure, departures
from mesh.replay.settings import Settings
from mesh.replay.tally import Ledger
from mesh.replay.text import Prompts

FILES_BESIDE_STREAMS = 64


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is ready to start: everything that can be wrong in a file was not."""

    settings: Settings
    plan: tuple[Departure, ...]
    prompts: Prompts

    def body(self, departure: Departure, model: str) -> bytes:
        """What a departure sends."""
        prompt = self.prompts.text(departure.request, departure.number)
        return request_body(model, prompt, departure.request.output_tokens)


@dataclass(frozen=True, slots=True)
class Played:
    """What a run came to, and the signal that ended it early, if one did."""

    report: Report
    stopped_by: int | None


def prepare(settings: Settings) -> Job:
    """Read the trace and plan the run. Raises ValueError, whose message is one clear line."""
    trace = load_trace(settings.trace, settings.format).scaled(settings.scale_lengths)
    prompts = Prompts(trace.block_tokens, settings.bytes_per_token, settings.salt)
    make_room_for(settings.max_in_flight)
    plan = departures(
        trace,
        settings.weights,
        assign=settings.assign,
        speed=settings.speed,
        limit=settings.limit,
        rng=random.Random(settings.seed),
    )
    return Job(settings, plan, prompts)


def make_room_for(streams: int) -> None:
    """Raise this process' limit of open files for so many streams. ValueError if it can't be."""
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


async def play(job: Job, console: Console) -> Played:
    """Play a job to its end, or to SIGINT or SIGTERM; `console` shows the progress.

    Raises EndpointError, before anything is sent, if an endpoint can't be used.
    """
    settings = job.settings
    api_key = settings.api_key.get_secret_value() if settings.api_key else None
    ledger = Ledger(settings.url, random.Random(settings.seed))
    async with new_session(timeout_s=settings.timeout_s, api_key=api_key) as session:
        model = await choose_model(session, settings.url, settings.model)
        replay = Replay(
            job.plan,
            Client(session, settings.url).ask,
            lambda departure: job.body(departure, model),
            ledger,
            max_in_flight=settings.max_in_flight,
        )
        with _stopped_by_signals(replay) as signals:
            async with ProgressView(replay, console):
                duration_s = await replay.run()
    facts = {
        **settings.model_dump(mode="json", exclude={"out"}),
        "model": model,
        "weight": settings.weights,
        "planned": len(job.plan),
        "interrupted": bool(signals),
    }
    report = build_report(ledger, duration_s, facts)
    return Played(report, signals[0] if signals else None)


@contextmanager
def _stopped_by_signals(replay: Replay) -> Iterator[list[int]]:
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def stop(number: int) -> None:
        seen.append(number)
        replay.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        yield seen
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
