"""One turn: one system under one cell, and the figures of clients and kernel."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tests.programs.bench import aiperf, proc, stream_client, wrk
from tests.programs.bench.cells import Cell, Client
from tests.programs.bench.installs import installed, tiny_model
from tests.programs.bench.processes import Absent, output_of
from tests.programs.bench.request_bodies import request_body
from tests.programs.bench.systems.system import System

WITHIN_S = 60.0
START_WITHIN_S = 30.0
AIPERF_WITHIN_S = 180.0  # it starts many processes
NUMBERS_PER_TURN = 1_000_000  # prompts of two turns never share a number

Figures = dict[str, float]


class Meter:
    """Takes turns; knows where to put files, and where installed clients are."""

    def __init__(self, directory: Path, environments: Path) -> None:
        self._directory, self._environments = directory, environments
        self._loads = {
            Client.WRK: self._by_wrk,
            Client.OWN: self._by_own_client,
            Client.AIPERF: self._by_aiperf,
        }

    async def measure(self, cell: Cell, system: System, turn: int) -> Figures:
        """Figures by name, those of a router only where there is one. Raises Absent."""
        if cell.prompt_tokens > (system.prompt_tokens_max or cell.prompt_tokens):
            raise Absent(f"prompts of at most {system.prompt_tokens_max:,} tokens")
        everything = [pid for pids in system.path.values() for pid in pids]
        proc.forget_peak(everything)
        before = _cpu(system)
        figures = await self._loads[cell.client](cell, system, turn)
        after = _cpu(system)
        answered = figures["answered"]
        if not answered > 0:
            raise Absent("nothing was answered")
        if system.router and cell.client is not Client.AIPERF:  # which takes long to start
            for part, used_s in after.items():
                figures[f"{part}_cpu_us"] = 1e6 * (used_s - before[part]) / answered
            figures["router_peak_mb"] = proc.peak_mb(system.router)
            figures["path_peak_mb"] = proc.peak_mb(everything)
        return figures

    async def _by_wrk(self, cell: Cell, system: System, turn: int) -> Figures:
        if wrk.program() is None:
            raise Absent("wrk is not installed: apt-get install wrk")
        asked = request_body(cell.prompt_tokens, cell.events, cell.gap_ms, model=system.model)
        file = self._directory / f"turn-{turn}.lua"
        file.write_text(wrk.script(asked, NUMBERS_PER_TURN * turn))
        command = wrk.command(system.urls[0], file, streams=cell.streams, seconds=cell.seconds)
        output = await output_of(command, within_s=WITHIN_S + cell.seconds)
        file.unlink()
        try:
            report = wrk.parse(output.decode())
        except wrk.NoReport as problem:
            raise Absent(str(problem)) from None
        return {
            "answered": report.answered,
            "failed": report.failed,
            "requests_per_s": report.answered / report.seconds,
            "latency_p50_ms": report.latency_p50_ms,
            "latency_p99_ms": report.latency_p99_ms,
        }

    async def _by_own_client(self, cell: Cell, system: System, turn: int) -> Figures:
        plan = stream_client.Plan(
            urls=[urlsplit(url).netloc for url in system.urls],
            model=system.model,
            prompt_tokens=cell.prompt_tokens,
            events=cell.events,
            gap_ms=cell.gap_ms,
            streams=cell.streams,
            each=cell.each,
            ramp_s=cell.ramp_s,
            acks_at_once=cell.acks_at_once,
            in_step=cell.in_step,
            first=NUMBERS_PER_TURN * turn,
            within_s=WITHIN_S,
        )
        command = (sys.executable, "-m", stream_client.__name__)
        given = plan.model_dump_json().encode()
        output = await output_of(command, given=given, within_s=WITHIN_S + START_WITHIN_S)
        seen = stream_client.Seen.model_validate_json(output)
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

    async def _by_aiperf(self, cell: Cell, system: System, turn: int) -> Figures:
        programs = await installed(aiperf.NAME, self._environments)
        tokenizer = self._directory / "tokenizer"
        if not tokenizer.exists():
            await tiny_model(programs, tokenizer)
        out = self._directory / f"aiperf-{turn}"
        command = aiperf.command(programs, tokenizer, cell, system, out)
        await output_of(command, within_s=AIPERF_WITHIN_S)
        return aiperf.parse((out / aiperf.EXPORT).read_bytes(), cell.streams * cell.each)


def _cpu(system: System) -> Mapping[str, float]:
    """By part, of the router that clients talk to (`front`), and of all (`path`); read once."""
    groups = {**system.path, **system.beside}
    used = {pid: proc.cpu_s([pid]) for pids in groups.values() for pid in pids}
    parts = {part: sum(used[pid] for pid in pids) for part, pids in groups.items()}
    front = sum(used[pid] for pid in system.router)
    return parts | {"front": front, "path": sum(parts[part] for part in system.path)}


def machine() -> dict[str, object]:
    """What the numbers depend on beside the programs, before anything is started."""
    return {
        "cores": os.cpu_count(),
        "load average before": round(os.getloadavg()[0], 1),
        "python": sys.version.split()[0],
    }
