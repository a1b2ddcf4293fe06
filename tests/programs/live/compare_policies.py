"""Plays one trace through three regions under each policy, in turns, and compares.

    make compare TRACE=conversation_trace.jsonl

Every round starts a fresh mesh for every policy, so no cache outlives its turn, and the policies
take turns inside a round, so that a slow minute of the machine hits them alike. What is printed
are medians over the rounds with their spread, and ratios to the first policy.
"""

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.table import Table

from tests.programs.options import known_policies, mooncake_trace
from tests.support.mesh_up import RTT_MS, MeshUp, mesh_up, write_config
from tests.support.result_page import result_page

# name, unit, how to read it from a result
FIGURES = (
    ("cached prompt tokens", "", lambda result: result["cached_token_ratio"]),
    ("TTFT mean", "s", lambda result: result["ttft_s"]["mean"]),
    ("TTFT p50", "s", lambda result: result["ttft_s"]["p50"]),
    ("TTFT p90", "s", lambda result: result["ttft_s"]["p90"]),
    ("end to end mean", "s", lambda result: result["e2e_s"]["mean"]),
)

Results = dict[str, list[dict[str, Any]]]


@result_page("compare-policies", "Placement policies on a real trace, live")
@click.command()
@click.option(
    "--trace",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    callback=mooncake_trace,
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("round-robin", "prefix-tree"),
    callback=known_policies,
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--replicas", type=click.IntRange(1), default=4, show_default=True)
@click.option(
    "--pace",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="How many times faster both the engines run and the trace is played.",
)
def main(
    trace: Path, policies: tuple[str, ...], rounds: int, limit: int, replicas: int, pace: float
) -> None:
    """Compare placement policies on a recorded trace."""
    results: Results = {policy: [] for policy in policies}
    for round_number in range(1, rounds + 1):
        for policy in policies:
            result = asyncio.run(play(trace, policy, limit, replicas, pace))
            results[policy].append(result)
            counts = ", ".join(f"{result[key]} {key}" for key in ("ok", "shed", "failed"))
            click.echo(f"round {round_number}/{rounds} {policy}: {counts}", err=True)
    _print(results)


async def play(trace: Path, policy: str, limit: int, replicas: int, pace: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = write_config(directory, replicas=replicas, rtt_ms=RTT_MS)
        arguments = ("--policy", policy)
        async with mesh_up(directory, *arguments, config=config, time_scale=pace) as mesh:
            return await replay(mesh, trace, limit, pace, directory)


async def replay(
    mesh: MeshUp, trace: Path, limit: int, pace: float, directory: Path
) -> dict[str, Any]:
    """Play the trace against the mesh's three regions; the figures of `mesh replay`."""
    out = directory / "result.json"
    urls = [f"--url={region}={mesh.endpoint(region)}" for region in ("us", "eu", "ap")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mesh.cli.main", "replay", *urls),
        *("--trace", str(trace), "--format", "mooncake", "--limit", str(limit)),
        *("--speed", str(pace), "--out", str(out)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0, "the replay failed; its output is above"
    played: dict[str, Any] = orjson.loads(out.read_bytes())
    return played


def _print(results: Results) -> None:
    first = next(iter(results))
    table = Table("figure", *results, f"ratio to {first}")
    for name, unit, read in FIGURES:
        medians = {
            policy: statistics.median(read(result) for result in played)
            for policy, played in results.items()
        }
        cells = []
        for policy, played in results.items():
            values = [read(result) for result in played]
            spread = f"{min(values):.3f}–{max(values):.3f}"
            cells.append(f"{medians[policy]:.3f}{unit and ' ' + unit} ({spread})")
        last = list(results)[-1]
        table.add_row(name, *cells, f"{medians[last] / medians[first]:.2f}×")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
