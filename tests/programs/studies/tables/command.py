"""What every table's command has in common: its options, its progress, where the text goes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from tests.programs.studies.tables.case import Case
from tests.programs.studies.tables.plays import play_all
from tests.programs.studies.tables.result_files import Result, ResultFiles
from tests.support.result_page import result_page

FOLDER = Path(".mesh/study")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of a table is played. `traces`: the folder of recorded traces, if there is one."""

    quick: bool
    full: bool
    seeds: int
    traces: Path | None

    def pick(self, quick: float, default: float, full: float | None = None) -> float:
        """One of three numbers."""
        if self.quick:
            return quick
        return full if self.full and full is not None else default


Declare = Callable[[Size], Sequence[Case]]
Write = Callable[[Sequence[Case], Sequence[Result]], str]


def command(
    name: str, declare: Declare, write: Write, text: str, *, seeds: int = 2
) -> click.Command:
    """The command of one table: play what is declared, print what is written.

    `seeds`: repetitions of the default form; the short form has one, the long one two.
    """

    @result_page(name, text.rstrip("."))
    @click.command(name, help=text)
    @click.option("--quick", is_flag=True, help="A short form: fewer, shorter runs.")
    @click.option("--full", is_flag=True, help="A long form: more runs than the default.")
    @click.option("--seeds", "repeat", type=click.IntRange(1), default=None, help="Repetitions.")
    @click.option("--jobs", type=click.IntRange(1), default=2, show_default=True)
    @click.option(
        "--traces",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        envvar="TRACES",
        help="Folder with mooncake/, azure/, agent_traces/: without it no trace is played.",
    )
    def played(quick: bool, full: bool, repeat: int | None, jobs: int, traces: Path | None) -> None:
        size = Size(
            quick=quick,
            full=full,
            seeds=repeat or (1 if quick else 2 if full else seeds),
            traces=traces,
        )
        began_at = time.monotonic()
        cases = declare(size)
        results = play_all(cases, ResultFiles(FOLDER), jobs=jobs, show=show_run)
        click.echo(write(cases, results))
        wall_s = time.monotonic() - began_at
        alone_s = sum(result["wall_s"] for result in results)
        click.echo(
            f"\n{len(cases)} runs, {wall_s:.0f} s now, {alone_s:.0f} s of one core in all", err=True
        )

    return played


def show_run(done: int, total: int, case: Case, wall_s: float) -> None:
    """A line of progress."""
    click.echo(f"[{done}/{total}] {wall_s:5.1f} s  {' · '.join(map(str, case.tags))}", err=True)
