"""The mesh beside other routers, live, on this machine.

    make bench [QUICK=1] [ONLY=mesh,sglang-router,plain] [ROUNDS=5] [BESIDE=another-checkout]

All systems run side by side over the same scripted engines and are loaded in turns, so that what
the machine does beside falls on all of them.
"""

import asyncio
import dataclasses
import sys
from pathlib import Path

import click
import orjson

from tests.programs.bench import cells
from tests.programs.bench.installs import ENVIRONMENTS
from tests.programs.bench.report import markdown
from tests.programs.bench.results import Results
from tests.programs.bench.run import Settings, run, systems
from tests.programs.bench.spread import Verdict
from tests.programs.bench.targets import LAST_RELEASE, OURS, SINCE_RELEASE, target_results
from tests.support.result_page import result_page

BUILD = Path(__file__).parents[3] / "build" / "bench"
ROUNDS, QUICK_ROUNDS = 5, 3
QUICK_SYSTEMS = ("direct", "mesh", LAST_RELEASE, "sglang-router", "vllm-router")


def _of_different_names(trees: tuple[Path, ...]) -> tuple[Path, ...]:
    """The trees. Raises BadParameter where two would have one name in the tables."""
    names = [tree.name for tree in trees]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise click.BadParameter(f"more than one is named {', '.join(twice)}")
    return trees


@result_page("other-routers", "Beside other routers")
@click.command()
@click.option("--quick", is_flag=True, help="Fewer systems, cells and rounds: a few minutes.")
@click.option("--only", default="", help="Systems and cells, with commas; of each kind, all.")
@click.option("--rounds", type=click.IntRange(1), help="Turns of each system in each cell.")
@click.option(
    "--beside",
    "trees",
    type=click.Path(exists=True, file_okay=False, path_type=Path, resolve_path=True),
    multiple=True,
    callback=lambda ctx, param, value: _of_different_names(value),
    help="Another checkout of the mesh, measured as `mesh of NAME`; repeat it for more.",
)
@click.option("--environments", type=click.Path(path_type=Path), default=ENVIRONMENTS)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=BUILD / "bench")
def main(
    quick: bool, only: str, rounds: int | None, trees: tuple[Path, ...], environments: Path,
    out: Path,
) -> None:  # fmt: skip
    """Measure, print a report, and write OUT.json and OUT.md.

    The status is 1 where the mesh or the last release could not be measured, and where in every
    round the mesh takes more CPU than it for one of the kinds of request, at router or agents.
    """
    names = frozenset(filter(None, (word.strip() for word in only.split(","))))
    known = systems(environments, trees)
    unknown = names - known.keys() - {cell.name for cell in cells.CELLS}
    if unknown:
        every = [*known, *(cell.name for cell in cells.CELLS)]
        raise click.UsageError(f"no system or cell {', '.join(unknown)}; there are {every}")
    usual = QUICK_SYSTEMS if quick else tuple(known)
    wanted = names & known.keys() or {*usual, *(n for n in known if n.startswith("mesh of "))}
    settings = Settings(
        cells=cells.chosen(names, quick),
        rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
        systems={name: start for name, start in known.items() if name in wanted},
        environments=environments,
    )
    found = asyncio.run(run(settings, lambda line: print(line, file=sys.stderr)))
    _write(found, out)
    print(markdown(found))
    sys.exit(status(found))


def status(found: Results) -> int:
    """Of the program."""
    dearer = any(
        row.verdict is Verdict.MISS and row.target in SINCE_RELEASE for row in target_results(found)
    )
    return int(dearer or not found.absent.keys().isdisjoint((OURS, LAST_RELEASE)))


def _write(found: Results, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    document = orjson.dumps(dataclasses.asdict(found), option=orjson.OPT_INDENT_2)
    out.with_suffix(".json").write_bytes(document)
    out.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
    main()
