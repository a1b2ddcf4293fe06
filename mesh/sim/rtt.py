"""Round trips between regions: a table of pairs, in milliseconds as people write them.

A file has one of two forms, told apart by its first character. CSV: lines of two regions and a
number, with or without the head `from,to,rtt_ms`; lines that begin with # are not read.

    us,eu,80
    us,ap,150
    eu,ap,220

JSON: `{"us-eu": 80, "us-ap": 150, "eu-ap": 220}`, or, as region names may hold hyphens, a list
of `["us", "eu", 80]`. A pair stands for both directions and is given once.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.ids import NameInvalid, RegionId, checked_name

MS = 0.001
RTT_MS_MAX = 10_000.0
MISSING_SHOWN = 4
SHOWN_CHARS_MAX = 80  # of what is wrong
FILE_BYTES_MAX = 1024 * 1024  # 30,000 pairs: 250 regions
Pair = tuple[str, str]
Row = tuple[str, str, str, Any]  # where it stands, two regions, milliseconds

# Between the coasts of three continents, as public clouds measure them.
DEFAULT_MS: Mapping[Pair, float] = {("us", "eu"): 80.0, ("us", "ap"): 150.0, ("eu", "ap"): 220.0}

JSON_FORMS = 'write {"us-eu": 80}, or [["us-1", "eu-1", 80]] where names have hyphens'
CSV_FORM = "write two regions and milliseconds, as us,eu,80"


class RttInvalid(ValueError):
    """A table that can't be used; the message says what to write instead."""


@dataclass(frozen=True, slots=True)
class RttTable:
    """Seconds there and back, per pair of regions."""

    ms: Mapping[Pair, float] = field(default_factory=lambda: dict(DEFAULT_MS))

    def rtt_s(self, one: RegionId, other: RegionId) -> float:
        """The round trip between two regions. Raises RttInvalid for a pair that is not there."""
        if one == other:
            return 0.0
        found = self.ms.get((one, other), self.ms.get((other, one)))
        if found is None:
            raise RttInvalid(f"no round trip between {one} and {other}: add that pair to the table")
        return found * MS

    def check(self, regions: Iterable[RegionId]) -> None:
        """Raises RttInvalid if pairs of these are missing, and names them."""
        names = list(regions)
        missing = [
            f"{one} and {other}"
            for place, one in enumerate(names)
            for other in names[place + 1 :]
            if (one, other) not in self.ms and (other, one) not in self.ms
        ]
        if missing:
            more = len(missing) - MISSING_SHOWN
            pairs = ", ".join(missing[:MISSING_SHOWN]) + (f", and {more} more" if more > 0 else "")
            raise RttInvalid(
                f"no round trip between {pairs}: write a file with a line for each pair, as "
                "us,eu,80"
            )


def load_rtt(path: Path) -> RttTable:
    """The table in a JSON or CSV file. Raises RttInvalid, whose message names the file."""
    try:
        return table_of(_rows(_text(path)))
    except OSError as error:
        raise RttInvalid(f"can't read {path}: {error.strerror}") from error
    except RttInvalid as error:
        raise RttInvalid(f"{path}: {error}") from error


def table_of(rows: Iterable[Row]) -> RttTable:
    """The table of rows of two regions and milliseconds. Raises RttInvalid."""
    table: dict[Pair, float] = {}
    for where, one, other, value in rows:
        try:
            pair = _region(one), _region(other)
        except NameInvalid as error:
            raise RttInvalid(f"{where}: {error}") from error
        if one == other:
            raise RttInvalid(f"{where}: {one} twice; a region is next to itself, leave it out")
        if pair in table or pair[::-1] in table:
            raise RttInvalid(f"{where}: {one} and {other} are there already; give each pair once")
        table[pair] = _milliseconds(where, value)
    if not table:
        raise RttInvalid(f"it has no pair of regions; {CSV_FORM}")
    return RttTable(table)


def _region(name: str) -> str:
    return checked_name("region", name[:SHOWN_CHARS_MAX])  # which is longer than one may be


def _milliseconds(where: str, value: Any) -> float:
    try:
        ms = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        ms = float("nan")
    if not 0.0 <= ms <= RTT_MS_MAX:
        raise RttInvalid(
            f"{where}: {_short(value)} is no number of milliseconds from 0 to {RTT_MS_MAX:g}"
        )
    return ms


def _text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise RttInvalid(f"more than {FILE_BYTES_MAX} bytes are no table of round trips")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RttInvalid(f"it is no text in UTF-8; {CSV_FORM}, or {JSON_FORMS}") from error


def _rows(text: str) -> Iterator[Row]:
    return _json_rows(text) if text.lstrip().startswith(("{", "[")) else _csv_rows(text)


def _csv_rows(text: str) -> Iterator[Row]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            cells = [cell.strip() for cell in next(csv.reader([line], strict=True))]
        except csv.Error as error:
            raise RttInvalid(f"line {number}: {error}; {CSV_FORM}") from error
        if cells[-1] == "rtt_ms":
            continue
        if len(cells) != 3:
            raise RttInvalid(f"line {number}: {_short(line)} has {len(cells)} columns; {CSV_FORM}")
        one, other, value = cells
        yield (f"line {number}", one, other, value)


def _json_rows(text: str) -> Iterator[Row]:
    try:
        content = json.loads(text, object_pairs_hook=_each_once)
    except RttInvalid:
        raise
    except (ValueError, RecursionError) as error:
        raise RttInvalid(f"it begins as JSON and is none: {error}; {JSON_FORMS}") from error
    if isinstance(content, dict):
        content = [[*pair.split("-"), value] for pair, value in content.items()]
    for number, row in enumerate(content, 1):
        if not isinstance(row, list) or len(row) != 3:
            raise RttInvalid(f"pair {number} is {_short(row)}; {JSON_FORMS}")
        yield (f"pair {number}", str(row[0]), str(row[1]), row[2])


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # JSON itself would let the last one win
        raise RttInvalid("a pair is there twice; give each pair once")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
