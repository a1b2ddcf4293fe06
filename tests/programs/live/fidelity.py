"""Plays one trace through real processes on a real bus and through the twin, and compares.

    make fidelity TRACE=conversation_trace.jsonl

The same mesh twice: three regions, simulated engines, wide-area delay. Live, the engines run
`--pace` times as fast as their profile and the trace is played as much faster; so the twin's
profile is as much faster too, and all that is not an engine (round trips, heartbeats) has its own
time in both. What the twin leaves out is the time of our own processes: that is the difference.
"""

import asyncio
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from agents.sim.profiles import PROFILES, Profile
from mesh.cli.choices import known_policy
from mesh.core.model.settings import RouterSettings
from mesh.replay.settings import ReplaySettings
from mesh.sim.config import WorldConfig
from mesh.sim.workloads.traces import from_trace
from mesh.sim.world import run
from schemas.ids import RegionId
from tests.programs.live.compare_policies import play
from tests.programs.options import mooncake_trace
from tests.support.mesh_up import REGIONS
from tests.support.result_page import result_page

PROFILE = "a100-mistral-7b"  # of the demo's engines
# name, how to read it, how far apart the two may be, and whether as a ratio
FIGURES = (
    ("TTFT p50", lambda result: result["ttft_s"]["p50"], 0.15, True),
    ("TTFT p90", lambda result: result["ttft_s"]["p90"], 0.15, True),
    ("cached prompt tokens", lambda result: result["cached_token_ratio"], 0.03, False),
    ("end to end p50", lambda result: result["e2e_s"]["p50"], None, True),
)


@result_page("fidelity", "The twin beside the real thing")
@click.command()
@click.option(
    "--trace",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    callback=mooncake_trace,
)
@click.option("--policy", default="mesh", show_default=True, callback=known_policy)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--limit", type=click.IntRange(1), default=600, show_default=True)
@click.option("--replicas", type=click.IntRange(1), default=4, show_default=True)
@click.option("--pace", type=click.FloatRange(0, min_open=True), default=4.0, show_default=True)
def main(trace: Path, policy: str, rounds: int, limit: int, replicas: int, pace: float) -> None:
    """Compare the twin with the real thing on a recorded trace."""
    twin = _twin(trace, policy, limit, replicas, pace)
    live = []
    for number in range(1, rounds + 1):
        result = asyncio.run(play(trace, policy, limit, replicas, pace))
        live.append(result)
        click.echo(f"round {number}/{rounds}: {result['ok']} ok of {result['requests']}", err=True)
    _print(live, twin)


def _twin(trace: Path, policy: str, limit: int, replicas: int, pace: float) -> dict[str, Any]:
    seed = ReplaySettings.model_fields["seed"].default
    workload = from_trace(
        trace,
        "mooncake",
        regions={RegionId(region): 1.0 for region in REGIONS},
        seed=seed,
        limit=limit,
        speed=pace,
    )
    profile = faster(PROFILES[PROFILE], pace)
    fleet = {RegionId(region): [profile] * replicas for region in REGIONS}
    settings = RouterSettings(policy=policy)
    return run(workload, WorldConfig(regions=fleet, settings=settings, seed=seed))


def faster(profile: Profile, pace: float) -> Profile:
    """The same engine with all its times divided by `pace`."""
    long = profile.long_prefill
    return replace(
        profile,
        knots=tuple((tokens, seconds / pace) for tokens, seconds in profile.knots),
        token_s=profile.token_s / pace,
        sequence_s=profile.sequence_s / pace,
        context_s=profile.context_s / pace,
        arrival_s=profile.arrival_s / pace,
        arrival_token_s=profile.arrival_token_s / pace,
        long_prefill=long
        and replace(
            long,
            per_token_s=long.per_token_s / pace,
            per_context_token_s=long.per_context_token_s / pace,
            per_pair_s=long.per_pair_s / pace,
        ),
    )


def _print(live: list[dict[str, Any]], twin: dict[str, Any]) -> None:
    table = Table("figure", "live", "twin", "apart", "at most")
    for name, read, most, as_ratio in FIGURES:
        values = [read(result) for result in live]
        middle = statistics.median(values)
        apart = read(twin) / middle - 1.0 if as_ratio else read(twin) - middle
        table.add_row(
            name,
            f"{middle:.3f} ({min(values):.3f}–{max(values):.3f})",
            f"{read(twin):.3f}",
            f"{apart:+.1%}" if as_ratio else f"{100 * apart:+.1f} points",
            "-" if most is None else f"{most:.0%}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
