"""`mesh sim`: policies compared in the twin, or a live router's recording replayed."""

import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

from mesh.cli.modelled import given, option, validated, with_options
from mesh.cli.scenario_options import FILE, SCENARIO_OPTIONS
from mesh.cli.unusable import Unusable
from mesh.core.policies import POLICIES
from mesh.core.recording import RecordingInvalid
from mesh.core.region.pushing import parse_pushing
from mesh.core.settings import RouterSettings
from mesh.core.waiting.hold_order import HoldOrder
from mesh.replay.report import Report, write_report
from mesh.replay.tables import table_console
from mesh.sim.replay import replay
from mesh.sim.study.cells import Played, labels
from mesh.sim.study.out import out_file, write_csv
from mesh.sim.study.parallel import RunFailed, play_all
from mesh.sim.study.progress import StudyBar
from mesh.sim.study.scenario import checked_policy
from mesh.sim.study.settings import SimSettings
from mesh.sim.study.table import print_study
from mesh.sim.twin_policies import TWIN_ONLY

EXIT_DIFFERENT = EXIT_ALL_FAILED = 1
EXIT_INTERRUPTED = 130
WITH_REPLAY = ("policy", "pushing", "hold_order")

_OPTIONS = (
    *SCENARIO_OPTIONS[:3],
    option(
        "--policy",
        f"Policies to compare: {', '.join((*POLICIES, *TWIN_ONLY))}. Options follow a colon, as in "
        "cache-aware:0.3/64/1.5.",
        metavar="POLICY,…",
        default=RouterSettings().policy,
    ),
    option(
        "--topology",
        "Topologies to compare: mesh (a router in every region, all peers), region-local (no "
        "peers), central:REGION (one router for all).",
        metavar="TOPOLOGY,…",
        default="mesh",
    ),
    option(
        "--pushing",
        "Pushing rules to compare: when a replica may be given more work: blind, outstanding:N, "
        "pending.",
        metavar="PUSHING,…",
        default="pending",
    ),
    option(
        "--load",
        "Loads to compare, as shares of what the fleet can do: 0.7,0.9. Sets the speed of a trace "
        "or an open loop.",
        metavar="X,…",
    ),
    option(
        "--regions",
        "Replicas per region. Repeat the option to compare fleets.",
        metavar="REGION=N,…",
        multiple=True,
        default="us=4,eu=4,ap=4",
    ),
    *SCENARIO_OPTIONS[3:],
    option("--jobs", "Runs at a time, each in a process of its own.", metavar="N", default="1"),
    option("--out", "Write the results as JSON to this file.", type=FILE),
    option("--csv", "Write them as CSV, a line for each run and region.", type=FILE),
    option("--pictures", "Draw them, as SVG files in this folder.", metavar="DIR", type=FILE),
)


@click.command()
@with_options(_OPTIONS)
@click.option(
    "--replay",
    "recording",
    help="Feed a recording of `mesh router --record` to a fresh core, with the --policy, "
    "--pushing or --hold-order given here or else its own, and show where it decides otherwise.",
    metavar="RECORDING",
    type=FILE,
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

    The table shows what fits the terminal; --out and --csv have everything.

    --rtt reads pairs of regions with the milliseconds there and back, every pair of --regions
    once. A line each, or the same as JSON:

    \b
      us,eu,80
      us,ap,150
      eu,ap,220

    \b
      {"us-eu": 80, "us-ap": 150, "eu-ap": 220}

    Exit code 0: everything was played; 1: every request of every run failed, the results can't be
    written, or a replay found a difference without being told to change anything; 2: bad input,
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
        _hand_over(settings, study)
    if not is_whole:
        ctx.exit(EXIT_INTERRUPTED)
    if all(played.report["failed"] == played.report["requests"] for played in study.values()):
        ctx.exit(EXIT_ALL_FAILED)


def _play(settings: SimSettings) -> tuple[dict[str, Played], bool]:
    """Every complete run by its name, in their order, and whether these are all."""
    cells = settings.cells()
    done: dict[int, Played] = {}
    is_whole = True
    console = Console(stderr=True)
    try:
        with StudyBar(len(cells), console) as bar:
            runs = play_all(
                settings, cells, jobs=settings.jobs, perf=time.perf_counter, show=bar.show
            )
            for number, played in runs:
                done[number] = played
                bar.show(number, played.report["requests"], 1.0)
    except KeyboardInterrupt:
        is_whole = False
    except ValueError as error:
        raise Unusable(str(error)) from error
    except RunFailed as error:
        raise click.ClickException(str(error)) from error
    names = labels(cells)
    return {names[number]: done[number] for number in sorted(done)}, is_whole


def _hand_over(settings: SimSettings, study: Mapping[str, Played]) -> None:
    reports = {name: played.report for name, played in study.items()}
    print_study(reports, table_console())
    try:
        for path in _write(settings, study, reports):
            click.echo(f"wrote {path}")
    except OSError as error:
        raise click.ClickException(f"can't write {error.filename}: {error.strerror}") from error


def _write(
    settings: SimSettings, study: Mapping[str, Played], reports: Mapping[str, Report]
) -> Iterator[Path]:
    """Every file, when it is there."""
    if settings.out is not None:
        write_report(settings.out, out_file(settings, reports))
        yield settings.out
    if settings.csv is not None:
        write_csv(settings.csv, reports)
        yield settings.csv
    if settings.pictures is not None:
        from mesh.sim.study.pictures import draw  # matplotlib may not be there

        yield from draw(settings.pictures, study)


def _replay(recording: Path, options: Mapping[str, object]) -> int:
    strangers = sorted(options.keys() - set(WITH_REPLAY))
    if strangers:
        raise Unusable(f"--{strangers[0].replace('_', '-')} does not go with --replay")
    try:
        changed = _changed({name: str(value) for name, value in options.items()})
        verdict = replay(recording, **changed)
    except OSError as error:
        raise Unusable(f"--replay {recording}: {error.strerror}") from error
    except (RecordingInvalid, ValueError) as error:
        raise Unusable(str(error)) from error
    click.echo(str(verdict))
    return 0 if verdict.agrees or changed else EXIT_DIFFERENT


def _changed(options: Mapping[str, str]) -> dict[str, object]:
    changed: dict[str, object] = {}
    if "policy" in options:
        changed["policy"] = checked_policy(options["policy"])
    if "pushing" in options:
        changed["pushing"] = parse_pushing(options["pushing"])
    if "hold_order" in options:
        changed["hold_order"] = HoldOrder(options["hold_order"])
    return changed
