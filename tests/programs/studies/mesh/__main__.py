"""`mesh` against every other policy, on every workload and trace, at loads from 60% to 130%.

    make study-mesh [QUICK=1 | FULL=1] [TRACES=folder] [SEARCH=1 | SENSITIVITY=1]

Central routers push blindly, as they are published; `rivals` says what else plays, `matrix` the
cells, `judge` how they are compared. Hours of one core: each run is kept in `.mesh/study` as it
ends, so the study may be killed and started again, and `--page` writes the page of what is there.
"""

import time
from pathlib import Path

import click

from tests.programs.studies.mesh import page, search
from tests.programs.studies.mesh import sensitivity as conditions
from tests.programs.studies.mesh.matrix import SEEDS, Matrix
from tests.programs.studies.mesh.rivals import RIVALS
from tests.programs.studies.tables.client_view import PATIENCE_S
from tests.programs.studies.tables.command import FOLDER, Size, show_run
from tests.programs.studies.tables.plays import play_missing
from tests.programs.studies.tables.result_files import ResultFiles
from tests.support.result_page import result_page


@result_page("mesh", "`mesh` against the other policies")
@click.command()
@click.option("--quick", is_flag=True, help="A short form: fewer, shorter runs.")
@click.option("--full", is_flag=True, help="A long form: more runs than the default.")
@click.option("--seeds", type=click.IntRange(1), default=None, help="Seeds of every cell at first.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="TRACES",
    help="Folder with mooncake/, azure/, agent_traces/: without it no trace is played.",
)
@click.option(
    "--requests", type=click.IntRange(2), help="Requests of every run, the warm-up included."
)
@click.option(
    "--patience",
    type=click.FloatRange(0, min_open=True),
    default=PATIENCE_S,
    show_default=True,
    help="Seconds after which a client without a first token hangs up.",
)
@click.option(
    "--cell", "only", multiple=True, help="Play cells whose name begins so: 'chat, L4'. Repeatable."
)
@click.option(
    "--rival",
    "rivals",
    multiple=True,
    type=click.Choice([one.name for one in RIVALS]),
    help="Play only these rivals. Repeatable.",
)
@click.option("--for-s", type=click.FloatRange(0), help="Begin no run after so many seconds.")
@click.option("--page", "page_only", is_flag=True, help="Play nothing: write what is there.")
@click.option("--search", "searched", is_flag=True, help="Search the rivals' settings instead.")
@click.option("--sensitivity", is_flag=True, help="Play a few cells with less known instead.")
def main(
    *,
    quick: bool,
    full: bool,
    seeds: int | None,
    jobs: int,
    traces: Path | None,
    requests: int | None,
    patience: float,
    only: tuple[str, ...],
    rivals: tuple[str, ...],
    for_s: float | None,
    page_only: bool,
    searched: bool,
    sensitivity: bool,
) -> None:
    """mesh against every other policy."""
    size = Size(quick=quick, full=full, seeds=seeds or (1 if quick else SEEDS), traces=traces)
    matrix = Matrix(
        size=size,
        requests=requests,
        patience_s=patience,
        only=only,
        rivals=[one for one in RIVALS if not rivals or one.name in rivals],
    )
    files = ResultFiles(FOLDER)
    began_at = time.monotonic()

    def is_over() -> bool:
        return page_only or (for_s is not None and time.monotonic() - began_at >= for_s)

    for asked, part in ((searched, search), (sensitivity, conditions)):
        if asked:
            play_missing(part.wanted(matrix), files, jobs=jobs, show=show_run, until=is_over)
            click.echo(part.written(matrix, files))
            return
    while not is_over() and any(not files.has(one.key()) for one in matrix.wanted(files)):
        runs = list(matrix.wanted(files))
        play_missing(runs, files, jobs=jobs, show=show_run, until=is_over)
    click.echo(page.written(matrix, files))
    wanted = [one.key() for one in matrix.wanted(files)]
    played = [result for key in wanted if (result := files.get(key)) is not None]
    hours = sum(result["cpu_s"] for result in played) / 3600
    click.echo(f"\n{len(played)} of {len(wanted)} runs, {hours:.2f} h of one core", err=True)


if __name__ == "__main__":
    main()
