"""Parts of a mesh are killed and stopped, one after another, while its clients go on asking.

    make fault-run [QUICK=1] [SEED=7]

Three regions of two routers and two simulated engines each, on delayed leaf links, with twenty
requests under way at any time. Engines stamp every token with prompt, attempt and index, so a mixed
answer, a gap and a repetition show. Every request must end exactly once: whole, as a clear HTTP
error, with an error event, or with the connection of a router that was killed. Fails otherwise.
Before the first fault every one must be whole, and at this load none may be refused as saturated.
"""

import sys
import tempfile
from pathlib import Path

import click
import uvloop

from tests.programs.fault_run.report import table
from tests.programs.fault_run.run import Settings, run
from tests.programs.fault_run.schedule import Kind, Shape, one_round
from tests.support.mesh_up import REGIONS
from tests.support.result_page import result_page

REQUESTS, QUICK_REQUESTS = 5000, 300
ROUNDS, QUICK_ROUNDS = 6, 1
SHAPE = Shape(regions=REGIONS, routers=("r1", "r2"), replicas=2)


@result_page("fault-run", "Faults under load")
@click.command()
@click.option(
    "--quick", is_flag=True, help="One round of every kind of fault, with short stops: two minutes."
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Of the faults, their lengths and pauses, and of what is asked.",
)
@click.option(
    "--requests", type=click.IntRange(1), help=f"At least so many.  [default: {REQUESTS}]"
)
@click.option("--rounds", type=click.IntRange(1), help=f"Of every kind.  [default: {ROUNDS}]")
@click.option(
    "--only",
    "kinds",
    type=click.Choice([kind.value for kind in Kind]),
    multiple=True,
    help="This kind of fault; repeat for more.",
)
@click.option("--streams", type=click.IntRange(1), default=20, show_default=True, help="At a time.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Leave the mesh's files, logs among them, in this directory.",
)
def main(
    quick: bool, seed: int, requests: int | None, rounds: int | None, kinds: tuple[str, ...],
    streams: int, keep: Path | None,
) -> None:  # fmt: skip
    """Break a mesh for ten minutes and print a table; exit 1 if anything happened that must not."""
    chosen = tuple(map(Kind, kinds)) or tuple(Kind)
    settings = Settings(
        seed=seed,
        shape=SHAPE,
        requests=requests or (QUICK_REQUESTS if quick else REQUESTS),
        faults=len(one_round(chosen)) * (rounds or (QUICK_ROUNDS if quick else ROUNDS)),
        kinds=chosen,
        streams=streams,
        quick=quick,
    )
    with tempfile.TemporaryDirectory() as temporary:
        place = keep or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        result = uvloop.run(run(settings, place, lambda line: click.echo(line, err=True)))
    click.echo(table(result))
    sys.exit(bool(result.violations))


if __name__ == "__main__":
    main()
