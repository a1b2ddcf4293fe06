"""Load by aiperf, NVIDIA's client for language models: its command line and its report."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from tests.programs.bench.cells import Cell
from tests.programs.bench.systems.system import System

NAME = "aiperf"
EXPORT = "profile_export_aiperf.json"
SEED = 1


def command(
    programs: Path, tokenizer: Path, cell: Cell, system: System, out: Path
) -> tuple[str, ...]:
    """`cell.each` streams on each of its connections; the prompts are aiperf's own."""
    urls = [word for url in system.urls for word in ("--url", url)]
    return (
        *(str(programs / NAME), "profile", "--model", system.model, *urls),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(tokenizer)),
        *("--isl", str(cell.prompt_tokens), "--osl", str(cell.events)),
        *("--extra-inputs", f"max_tokens:{cell.events}", "--extra-inputs", f"seed:{cell.gap_ms}"),
        *("--concurrency", str(cell.streams), "--request-count", str(cell.streams * cell.each)),
        *("--workers-max", "1", "--random-seed", str(SEED), "--use-server-token-count"),
        *("--ui", "none", "--artifact-dir", str(out)),
    )


def parse(text: bytes, asked: int) -> dict[str, float]:
    """Figures of an export, in milliseconds; NaN for what it does not have."""
    export: Mapping[str, Any] = orjson.loads(text)

    def of(metric: str, figure: str) -> float:
        value = (export.get(metric) or {}).get(figure)
        return math.nan if value is None else float(value)

    answered = of("request_count", "avg")  # those with an error are not among them
    return {
        "answered": answered,
        "failed": asked - answered,
        "requests_per_s": of("request_throughput", "avg"),
        "ttft_p50_ms": of("time_to_first_token", "p50"),
        "ttft_p99_ms": of("time_to_first_token", "p99"),
        "gap_p50_ms": of("inter_chunk_latency", "p50"),
        "gap_p99_ms": of("inter_chunk_latency", "p99"),
    }
