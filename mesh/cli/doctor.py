"""The command `mesh doctor`: is everything where it should be, and is what is forbidden refused?"""

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infra import topology
from mesh.cli.unusable import Unusable
from mesh.doctor.examine import examine
from mesh.doctor.findings import Finding, Verdict, is_healthy
from mesh.doctor.logins import Logins, NoCredentials, read_logins
from mesh.doctor.reach import NothingRuns, must_run
from schemas.ids import RegionId

EXIT_ILL = 1
TABLE_COLUMNS = 160
LISTEN_S = 1.5  # fifteen heartbeats and digests, three signs of life of prefix gossip
COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.BAD: "bold red"}


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    default=topology.DEFAULT_FILE,
    help="The mesh.toml of the mesh. Without it: the three regions of the demo.",
)
@click.option(
    "--credentials",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="The directory that `mesh infra nats --out` wrote, or one with some regions' part of it.",
)
@click.option(
    "--listen-s",
    type=click.FloatRange(0.2, 600),
    default=LISTEN_S,
    show_default=True,
    help="How long to listen in each region, in seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Findings as JSON instead of a table.")
def command(config: Path, credentials: Path, listen_s: float, as_json: bool) -> None:
    """Examine a running mesh: servers, streams, heartbeats, leases, links, permissions, residency.

    Examines every region whose credentials are there, with those of the operator, the routers and
    the system user, as far as they are. Forbidden messages are tried, empty ones, and have to be
    refused. Exits with 0 if nothing is bad, 1 if something is, 2 if it could not begin.
    """
    logging.basicConfig(level=logging.CRITICAL)  # what servers forbid is what we are here for
    of_demo = config == topology.DEFAULT_FILE
    try:
        mesh = topology.load(config)
        logins = read_logins(mesh, credentials)
        if not as_json:
            _say_what(config, list(logins), of_demo=of_demo)
        findings = asyncio.run(_examine(mesh, logins, listen_s))
    except NothingRuns as error:
        demo = "`mesh up` starts the demo; of another mesh, " if of_demo else ""
        raise Unusable(f"{error}; {demo}give its file as --config, and start it first") from error
    except (topology.TopologyError, NoCredentials) as error:
        raise Unusable(str(error)) from error
    if as_json:
        click.echo(_json(config, list(logins), findings))
    else:
        _print(findings)
    if not is_healthy(findings):
        sys.exit(EXIT_ILL)


async def _examine(
    mesh: topology.Topology, logins: Mapping[RegionId, Logins], listen_s: float
) -> list[Finding]:
    await must_run(logins)
    return await examine(mesh, logins, listen_s, time.monotonic)


def _say_what(config: Path, regions: list[RegionId], *, of_demo: bool) -> None:
    which = f"the demo's {config.name}; --config names another" if of_demo else str(config)
    click.echo(f"Examining {', '.join(regions)} of {which}.")


def _json(config: Path, regions: list[RegionId], findings: list[Finding]) -> str:
    plain = {
        "config": str(config),
        "regions": regions,
        "healthy": is_healthy(findings),
        "findings": [asdict(each) for each in findings],
    }
    return orjson.dumps(plain, option=orjson.OPT_INDENT_2).decode()


def _print(findings: list[Finding]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS, color_system=None)
    table = Table("region", "check", "of", "verdict", "measure", "what was found")
    last = ""
    for each in findings:
        if last and each.region != last:
            table.add_section()
        last = each.region
        measure = "" if each.value is None else f"{each.value:g} {each.unit}"
        colour = COLOURS.get(each.verdict, "dim")
        table.add_row(
            each.region,
            each.check,
            escape(each.about),
            f"[{colour}]{each.verdict}[/{colour}]",
            measure,
            escape(each.detail),
        )
    console.print(table)
    counts = {verdict: sum(each.verdict is verdict for each in findings) for verdict in Verdict}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
