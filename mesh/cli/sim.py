"""`mesh sim`: policies compared in the twin, or a live router's recording replayed."""

import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

from mesh.cli.modelled import given, options_of, validated, with_options
from mesh.cli.unusable import Unusable
from mesh.core.recording import RecordingInvalid
from mesh.replay.report import RunReport, table_console, write_report
from mesh.sim.recording_replay import replay
from mesh.sim.study.cells import CellResult, labels
from mesh.sim.study.results import out_file, print_study
from mesh.sim.study.run_cells import RunFailed, play_all, progress_bar
from mesh.sim.study.scenario import checked_policy
from mesh.sim.study.settings import SimSettings
from schemas.settings import parse_pushing

EXIT_DIFFERENT = EXIT_ALL_FAILED = 1
EXIT_INTERRUPTED = 130
WITH_REPLAY = ("policy", "pushing")


@click.command()
@with_options(options_of(SimSettings))
@click.option(
    "--replay",
    "recording",
    help="Feed a recording of `mesh router --record` to a fresh core, with the --policy or "
    "--pushing given here or else its own, and show where it decides otherwise.",
    metavar="RECORDING",
    type=click.Path(path_type=Path),
)
@click.pass_context
def command(ctx: click.Context, /, recording: Path | None, **options: object) -> None:
    """Play a trace or a workload in a simulated mesh, and compare policies.

    \b
      mesh sim --workload chat --policy mesh,round-robin
      mesh sim --trace conversation_trace.jsonl --load 0.7,0.9 --out sim.json
      mesh sim --replay router.recording --policy round-robin

    The routers and agents are the live ones' own code; engines, network and time are simulated.
    Lists are separated by commas, and every combination is one run. The same seed gives the same
    results, all but the decisions a second, which are measured.

    The table shows what fits the terminal; --out has everything.

    --rtt reads the round trips of a mesh.toml, every pair of --regions once:

    \b
      [[links]]
      between = ["us", "eu"]
      rtt_ms = 80

    Exit code 0: everything was played; 1: every request of every run failed, the results can't be
    written, or a replay without changed options found a difference; 2: bad input,
    nothing was played; 130: interrupted, the runs that were complete are given.
    """
    if recording is not None:
        ctx.exit(_replay(recording, given(options)))
    settings = validated(SimSettings, given(options))
    if settings.pictures is not None and find_spec("matplotlib") is None:
        raise Unusable(
            "--pictures draws with matplotlib, which is not installed: "
            "pip install 'inference-mesh[pictures]'"
        )
    study, is_whole = _play(settings)
    if study:
        _show_and_write(settings, study)
    if not is_whole:
        ctx.exit(EXIT_INTERRUPTED)
    if all(played.report["failed"] == played.report["requests"] for played in study.values()):
        ctx.exit(EXIT_ALL_FAILED)


def _play(settings: SimSettings) -> tuple[dict[str, CellResult], bool]:
    """Every complete run by its name, in their order, and whether these are all."""
    cells = settings.cells()
    done: dict[int, CellResult] = {}
    is_whole = True
    console = Console(stderr=True)
    try:
        with progress_bar(len(cells), console) as show:
            runs = play_all(settings, cells, jobs=settings.jobs, perf=time.process_time, show=show)
            for number, played in runs:
                done[number] = played
                show(number, played.report["requests"], 1.0)
    except KeyboardInterrupt:
        is_whole = False
    except ValueError as error:
        raise Unusable(str(error)) from error
    except RunFailed as error:
        raise click.ClickException(str(error)) from error
    names = labels(cells)
    return {names[number]: done[number] for number in sorted(done)}, is_whole


def _show_and_write(settings: SimSettings, study: Mapping[str, CellResult]) -> None:
    reports = {name: played.report for name, played in study.items()}
    print_study(reports, table_console())
    try:
        for path in _write(settings, study, reports):
            click.echo(f"wrote {path}")
    except OSError as error:
        raise click.ClickException(f"can't write {error.filename}: {error.strerror}") from error


def _write(
    settings: SimSettings, study: Mapping[str, CellResult], reports: Mapping[str, RunReport]
) -> Iterator[Path]:
    """Each file, once it is written."""
    if settings.out is not None:
        write_report(settings.out, out_file(settings, reports))
        yield settings.out
    if settings.pictures is not None:
        from mesh.sim.study.pictures import draw  # matplotlib may not be there

        yield from draw(settings.pictures, study)


def _replay(recording: Path, options: Mapping[str, object]) -> int:
    unsuited = sorted(options.keys() - set(WITH_REPLAY))
    if unsuited:
        raise Unusable(f"--{unsuited[0].replace('_', '-')} does not go with --replay")
    try:
        changed = _changed({name: str(value) for name, value in options.items()})
        comparison = replay(recording, **changed)
    except OSError as error:
        raise Unusable(f"--replay {recording}: {error.strerror}") from error
    except (RecordingInvalid, ValueError) as error:
        raise Unusable(str(error)) from error
    click.echo(str(comparison))
    return 0 if comparison.agrees or changed else EXIT_DIFFERENT


def _changed(options: Mapping[str, str]) -> dict[str, object]:
    changed: dict[str, object] = {}
    if "policy" in options:
        changed["policy"] = checked_policy(options["policy"])
    if "pushing" in options:
        changed["pushing"] = parse_pushing(options["pushing"])
    return changed
