"""The command `mesh doctor`: is everything where it should be, and is what is forbidden refused?"""

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
from mesh.cli.unusable import Unusable
from mesh.demo.running import Running, running_with
from mesh.demo.state_directory import DEFAULT_STATE, StateDirectory
from mesh.doctor.by_hand import OfDemo, OnMachines
from mesh.doctor.examine import Manner, examine
from mesh.doctor.findings import Finding, Verdict, is_healthy
from mesh.doctor.folding import ByHand
from mesh.doctor.logins import NoCredentials, read_logins
from mesh.doctor.reach import NothingRuns
from schemas.ids import RegionId

EXIT_ILL = 1
REMEDIES_SHOWN = 4
TABLE_COLUMNS = 160
LISTEN_S = 1.5  # fifteen heartbeats and digests, three signs of life of prefix gossip
COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.BAD: "bold red"}


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="that of the `mesh up` with these credentials, or the demo's",
    help="The mesh.toml of the mesh.",
)
@click.option(
    "--credentials",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_STATE / "config",
    show_default=True,
    help="The directory that `mesh infra nats --out` wrote, or one with some regions' part of it. "
    "`mesh up` keeps them in its state directory.",
)
@click.option(
    "--listen-s",
    type=click.FloatRange(0.2, 600),
    default=LISTEN_S,
    show_default=True,
    help="How long to listen in each region, in seconds.",
)
@click.option("--verbose", is_flag=True, help="What is well in full, too, not only how much.")
@click.option("--json", "as_json", is_flag=True, help="All findings, as JSON.")
def command(
    config: Path | None, credentials: Path, listen_s: float, verbose: bool, as_json: bool
) -> None:
    """Examine a running mesh: servers, streams, heartbeats, leases, links, permissions, residency.

    Examines every region whose credentials are there, with those of the operator, the routers and
    the system user, as far as they are. Forbidden messages are tried, empty ones, and have to be
    refused. Exits with 0 if nothing is bad, 1 if something is, 2 if it could not begin.
    """
    logging.basicConfig(level=logging.CRITICAL)  # what servers forbid is what we are here for
    running = running_with(credentials)
    file = config or (topology.DEFAULT_FILE if running is None else running.config)
    try:
        mesh = topology.load(file)
        if running is not None:
            mesh = running.fitted(mesh)
        logins = read_logins(mesh, credentials)
        if not as_json:
            which = str(file) if running is None else f"{file} as `mesh up` runs it"
            if file == topology.DEFAULT_FILE:
                which = f"the demo's {file.name}; --config names another"
            click.echo(f"Examining {', '.join(logins)} of {which}.")
        by_hand: ByHand = OnMachines(mesh, file, credentials)
        if running is not None:
            by_hand = _of_demo(credentials, running)
        findings = asyncio.run(examine(mesh, logins, Manner(listen_s, time.monotonic), by_hand))
    except NothingRuns as error:
        demo = "`mesh up` starts the demo; of another mesh, " if config is None else ""
        raise Unusable(f"{error}; {demo}give its file as --config, and start it first") from error
    except (topology.TopologyError, NoCredentials) as error:
        raise Unusable(str(error)) from error
    if as_json:
        click.echo(_json(file, list(logins), findings))
    else:
        _print(findings, verbose=verbose)
    if not is_healthy(findings):
        sys.exit(EXIT_ILL)


def _of_demo(credentials: Path, running: Running) -> ByHand:
    state = StateDirectory(credentials.parent)
    return OfDemo(running.config, state.config, state.logs, running.children(), _nats_server)


def _nats_server() -> Path:
    try:
        return server.find()
    except server.ServerUnusable:  # perhaps that is why it does not run
        return Path(server.NAME)


def _json(config: Path, regions: list[RegionId], findings: list[Finding]) -> str:
    plain = {
        "config": str(config),
        "regions": regions,
        "healthy": is_healthy(findings),
        "findings": [asdict(each) for each in findings],
    }
    return orjson.dumps(plain, option=orjson.OPT_INDENT_2).decode()


def _print(findings: list[Finding], *, verbose: bool) -> None:
    """What somebody has to look at in full; of what is well, or follows from that, how much."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS, color_system=None)
    well = Counter(each.check for each in findings if each.verdict is Verdict.OK and not verbose)
    own = [each for each in findings if each.because is None]
    shown = findings if verbose else [each for each in own if each.verdict is not Verdict.OK]
    if shown:
        console.print(_table(shown))
    remedies = [(each.region, each.remedy) for each in findings if each.remedy is not None]
    for region, remedy in remedies[: None if verbose else REMEDIES_SHOWN]:
        # A command is there to be copied: on a line of its own.
        text = f"{region}, by hand: {remedy.what}:\n  {remedy.command}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if not verbose and len(remedies) > REMEDIES_SHOWN:
        console.print(f"{len(remedies) - REMEDIES_SHOWN} more by hand: see --verbose")
    if well:
        kinds = ", ".join(f"{check} {count}" for check, count in well.items())
        console.print(f"well: {kinds} (--verbose shows them)", highlight=False, soft_wrap=True)
    counts = Counter(each.verdict for each in own)
    said = [f"{counts[each]} {each}" for each in Verdict if counts[each]]
    if len(own) < len(findings):
        said.append(f"{len(findings) - len(own)} that follow from these")
    console.print(", ".join(said))


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
            escape(each.about),
            f"[{colour}]{each.verdict}[/{colour}]",
            measure,
            escape(each.detail + explained),
        )
    return table
