"""One turn: one system under one cell, and what clients and kernel say of it."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tests.bench import proc, stream_client, wrk
from tests.bench.asks import ask
from tests.bench.cells import Cell, Client
from tests.bench.processes import Absent, output_of
from tests.bench.systems.system import System

WITHIN_S = 60.0
NUMBERS_PER_TURN = 1_000_000  # prompts of two turns never share a number

Figures = dict[str, float]


async def measure(cell: Cell, system: System, turn: int, directory: Path) -> Figures:
    """Figures by name, those of a router only where there is one. Raises Absent."""
    everything = [pid for pids in system.path.values() for pid in pids]
    proc.forget_peak(everything)
    before = _cpu(system)
    figures = await _LOADS[cell.client](cell, system, turn, directory)
    after = _cpu(system)
    answered = figures["answered"]
    if system.router and answered:
        for part, used_s in after.items():
            figures[f"{part}_cpu_us"] = 1e6 * (used_s - before[part]) / answered
        figures["router_peak_mb"] = proc.peak_mb(system.router)
        figures["path_peak_mb"] = proc.peak_mb(everything)
    return figures


def _cpu(system: System) -> Mapping[str, float]:
    parts = {part: proc.cpu_s(pids) for part, pids in system.path.items()}
    return parts | {"front": proc.cpu_s(system.router), "path": sum(parts.values())}


async def _by_wrk(cell: Cell, system: System, turn: int, directory: Path) -> Figures:
    if wrk.program() is None:
        raise Absent("wrk is not installed: apt-get install wrk")
    asked = ask(cell.prompt_tokens, cell.events, cell.gap_ms, model=system.model)
    file = directory / f"turn-{turn}.lua"
    file.write_text(wrk.script(asked, NUMBERS_PER_TURN * turn))
    command = wrk.command(system.urls[0], file, streams=cell.streams, seconds=cell.seconds)
    said = await output_of(command, within_s=WITHIN_S + cell.seconds)
    file.unlink()
    try:
        report = wrk.parse(said.decode())
    except wrk.NoReport as problem:
        raise Absent(str(problem)) from None
    return {
        "answered": report.answered,
        "failed": report.failed,
        "requests_per_s": report.answered / report.seconds,
        "latency_p50_ms": report.latency_p50_ms,
        "latency_p99_ms": report.latency_p99_ms,
    }


async def _by_own_client(cell: Cell, system: System, turn: int, directory: Path) -> Figures:
    plan = stream_client.Plan(
        urls=[urlsplit(url).netloc for url in system.urls],
        model=system.model,
        prompt_tokens=cell.prompt_tokens,
        events=cell.events,
        gap_ms=cell.gap_ms,
        streams=cell.streams,
        each=cell.each,
        ramp_s=cell.ramp_s,
        first=NUMBERS_PER_TURN * turn,
        within_s=WITHIN_S,
    )
    command = (sys.executable, "-m", stream_client.__name__)
    said = await output_of(command, given=plan.model_dump_json().encode(), within_s=WITHIN_S + 30.0)
    seen = stream_client.Seen.model_validate_json(said)
    if not seen.answered:
        raise Absent(f"no stream came through: {seen.why}")
    return {
        "answered": seen.answered,
        "failed": seen.failed,
        "requests_per_s": seen.answered / seen.seconds,
        "ttft_p50_ms": seen.ttft_p50_ms,
        "ttft_p99_ms": seen.ttft_p99_ms,
        "gap_p50_ms": seen.gap_p50_ms,
        "gap_p99_ms": seen.gap_p99_ms,
    }


_LOADS = {Client.WRK: _by_wrk, Client.OWN: _by_own_client}


def machine() -> dict[str, object]:
    """What the numbers depend on beside the programs."""
    return {
        "cores": os.cpu_count(),
        "load_average_1m": os.getloadavg()[0],
        "python": sys.version.split()[0],
    }
