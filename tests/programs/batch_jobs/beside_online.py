"""First tokens of online requests, with a batch job running and without.

    make bench-batch TRACE=conversation_trace.jsonl

Each round plays the same trace twice through a fresh mesh of three regions: alone, and while a job
of `--lines` lines, submitted in us by OpenAI's SDK, runs in all of them. The two take turns in
going first. Ratios are of one round; printed are their medians with the spread.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from openai.types import Batch

from tests.programs.batch_jobs.job import Answers, JobClient, input_file
from tests.programs.live.compare_policies import replay
from tests.programs.options import mooncake_trace
from tests.support.mesh_up import RTT_MS, mesh_up, write_config
from tests.support.result_page import result_page

HOME = "us"
JOB_WITHIN_S = 1800.0
FIGURES = ("p50", "p90")


@result_page("batch-beside-online", "Online first tokens beside a batch job, live")
@click.command()
@click.option(
    "--trace",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    callback=mooncake_trace,
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--limit", type=click.IntRange(1), default=600, show_default=True)
@click.option("--lines", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--replicas", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--pace",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="How many times faster both the engines run and the trace is played.",
)
def main(trace: Path, rounds: int, limit: int, lines: int, replicas: int, pace: float) -> None:
    """Play a trace with and without a batch job."""
    pairs, problems = [], []
    for number in range(rounds):
        results: dict[bool, dict[str, Any]] = {}
        for with_job in (number % 2 == 1, number % 2 == 0):
            played, answers = asyncio.run(
                _play(trace, limit, lines if with_job else 0, replicas, pace)
            )
            results[with_job] = played
            if answers is not None:
                problems += answers.problems(lines)
                played["job_s"] = answers.seconds
            name = "with the job" if with_job else "alone"
            ttft = " ".join(f"{key} {played['ttft_s'][key]:.3f}" for key in FIGURES)
            click.echo(f"round {number + 1}/{rounds} {name}: {played['ok']} ok, {ttft}", err=True)
        pairs.append((results[False], results[True]))
    _print(pairs, lines, problems)
    sys.exit(bool(problems))


async def _play(
    trace: Path, limit: int, lines: int, replicas: int, pace: float
) -> tuple[dict[str, Any], Answers | None]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = write_config(
            directory, replicas=replicas, batch_runners=("batch-0",), rtt_ms=RTT_MS
        )
        async with mesh_up(directory, config=config, time_scale=pace) as mesh:
            if not lines:
                return await replay(mesh, trace, limit, pace, directory), None
            client = JobClient(mesh.endpoint(HOME))
            began = time.monotonic()
            job = await client.submit(input_file(mesh.model, lines))
            await client.until(job.id, _has_begun, JOB_WITHIN_S)
            played = await replay(mesh, trace, limit, pace, directory)
            during = await client.get(job.id)
            assert during.request_counts is not None
            played["answered_during"] = during.request_counts.completed
            return played, await client.answers(job.id, began, JOB_WITHIN_S)


def _has_begun(job: Batch) -> bool:
    return job.request_counts is not None and job.request_counts.completed > 0


def _print(
    pairs: list[tuple[dict[str, Any], dict[str, Any]]], lines: int, wrong: list[str]
) -> None:
    click.echo(f"| online TTFT | alone, s | beside a job of {lines:,} lines, s | ratio | wanted |")
    click.echo("|---|---|---|---|---|")
    for key in FIGURES:
        alone = [pair[0]["ttft_s"][key] for pair in pairs]
        beside = [pair[1]["ttft_s"][key] for pair in pairs]
        ratios = [two / one for one, two in zip(alone, beside, strict=True)]
        cells = (_spread(alone), _spread(beside), f"{_spread(ratios)}", "≤ 1.05")
        click.echo(f"| {key} | {' | '.join(cells)} |")
    done = _spread([pair[1]["answered_during"] for pair in pairs], 0)
    took = _spread([pair[1]["job_s"] for pair in pairs], 0)
    failed = [sum(side["requests"] - side["ok"] for side in pair) for pair in pairs]
    click.echo(f"\nLines answered while the trace was played: {done}; the whole job took {took} s.")
    click.echo(f"Online requests that were not answered: {sum(failed)}.")
    click.echo(f"Every custom_id exactly once: {'; '.join(wrong) or 'yes'}.")


def _spread(values: list[float], digits: int = 3) -> str:
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f}–{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
