"""How long the replicas of a region are idle when all its routers are killed, on real processes.

    make study-loss [TOGETHER=2]

Three regions with two routers and two simulated engines each, on delayed leaf links, under a
steady load from all regions. A round kills every router of a region with SIGKILL, waits until a
neighbour serves its replicas, lets the routers come back after some seconds, and looks on until
the replicas are theirs again. Regions take turns, alone or two together at the same moment; then
one is left that must serve both. Whoever asks a router that is gone is a client
that goes on to the next region; what it sees of requests under way is an error, and none may be
left without a word.
"""

import asyncio
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click

from tests.support.mesh_up import REGIONS, write_config
from tests.support.region_loss import LOST, Round, fragile_mesh, lose, watching
from tests.support.result_page import result_page

ROUND_TRIPS_MS = {("us", "eu"): 80, ("us", "ap"): 150, ("eu", "ap"): 220}
EVERY_S = 0.05
TOKENS = 64
TIME_SCALE = 4.0  # of the engines: answers take half a second, so ten are under way
SETTLE_S = 3.0

FIGURES: tuple[tuple[str, Callable[[Round], float]], ...] = (
    ("until the lease is taken", lambda one: one.adopted_s),
    ("until its replicas serve again", lambda one: one.served_s),
    ("from a router's first sign of life until the hand-back", lambda one: one.back_s),
    ("longest that two regions said they own it", lambda one: one.both_s),
)


@result_page("region-loss", "A region without routers")
@click.command()
@click.option("--quick", is_flag=True, help="Three rounds, one a region.")
@click.option("--full", is_flag=True, help="Fifteen rounds.")
@click.option("--rounds", type=click.IntRange(1), default=None, help="So many.  [default: 6]")
@click.option(
    "--together",
    type=click.IntRange(1, len(REGIONS) - 1),
    default=1,
    show_default=True,
    help="Regions that are lost at once.",
)
@click.option("--traces", type=click.Path(path_type=Path), help="Not used here.")
def main(quick: bool, full: bool, rounds: int | None, together: int, traces: Path | None) -> None:
    """Kill the routers of one region after another, and print how long everything took."""
    count = rounds or (3 if quick else 15 if full else 6)
    played = asyncio.run(_play(count, together))
    click.echo(_table(played))


async def _play(count: int, together: int) -> list[dict[str, Round]]:
    played: list[dict[str, Round]] = []
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        config = write_config(here, replicas=2, routers=("r1", "r2"), rtt_ms=ROUND_TRIPS_MS)
        async with (
            fragile_mesh(here, config, time_scale=TIME_SCALE) as mesh,
            watching(mesh, REGIONS) as seen,
        ):
            await asyncio.sleep(SETTLE_S)
            for number in range(count):
                lost = [REGIONS[(number + more) % len(REGIONS)] for more in range(together)]
                others = [name for name in REGIONS if name not in lost]
                losses = await lose(mesh, seen, lost, others, every_s=EVERY_S, tokens=TOKENS)
                played.append(losses)
                click.echo(f"round {number + 1}/{count}: {losses}", err=True)
                await asyncio.sleep(SETTLE_S)
    return played


def _table(played: list[dict[str, Round]]) -> str:
    losses = [(region, one) for round_ in played for region, one in round_.items()]
    lines = ["| seconds | median | least | most |", "| --- | ---: | ---: | ---: |"]
    for name, figure in FIGURES:
        values = [figure(one) for _, one in losses]
        shown = (statistics.median(values), min(values), max(values))
        lines.append(f"| {name} | {' | '.join(f'{value:.2f}' for value in shown)} |")
    ends: Counter[str] = sum((next(iter(round_.values())).ends for round_ in played), Counter())
    outcomes = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    by = Counter(f"{region} by {one.by}" for region, one in losses)
    return "\n".join(
        [
            *lines,
            "",
            f"{len(played)} rounds; {ends.total()} requests: {outcomes}; "
            f"without a word: {ends[LOST]}.",
            f"Adopted: {', '.join(f'{what} ({count})' for what, count in by.items())}.",
        ]
    )


if __name__ == "__main__":
    main()
