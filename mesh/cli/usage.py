"""The command `mesh usage`: tokens by key, tenant, model and region that served, summed."""

import infra.lean_nats  # noqa: F401 # before what imports nats-py

# isort: split
import csv
import io
import json
import sys
from calendar import monthrange
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, date, datetime
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import click
from nats.aio.client import Client

from mesh.adapters.usage_reader import read_day
from mesh.cli.audit import echo_table
from mesh.cli.keys import id_of
from mesh.cli.mesh_options import KnownMesh, find_mesh, in_regions, mesh_options
from mesh.cli.unusable import Unusable
from mesh.explain.terminal import printable
from schemas.ids import RegionId
from schemas.usage import UsagePage, UsageRow

PARTIAL = 1  # the exit code where a region was not read
ACCOUNT = ("tenant", "key", "model", "served_region", "kind")
SUMS = tuple(field.name for field in fields(UsageRow) if field.name not in ACCOUNT)
Names = tuple[str, ...]
COLUMNS: Names = ("day", *ACCOUNT, *SUMS)
CREDENTIALS_HELP = (
    "The directory that `mesh infra nats --out` wrote, with each region's operator.env."
)


class DayRow(NamedTuple):
    """Sums of one account in the period. `day`: empty for all of it."""

    day: str
    row: UsageRow

    def cells(self) -> dict[str, str | int]:
        known = {"day": self.day, **asdict(self.row)}
        return {name: known[name] for name in COLUMNS}


@click.command()
@mesh_options(CREDENTIALS_HELP)
@click.option("--month", help="As in 2026-11, by UTC.  [default: this one]")
@click.option("--day", help="As in 2026-11-29, by UTC, in place of a month.")
@click.option("--daily", is_flag=True, help="A row for each day.")
@click.option("--tenant", help="Its tokens alone.")
@click.option("--key", help="Those of the API key with this id, or an id that begins so, alone.")
@click.option("--model", help="Those of this model alone, by the name it is served under.")
@click.option("--region", help="Those that this region served alone.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json"]),
    default="table",
    help="How to print the rows.",
)
def command(
    config: Path | None,
    credentials: Path,
    month: str | None,
    day: str | None,
    daily: bool,
    form: str,
    **only: str | None,
) -> None:
    """Say how many tokens were used, by key, tenant, model and region that served.

    Sums are a second or two behind. Where a region can't be read its clients' requests are missing:
    it is named, and the exit code is 1.
    """
    mesh = find_mesh(config, credentials)
    days = _days(month, day, datetime.now(UTC).date())
    pages, unread = _read(mesh, days)
    if (key := only["key"]) is not None:
        only["key"] = id_of((row.key for page in pages for row in page.rows), key) or key
    asked = {name: value for name, value in only.items() if value is not None}
    wanted = {"served_region" if name == "region" else name: asked[name] for name in asked}
    _check_region(only["region"], mesh, pages)
    is_daily = daily or day is not None
    rows = summed(
        pages,
        lambda row: all(getattr(row, name) == value for name, value in wanted.items()),
        daily=is_daily,
    )
    _FORMS[form](COLUMNS[0 if is_daily else 1 :], rows, unread)
    if not rows:
        whose = " and ".join(f"{name} {printable(value)}" for name, value in asked.items())
        span = f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
        click.echo(f"nothing was counted{whose and f' of {whose}'} {span}", err=True)
    for region, why in unread.items():
        click.echo(f"{region}: not read, so what its clients used is missing: {why}", err=True)
    if unread:
        sys.exit(PARTIAL)


def summed(
    pages: Iterable[UsagePage], is_wanted: Callable[[UsageRow], bool], *, daily: bool = False
) -> list[DayRow]:
    """One row for each account, or for each of its days: the sum of that account's rows."""
    found: dict[tuple[str, ...], UsageRow] = {}
    account = attrgetter(*ACCOUNT)
    for page in pages:
        for row in filter(is_wanted, page.rows):
            place = page.day if daily else "", *account(row)
            known = found.get(place)
            if known is not None:
                row = replace(row, **{n: getattr(row, n) + getattr(known, n) for n in SUMS})
            found[place] = row
    return [DayRow(place[0], row) for place, row in sorted(found.items())]


def _check_region(region: str | None, mesh: KnownMesh, pages: Iterable[UsagePage]) -> None:
    """Raise Unusable for one that neither mesh.toml nor an account names."""
    served = sorted({row.served_region for page in pages for row in page.rows if row.served_region})
    known = dict.fromkeys((*mesh.topology.regions, *served))
    if region is not None and region not in known:
        there_are = printable(", ".join(known))
        raise Unusable(f"--region: no region {region!r}; there are {there_are}")


def _days(month: str | None, day: str | None, today: date) -> list[str]:
    """Raises Unusable."""
    try:
        if day is not None and month is None:
            return [date.fromisoformat(day).isoformat()]
        if day is not None:
            raise Unusable("--day and --month: one of both")
        first = today.replace(day=1) if month is None else date.fromisoformat(f"{month}-01")
    except ValueError as error:
        raise Unusable("--day is as in 2026-11-29, --month as in 2026-11") from error
    last = monthrange(first.year, first.month)[1]
    return [first.replace(day=number).isoformat() for number in range(1, last + 1)]


def _read(mesh: KnownMesh, days: Sequence[str]) -> tuple[list[UsagePage], dict[RegionId, str]]:
    """All pages of these days, and why some regions were not read. A region is read whole or not
    at all. Raises Unusable where none can be read."""

    async def pages(client: Client, region: RegionId) -> list[UsagePage]:
        return [page for day in days for page in await read_day(client, region, day)]

    found, unread = in_regions(mesh, "operator", mesh.topology.regions, pages)
    if not found:
        raise Unusable("\n".join(f"{region}: {why}" for region, why in unread.items()))
    return [page for each in found.values() for page in each], unread


def _table(names: Names, rows: Sequence[DayRow], unread: dict[RegionId, str]) -> None:
    if not rows:
        return
    known = [row.cells() for row in rows]
    cells = [tuple(printable(str(row[name])) or "-" for name in names) for row in known]
    sums = [str(sum(getattr(row, name) for _, row in rows)) for name in SUMS]
    blank = [""] * (len(names) - len(sums) - 1)
    echo_table([names, *cells, ("total", *blank, *sums)])


def _csv(names: Names, rows: Sequence[DayRow], unread: dict[RegionId, str]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    known = (row.cells().items() for row in rows)
    writer.writerows({name: printable(str(value)) for name, value in row} for row in known)
    click.echo(text.getvalue(), nl=False)


def _json(names: Names, rows: Sequence[DayRow], unread: dict[RegionId, str]) -> None:
    cells = [row.cells() for row in rows]
    click.echo(json.dumps({"rows": cells, "unread": unread}, indent=2))


_FORMS = {"table": _table, "csv": _csv, "json": _json}
