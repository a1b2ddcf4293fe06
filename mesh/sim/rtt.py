"""Round trips between regions, as mesh.toml's `[[links]]` gives them.

A file may be a whole mesh.toml or its `[[links]]` alone. A pair counts for both directions.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
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


def load_rtt(path: Path) -> RttTable:
    """The round trips in a file. Raises RttInvalid, whose message names the file."""
    try:
        return _table(_links(_text(path)))
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
    except (ValueError, RecursionError) as error:  # as `infra.topology`
        raise RttInvalid(f"not TOML: {error}; {FORM}") from error
    if not isinstance(links, list):
        raise RttInvalid(f"links is no list of tables; {FORM}")
    for number, link in enumerate(links):
        yield f"links.{number}", link
