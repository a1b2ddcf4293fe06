"""The command `mesh doctor`: does everything run, and is what is forbidden refused?"""

import asyncio
import logging
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infra import topology
from infra.nats import server
from mesh.cli.mesh_options import KnownMesh, find_mesh, mesh_options
from mesh.cli.unusable import Unusable
from mesh.demo.state_directory import RunningMesh, StateDirectory
from mesh.doctor.connectivity import NoServerRuns
from mesh.doctor.examination import ExaminationSettings, examine
from mesh.doctor.findings import CheckResult, Finding, is_healthy, remedies
from mesh.doctor.manual_commands import DemoCommands, ManualCommands, SystemdCommands
from mesh.explain.terminal import printable
from schemas.ids import RegionId

EXIT_UNHEALTHY = 1
REMEDIES_SHOWN = 4
TABLE_COLUMNS = 160
LISTEN_S = 1.5  # at rest three heartbeats, two digests, one sign of life of prefix gossip
COLOURS = {CheckResult.OK: "green", CheckResult.WARNING: "yellow", CheckResult.BAD: "bold red"}


@click.command()
@mesh_options(
    "The directory that `mesh infra nats --out` wrote, or one with some regions' part of it. "
    "`mesh up` keeps them in its state directory."
)
@click.option(
    "--listen-s",
    type=click.FloatRange(0.2, 600),
    default=LISTEN_S,
    help="How long to listen in each region, in seconds.",
)
@click.option("--verbose", is_flag=True, help="List checks that passed, too.")
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
def command(
    config: Path | None, credentials: Path, listen_s: float, verbose: bool, as_json: bool
) -> None:
    """Examine a running mesh: servers, streams, heartbeats, leases, links, permissions, residency.

    Examines every region of which there are credentials, as its observer, operator, router and
    system user. Forbidden messages are tried, empty ones, and must be refused. Exit code 0: nothing
    is bad; 1: something is; 2: the examination could not begin.
    """
    logging.basicConfig(level=logging.CRITICAL)  # the servers' refusals are what we look for
    mesh = find_mesh(config, credentials)
    logins = mesh.logins()
    if not as_json:
        click.echo(f"Examining {', '.join(logins)} of {_which(mesh)}.")
    commands: ManualCommands = SystemdCommands(mesh.topology, mesh.file, credentials)
    if mesh.running is not None:
        commands = _demo_commands(credentials, mesh.running)
    settings = ExaminationSettings(listen_s, time.monotonic)
    try:
        findings = asyncio.run(examine(mesh.topology, logins, settings, commands))
    except NoServerRuns as error:
        demo = "`mesh up` starts the demo; of another mesh, " if config is None else ""
        raise Unusable(f"{error}; {demo}give its file as --config, and start it first") from error
    if as_json:
        click.echo(_json(mesh.file, list(logins), findings))
    else:
        _print(findings, verbose=verbose)
    if not is_healthy(findings):
        sys.exit(EXIT_UNHEALTHY)


def _which(mesh: KnownMesh) -> str:
    if mesh.file == topology.DEFAULT_FILE:
        return f"the demo's {mesh.file.name}; --config names another"
    return str(mesh.file) if mesh.running is None else f"{mesh.file} as `mesh up` runs it"


def _demo_commands(credentials: Path, running: RunningMesh) -> DemoCommands:
    def nats_server() -> Path:
        try:
            return server.find()
        except server.ServerUnusable:  # perhaps that is why it does not run
            return Path(server.NAME)

    state = StateDirectory(credentials.parent)
    return DemoCommands(
        running.config,
        state.config,
        state.logs,
        running.children(),
        nats_server,
        running.engines_given,
    )


def _json(config: Path, regions: list[RegionId], findings: list[Finding]) -> str:
    plain = {
        "config": str(config),
        "regions": regions,
        "healthy": is_healthy(findings),
        "findings": [asdict(each) for each in findings],
    }
    return orjson.dumps(plain, option=orjson.OPT_INDENT_2).decode()


def _print(findings: list[Finding], *, verbose: bool) -> None:
    """Show failed checks and their remedies; of passed ones, unless verbose, only their number."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS, color_system=None)
    own = [each for each in findings if each.because is None]
    shown = findings if verbose else [one for one in own if one.verdict is not CheckResult.OK]
    if shown:
        console.print(_table(shown))
    by_hand = remedies(findings)
    for region, remedy in by_hand[: None if verbose else REMEDIES_SHOWN]:
        # On a line of its own, a command can be copied.
        what, command = printable(remedy.what), printable(remedy.command)
        text = f"{region}, by hand: {what}:\n  {command}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if not verbose and len(by_hand) > REMEDIES_SHOWN:
        console.print(f"{len(by_hand) - REMEDIES_SHOWN} more by hand: see --verbose")
    passed = Counter(one.check for one in findings if one.verdict is CheckResult.OK)
    if passed and not verbose:
        kinds = ", ".join(f"{check} {count}" for check, count in passed.items())
        console.print(f"passed: {kinds} (--verbose lists them)", highlight=False, soft_wrap=True)
    counts = Counter(each.verdict for each in own)
    totals = [f"{counts[each]} {each}" for each in CheckResult if counts[each]]
    if len(own) < len(findings):
        totals.append(f"{len(findings) - len(own)} that follow from these")
    console.print(", ".join(totals))


def _table(findings: list[Finding]) -> Table:
    table = Table("region", "check", "of", "verdict", "measure", "what was found")
    last = ""
    for each in findings:
        if last and each.region != last:
            table.add_section()
        last = each.region
        measure = "" if each.value is None else f"{each.value:g} {each.unit}"
        explained = "" if each.because is None else f"; because of {each.because}"
        colour = COLOURS.get(each.verdict, "dim")
        table.add_row(
            each.region,
            each.check,
            escape(printable(each.about)),
            f"[{colour}]{each.verdict}[/{colour}]",
            measure,
            escape(printable(each.detail + explained)),
        )
    return table
