"""Round trips between regions: a table of pairs, in milliseconds as people write them.

Two forms of file, told apart by the suffix. JSON: `{"us-eu": 80, "us-ap": 150}`. CSV: lines of
two regions and a number, with or without the head `from,to,rtt_ms`. A pair stands for both
directions. Region names may hold hyphens, so JSON may also be a list of `["us", "eu", 80]`.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from schemas.ids import NameInvalid, RegionId, checked_name

MS = 0.001
RTT_MS_MAX = 10_000.0
Pair = tuple[str, str]

# Between the coasts of three continents, as public clouds measure them.
DEFAULT_MS: Mapping[Pair, float] = {("us", "eu"): 80.0, ("us", "ap"): 150.0, ("eu", "ap"): 220.0}


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
        """Raises RttInvalid if a pair of these is missing."""
        names = list(regions)
        for place, one in enumerate(names):
            for other in names[place + 1 :]:
                self.rtt_s(one, other)


def load_rtt(path: Path) -> RttTable:
    """The table in a JSON or CSV file. Raises RttInvalid, whose message names the file."""
    try:
        rows = _json_rows(path) if path.suffix == ".json" else _csv_rows(path)
        return table_of(rows)
    except OSError as error:
        raise RttInvalid(f"can't read {path}: {error.strerror}") from error
    except (RttInvalid, UnicodeDecodeError, orjson.JSONDecodeError) as error:
        raise RttInvalid(f"{path}: {error}") from error


def table_of(rows: Iterable[tuple[str, str, Any]]) -> RttTable:
    """The table of rows of two regions and milliseconds. Raises RttInvalid."""
    table: dict[Pair, float] = {}
    for one, other, value in rows:
        try:
            pair = checked_name("region", one), checked_name("region", other)
            ms = float(value)
        except (NameInvalid, TypeError, ValueError) as error:
            raise RttInvalid(f"{one},{other},{value}: {error}") from error
        if not 0.0 <= ms <= RTT_MS_MAX:
            raise RttInvalid(f"{one},{other}: {value} is not 0 to {RTT_MS_MAX:g} milliseconds")
        table[pair] = ms
    return RttTable(table)


def _csv_rows(path: Path) -> list[tuple[str, str, Any]]:
    with path.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.reader(lines) if row and not row[0].startswith("#")]
    if rows and rows[0][-1].strip() == "rtt_ms":
        rows = rows[1:]
    if any(len(row) != 3 for row in rows):
        raise RttInvalid("each line is two regions and milliseconds: us,eu,80")
    return [(row[0].strip(), row[1].strip(), row[2]) for row in rows]


def _json_rows(path: Path) -> list[tuple[str, str, Any]]:
    content = orjson.loads(path.read_bytes())
    if isinstance(content, dict):
        content = [[*str(pair).split("-"), value] for pair, value in content.items()]
    if not isinstance(content, list) or any(
        not isinstance(row, list) or len(row) != 3 for row in content
    ):
        raise RttInvalid('write {"us-eu": 80} or [["us-1", "eu-1", 80]]')
    return [(str(row[0]), str(row[1]), row[2]) for row in content]
