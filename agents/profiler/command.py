"""`mesh-agent profile`: parse, check, profile, write the file."""

import asyncio
import contextlib
import random
import re
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop
from rich.console import Console

from agents.config import ENGINE_KEY, EngineConfig
from agents.core.engine_curves import CalibratedEngine, encode_calibrated
from agents.core.offline_profile import encode_profile
from agents.core.slo_profile import Measure
from agents.engine_options import checked, engine_options, read_engine_key
from agents.profiler.curves import measured
from agents.profiler.engine import ProfiledEngine
from agents.profiler.load import Lengths, OnlineRequest, TraceInvalid, read_trace
from agents.profiler.picture import draw
from agents.profiler.report import table_of
from agents.profiler.run import (
    Found,
    ObjectiveNotKept,
    Plan,
    ProfilingRun,
    calibration_s,
    shortfall,
)
from agents.profiler.stream import EngineUnusable
from infra.credentials_file import credentials_option
from infra.process import raise_limit
from schemas.problems import did_you_mean

MEASURES = {
    "ttft-mean": Measure.TTFT_MEAN,
    "ttft-p99": Measure.TTFT_P99,
    "tbt-mean": Measure.TBT_MEAN,
    "tbt-p99": Measure.TBT_P99,
}
TOLERANCE_MAX = 1000.0  # per cent
LIMIT_S_MAX = 3600.0
INTERRUPTED = 130  # exit status of a program that Ctrl-C ended
P99_REQUESTS = 100
ERROR_MAX = 0.1
T = TypeVar("T")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


