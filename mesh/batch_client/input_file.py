"""The check of a job's input file before its upload, by the code that its region checks with."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mesh.batch.job_file import FileCheck, LineInvalid, Place, read_line
from schemas.batch import ERRORS_MAX, LineError

LINES_MAX = 1_000_000  # the endpoint has its own limit, which may be lower
READ_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class FileFindings:
    """`lines`: that the file has; `errors`: the first ERRORS_MAX of what is wrong."""

    lines: int
    errors: tuple[LineError, ...]


def check(path: Path, endpoint: str, lines_max: int = LINES_MAX) -> FileFindings:
    """Read the file as a region will for a job of that endpoint. Raises OSError."""
    found = FileCheck(endpoint, lines_max=lines_max)
    with path.open("rb") as file:
        while not found.is_over and (chunk := file.read(READ_BYTES)):
            found.feed(chunk)
    index = found.end()
    if index is None:
        return FileFindings(0, tuple(found.errors))
    errors = tuple(_errors_of_lines(path, endpoint, index.wrong[:ERRORS_MAX]))
    return FileFindings(index.total, errors)


def _errors_of_lines(path: Path, endpoint: str, places: tuple[Place, ...]) -> Iterator[LineError]:
    with path.open("rb") as file:
        for place in places:
            file.seek(place.offset)
            try:
                read_line(file.read(place.length), place.number, endpoint)
            except LineInvalid as invalid:
                yield invalid.error
