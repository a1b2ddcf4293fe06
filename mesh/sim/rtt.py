"""Round trips between regions, as mesh.toml's `[[links]]` gives them.

A file whose name ends in `.toml` may be a whole mesh.toml or its `[[links]]` alone. Any other is
read as one of two deprecated forms: CSV (`us,eu,80`, `#` begins a comment, `from,to,rtt_ms` may
head it), or JSON (`{"us-eu": 80}` or `[["us", "eu", 80]]`). A pair counts for both directions.
"""

import csv
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from schemas.ids import RegionId
from schemas.problems import problem_of
from schemas.settings import LinkTable

MS = 0.001
MISSING_SHOWN = 4
SHOWN_CHARS_MAX = 80  # of what is wrong
FILE_BYTES_MAX = 1024 * 1024  # some 20,000 pairs: 200 regions
FORM = 'write for each pair [[links]] with between = ["us", "eu"] and rtt_ms = 80'
Pair = tuple[str, str]

# Between the coasts of three continents, as public clouds measure them; mesh.toml's default too.
DEFAULT_MS: Mapping[Pair, float] = {("us", "eu"): 80.0, ("us", "ap"): 150.0, ("eu", "ap"): 220.0}


class RttInvalid(ValueError):
    """Round trips that can't be used; the message says what to write instead."""


@dataclass(frozen=True, slots=True)
class RttTable:
    """Round trips per pair of regions, in milliseconds."""

    ms: Mapping[Pair, float] = field(default_factory=lambda: dict(DEFAULT_MS))

    def rtt_s(self, one: RegionId, other: RegionId) -> float:
        """The round trip between two regions. Raises RttInvalid for a pair that is missing."""
        if one == other:
            return 0.0
        found = self.ms.get((one, other), self.ms.get((other, one)))
        if found is None:
            raise RttInvalid(f"no round trip between {one} and {other}: add that pair to the table")
        return found * MS

    def check(self, regions: Iterable[RegionId]) -> None:
        """Raises RttInvalid that names the pairs of these regions that are missing."""
        missing = [
            f"{one} and {other}"
            for one, other in combinations(regions, 2)
            if (one, other) not in self.ms and (other, one) not in self.ms
        ]
        if missing:
            more = len(missing) - MISSING_SHOWN
            pairs = ", ".join(missing[:MISSING_SHOWN]) + (f", and {more} more" if more > 0 else "")
            raise RttInvalid(f"no round trip between {pairs}: {FORM}")


def is_deprecated(path: Path) -> bool:
    """Whether a file of that name is read in one of the deprecated forms."""
    return path.suffix != ".toml"


def load_rtt(path: Path) -> RttTable:
    """The round trips in a file. Raises RttInvalid, whose message names the file."""
    try:
        text = _text(path)
        return _table(_deprecated_links(text) if is_deprecated(path) else _links(text))
    except OSError as error:
        raise RttInvalid(f"can't read {path}: {error.strerror}") from error
    except RttInvalid as error:
        raise RttInvalid(f"{path}: {error}") from error


def _text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise RttInvalid(f"more than {FILE_BYTES_MAX} bytes are no table of round trips")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RttInvalid(f"it is no text in UTF-8; {FORM}") from error


def _table(links: Iterable[tuple[str, Any]]) -> RttTable:
    """The table of links, each with its place in the file. Raises RttInvalid."""
    table: dict[Pair, float] = {}
    for place, written in links:
        try:
            link = LinkTable.model_validate(written)
        except ValidationError as error:
            raise RttInvalid(f"{place}: {problem_of(error):.{2 * SHOWN_CHARS_MAX}}") from error
        one, other = pair = link.between
        if one == other:
            raise RttInvalid(f"{place}: links {one} with itself; name two regions")
        if pair in table or (other, one) in table:
            raise RttInvalid(f"{place}: {one} and {other} are there already; give each pair once")
        table[pair] = float(link.rtt_ms)
    if not table:
        raise RttInvalid(f"it has no pair of regions; {FORM}")
    return RttTable(table)


def _links(text: str) -> Iterator[tuple[str, Any]]:
    try:
        links = tomllib.loads(text).get("links", [])
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RttInvalid(f"not TOML: {error}") from error
    if not isinstance(links, list):
        raise RttInvalid(f"links is no list of tables; {FORM}")
    for number, link in enumerate(links):
        yield f"links.{number}", link


def _deprecated_links(text: str) -> Iterator[tuple[str, Any]]:
    is_json = text.lstrip().startswith(("{", "["))
    for place, row in _json_rows(text) if is_json else _csv_rows(text):
        if not isinstance(row, list) or len(row) != 3:
            raise RttInvalid(f"{place}: {_short(row)} is no pair of regions with a number; {FORM}")
        yield place, {"between": row[:2], "rtt_ms": row[2]}


def _csv_rows(text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            cells: list[Any] = [cell.strip() for cell in next(csv.reader([line], strict=True))]
        except csv.Error as error:
            raise RttInvalid(f"line {number}: {error}; {FORM}") from error
        if cells[-1] == "rtt_ms":
            continue
        with suppress(ValueError):  # the link's own check says what it must be
            cells[-1] = float(cells[-1])
        yield f"line {number}", cells


def _json_rows(text: str) -> Iterator[tuple[str, Any]]:
    try:  # objects as pairs: a dict would keep the last of two that are equal
        content = json.loads(text, object_pairs_hook=lambda pairs: [(*pair,) for pair in pairs])
    except (ValueError, RecursionError) as error:
        raise RttInvalid(f"it begins as JSON and is none: {error}; {FORM}") from error
    for number, row in enumerate(content, 1):
        yield f"pair {number}", [*row[0].split("-"), row[1]] if isinstance(row, tuple) else row


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