def _tolerances(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> Any:
    found = {}
    for measure, text in _named(values):
        amount = _PERCENT.fullmatch(text)
        if amount is None or float(amount[1]) > TOLERANCE_MAX:
            raise click.BadParameter(
                f"{text!r} is no tolerance: write it in per cent, as ttft-p99=10%"
            )
        found[measure] = float(amount[1]) / 100
    return found


def _limits(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> Any:
    found = {}
    for measure, text in _named(values):
        amount = _SECONDS.fullmatch(text)
        seconds = 0.0
        if amount is not None:
            seconds = float(amount[1]) / (1000 if amount[2] == "ms" else 1)
        if not 0.0 < seconds <= LIMIT_S_MAX:
            raise click.BadParameter(
                f"{text!r} is no limit: write it in ms or s, above 0, as tbt-p99=50ms"
            )
        found[measure] = seconds
    return found


def _named(values: tuple[str, ...]) -> list[tuple[Measure, str]]:
    found: dict[Measure, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if name not in MEASURES:
            raise click.BadParameter(f"unknown measure {name!r}{did_you_mean(name, [*MEASURES])}")
        if not equals:
            raise click.BadParameter(f"{value!r} lacks its value: write {name}=…")
        if MEASURES[name] in found:
            raise click.BadParameter(f"{name} is given twice")
        found[MEASURES[name]] = text
    return list(found.items())


_TOKENS = click.IntRange(min=1, max=1_000_000)


@click.command("profile")
@credentials_option(also=(ENGINE_KEY,))
@engine_options
@click.option(
    "--tolerance",
    "tolerances",
    multiple=True,
    callback=_tolerances,
    metavar="MEASURE=N%",
    help="What online requests may lose beside offline work, relative to a run without it. "
    f"Measures: {', '.join(MEASURES)}. Repeat for more.",
)
@click.option(
    "--slo",
    "limits",
    multiple=True,
    callback=_limits,
    metavar="MEASURE=TIME",
    help="A limit of such a measure in itself, as tbt-p99=50ms. Repeat for more.",
)
@click.option(
    "--online-rps",
    "rate_per_s",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    help="Online requests a second, at random times.",
)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Online requests instead: JSON lines with timestamp (ms), input_length, output_length.",
)
@click.option(
    "--online-prompt-tokens", type=_TOKENS, default=512, help="Median, with --online-rps."
)
@click.option(
    "--online-output-tokens", type=_TOKENS, default=128, help="Median, with --online-rps."
)
@click.option("--offline-prompt-tokens", type=_TOKENS, default=1024, help="Median.")
@click.option("--offline-output-tokens", type=_TOKENS, default=128, help="Median.")
@click.option(
    "--offline-priority",
    type=int,
    metavar="N",
    help="Sent to vLLM or SGLang as the priority of offline requests, as mesh-agent run will.",
    show_default="none is sent",
)
@click.option(
    "--duration-s",
    type=click.FloatRange(min=5, max=86_400),
    default=600.0,
    help="Of the whole run, about: a quarter measures iterations, six test runs share the rest.",
)
@click.option(
    "--chunk-tokens",
    type=_TOKENS,
    help="Most prompt tokens of one iteration (vLLM: --max-num-batched-tokens).",
    show_default="as measured",
)
@click.option(
    "--burst-s",
    type=click.FloatRange(min=0, max=60),
    default=0.0,
    help="Take the budget as a mean: iterations may exceed it by so much, all together, if shorter "
    "ones have made up for it before. 0: none may.",
)
@click.option(
    "--calibrate",
    "calibrates",
    is_flag=True,
    help="Measure for a minute more what a simulated engine needs to be like this one (mesh sim "
    "--profile FILE). Without an objective nothing else is measured.",
)
@click.option("--seed", type=int, default=0, help="Of arrivals and lengths.")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The profile, for mesh-agent run --profile.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="An SVG picture of the search.",
    show_default="the profile's name with .svg",
)
def command(out: Path, picture: Path | None, **options: Any) -> None:
    """Find how much offline work an engine takes without hurting online requests.

    Point it at an engine that nobody else uses. It measures how long iterations take, then plays
    online requests with and without offline work to find the largest latency budget of an
    iteration with which the objectives are kept.
    """
    key = read_engine_key(options.pop("engine_key_file"))
    fields = {name: options.pop(name) for name in EngineConfig.model_fields if name in options}
    config = checked(EngineConfig, fields | {"engine_key": key}, command.params)
    if options["calibrates"] and not (options["tolerances"] or options["limits"]):
        _calibrate(config, out, options["duration_s"], options["chunk_tokens"])
        return
    plan = _plan(options)
    picture = picture or out.with_suffix(".svg")
    if picture == out:
        raise click.UsageError("--picture and --out are the same file")
    for path in (out, picture):
        _check_writable(path)
    found = _run(lambda console: _main(config, plan, console))
    Console().print(table_of(found))
    if found.profile is None:
        least = min(found.trials, key=lambda trial: trial.budget_s)
        broken = shortfall(least.result.latency_s, found.limits)
        raise click.ClickException(
            f"no budget keeps the objectives: with {least.budget_s * 1000:.1f} ms {broken}"
        )
    drawn = draw(found).encode()
    _write(out, encode_profile(found.profile))
    _write(picture, drawn)
    budget_ms = found.profile.latency_budget_s * 1000
    click.echo(f"{out}: latency budget {budget_ms:.1f} ms; picture: {picture}")


def _calibrate(
    config: EngineConfig, out: Path, duration_s: float, chunk_tokens: int | None
) -> None:
    """Write the engine's curves alone."""
    _check_writable(out)
    found = _run(lambda console: _curves(config, calibration_s(duration_s), chunk_tokens, console))
    _write(out, encode_calibrated(found))
    points = f"{len(found.curves.prefill)} prompts, {len(found.curves.decode)} loads"
    click.echo(f"{out}: {points}; play it: mesh sim --profile {out}")


def _run(work: Callable[[Console], Coroutine[Any, Any, T]]) -> T:
    """What it comes to. Raises click.ClickException, or SystemExit after Ctrl-C."""
    raise_limit()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        return uvloop.run(work(console))
    except asyncio.CancelledError:
        console.print("interrupted: no request is left at the engine, no file was written")
        raise SystemExit(INTERRUPTED) from None
    except (EngineUnusable, ObjectiveNotKept) as problem:
        raise click.ClickException(str(problem)) from None


@contextlib.asynccontextmanager
async def _connected(
    config: EngineConfig, dice: random.Random, console: Console
) -> AsyncIterator[ProfiledEngine]:
    """SIGINT and SIGTERM cancel what is done with it: requests end at the engine before that."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    engine = ProfiledEngine(config, dice)
    try:
        await engine.connect()
        context = engine.context_tokens
        console.print(f"{engine.url} serves {engine.model}, context {context} tokens")
        yield engine
    finally:
        await engine.close()


async def _curves(
    config: EngineConfig, seconds: float, chunk_tokens: int | None, console: Console
) -> CalibratedEngine:
    async with _connected(config, random.Random(secrets.randbits(64)), console) as engine:
        curves = await measured(engine, seconds, chunk_tokens, console.print)
        return CalibratedEngine(
            engine=engine.kind, model=engine.model, measured_at=int(time.time()), curves=curves
        )


async def _main(config: EngineConfig, plan: Plan, console: Console) -> Found:
    dice = random.Random(secrets.randbits(64))  # prompts that no earlier run has sent
    say = console.print
    async with _connected(config, dice, console) as engine:
        found = await ProfilingRun(engine, plan, dice, say).run()
    if found.measured.error > ERROR_MAX:
        say(
            f"predictions are {found.measured.error:.0%} off: iterations of equal batches differ "
            "much; profile again when nothing else uses the engine's machine"
        )
    if found.alone.online < P99_REQUESTS and Measure.TTFT_P99 in found.limits:
        say(
            f"p99 TTFT of {found.alone.online} requests is their longest: "
            "a longer --duration-s makes it surer"
        )
    elif found.alone.online < P99_REQUESTS and Measure.TBT_P99 in found.limits:
        say(
            f"{found.alone.online} requests are few for a p99 of the time between tokens: "
            "a longer --duration-s makes it surer"
        )
    return found


def _plan(options: dict[str, Any]) -> Plan:
    if not options["tolerances"] and not options["limits"]:
        raise click.UsageError(
            "give an objective (--tolerance ttft-p99=10% or --slo tbt-p99=50ms), or --calibrate"
        )
    if both := options["tolerances"].keys() & options["limits"].keys():
        raise click.UsageError(f"{min(both)} has a --tolerance and an --slo: give one of them")
    trace_file: Path | None = options.pop("trace_file")
    if (trace_file is None) == (options["rate_per_s"] is None):
        raise click.UsageError("say what the online load is: --online-rps or --trace")
    trace: list[OnlineRequest] = []
    if trace_file is not None:
        try:
            trace = read_trace(trace_file)
        except TraceInvalid as error:
            raise click.UsageError(f"--trace: {error}") from error
    for kind in ("online", "offline"):
        prompt_tokens = options.pop(f"{kind}_prompt_tokens")
        options[kind] = Lengths(prompt_tokens, options.pop(f"{kind}_output_tokens"))
    return Plan(trace=trace, **options)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _check_writable(path: Path) -> None:
    """Before a run of minutes. Raises click.UsageError."""
    try:
        _part(path).write_bytes(b"")
        _part(path).unlink()
    except OSError as error:
        raise click.UsageError(f"can't write {path}: {error.strerror}") from error


def _write(path: Path, data: bytes) -> None:
    """The whole file or nothing of it."""
    part = _part(path)
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise click.ClickException(f"can't write {path}: {error.strerror}") from error
