"""The mesh beside real rival routers, and beside what the twin predicts of each.

    make versus [TRACE=file] [ROUNDS=3] [LIMIT=requests] [QUICK=1] [ONLY=mesh,sglang-router]

The same requests, at the same times and from the same regions, through each system with fresh
engines; rounds in turns, each beginning with another system. The twin plays them too. Engines run
at their own pace, so that a millisecond of our processes counts as a millisecond.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from agents.sim.profiles import A100_MISTRAL
from mesh.replay.tally import percentile
from mesh.sim.world import SETTLE_S
from tests.programs.bench.processes import Absent
from tests.programs.live.versus import judge
from tests.programs.live.versus.machine import MachineWatch
from tests.programs.live.versus.page import Figures, Played, Results, page
from tests.programs.live.versus.play import play
from tests.programs.live.versus.recorded import Recorded, in_time_s, write_conversations
from tests.programs.live.versus.systems import HOME, SYSTEMS, running
from tests.programs.live.versus.twin import MODELS, SEEDS, predict
from tests.programs.options import mooncake_trace
from tests.programs.studies.tables.client_view import PATIENCE_S
from tests.support.mesh_up import REGIONS
from tests.support.result_page import result_page

REQUESTS, QUICK_REQUESTS = 450, 60


def known_systems(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The systems named, `a,b`; a usage error names the known ones."""
    names = tuple(value.split(",")) if value else SYSTEMS
    for name in names:
        if name not in SYSTEMS:
            raise click.BadParameter(f"{name!r}: use {', '.join(SYSTEMS)}", ctx, param)
    return names


@result_page("versus", "The mesh beside real rival routers, and the twin's prediction of each")
@click.command()
@click.option(
    "--trace",
    type=click.Path(exists=True, path_type=Path),
    callback=mooncake_trace,
    help="In Mooncake's form. Without it, generated conversations.",
)
@click.option("--rounds", type=click.IntRange(1), default=None, help="3; 1 with --quick.")
@click.option("--limit", type=click.IntRange(2), default=None, help="Requests of a round.")
@click.option("--speed", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True)
@click.option("--replicas", type=click.IntRange(1), default=4, show_default=True, help="A region.")
@click.option("--only", "systems", callback=known_systems, help="Of the systems, these alone.")
@click.option("--quick", is_flag=True, help="One round of a few requests.")
def main(
    trace: Path | None,
    rounds: int | None,
    limit: int | None,
    speed: float,
    replicas: int,
    systems: tuple[str, ...],
    quick: bool,
) -> None:
    """Measure the mesh and its rivals on the same requests, and the twin's prediction of them."""
    requests = limit or (QUICK_REQUESTS if quick else REQUESTS)
    with _recorded(trace, requests, speed) as recorded:
        live, settings = asyncio.run(
            _play_rounds(recorded, systems, rounds or (1 if quick else 3), replicas)
        )
        twin = {name: _predicted(name, recorded, replicas) for name in live}
        settings |= {name: f"{settings[name]}; the twin: {MODELS[name].text}" for name in live}
        click.echo(page(Results(live, twin, settings), _about(recorded, trace, replicas)))


@contextlib.contextmanager
def _recorded(trace: Path | None, requests: int, speed: float) -> Iterator[Recorded]:
    with tempfile.TemporaryDirectory() as name:
        path = trace or write_conversations(Path(name) / "conversations.jsonl", requests)
        yield Recorded(path, requests, speed)


async def _play_rounds(
    recorded: Recorded, systems: Sequence[str], rounds: int, replicas: int
) -> tuple[dict[str, list[Played]], dict[str, str]]:
    """Each system's rounds, and how it ran or why it did not."""
    live: dict[str, list[Played]] = {name: [] for name in systems}
    settings: dict[str, str] = {}
    for number in range(rounds):
        first = number % len(systems)
        for name in (*systems[first:], *systems[:first]):
            if name not in live:
                continue
            try:
                played, settings[name] = await _play(recorded, name, replicas)
            except Absent as problem:
                settings[name] = f"absent: {problem}"
                del live[name]
                continue
            live[name].append(played)
            mean_s = played.figures[judge.MEAN]
            warning = ": the machine was too busy" if played.use.is_too_busy else ""
            click.echo(f"round {number + 1}/{rounds} {name}: {mean_s:.3f} s{warning}", err=True)
    return live, settings


async def _play(recorded: Recorded, name: str, replicas: int) -> tuple[Played, str]:
    with tempfile.TemporaryDirectory() as folder:
        async with running(name, Path(folder), replicas) as system:
            plan, bodies = recorded.plan(), recorded.bodies(A100_MISTRAL.model)
            await asyncio.sleep(SETTLE_S)  # as the twin's fleet has, to exchange its state
            with MachineWatch() as watch:
                seen = await play(plan, bodies, system.endpoints)
    late_s = sorted(one.late_s for one in seen)
    lost = ", ".join(f"{why} {count}" for why, count in sorted(judge.reasons(seen).items()))
    played = Played(_figures(recorded, seen), watch.use, percentile(late_s, 0.99), lost)
    return played, system.settings


def _predicted(name: str, recorded: Recorded, replicas: int) -> list[Figures]:
    return [_figures(recorded, predict(name, recorded, replicas, seed)) for seed in SEEDS]


def _figures(recorded: Recorded, seen: Sequence[judge.Seen]) -> Figures:
    plan = recorded.plan()
    objectives_s = [in_time_s(A100_MISTRAL, one.request.input_tokens) for one in plan]
    return judge.figures(seen, objectives_s, plan[-1].due_s)


def _about(recorded: Recorded, trace: Path | None, replicas: int) -> str:
    plan = recorded.plan()
    tokens = sum(one.request.input_tokens for one in plan) / len(plan)
    generated = f"{len(plan)} requests of generated conversations"
    source = f"The first {len(plan)} requests of {trace.name}" if trace else generated
    return (
        f"{source} in {plan[-1].due_s:.0f} s, {tokens:,.0f} tokens of prompt in the mean; "
        f"{replicas * len(REGIONS)} simulated A100s ({A100_MISTRAL.name}, pace 1) in "
        f"{len(REGIONS)} regions, us asks as much as both others. Round trips: us-eu 80 ms, "
        "us-ap 150 ms, eu-ap 220 ms. Medians of the rounds, lowest and highest in brackets; "
        f"the twin's of {len(SEEDS)} seeds. A lost request counts with {PATIENCE_S:.0f} s, its "
        f"client's patience.\n\nA rival is one process in {HOME}, the busiest region; its clients "
        "and engines elsewhere are behind TCP links that delay each way by half the round trip, "
        "but no handshake, which favours it. sglang-router's delayed acknowledgements cost nothing "
        "here: its head is acknowledged before an A100's first token."
    )


if __name__ == "__main__":
    main()
