"""The published trace formats, one module each, and the one way to read a file of them.

A format is a function from lines to a `Trace`. It says what is wrong by line; which file it was
is added here. A folder is read as the traces of its files together, because some recorders write
a file per session.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from mesh.replay.formats.azure import parse_azure
from mesh.replay.formats.lmcache import parse_lmcache
from mesh.replay.formats.mooncake import parse_mooncake
from mesh.replay.trace import Trace, TraceError

Parsed = TypeVar("Parsed")

FILES_MAX = 10_000

FORMATS: Mapping[str, Callable[[Iterable[bytes]], Trace]] = {
    "mooncake": parse_mooncake,
    "azure": parse_azure,
    "lmcache": parse_lmcache,
}


def load_trace(path: Path, format_name: str) -> Trace:
    """Read a trace file, or a folder's. Raises TraceError, whose message names the file."""
    if format_name not in FORMATS:
        raise TraceError(f"unknown trace format {format_name!r}: use one of {', '.join(FORMATS)}")
    parse = FORMATS[format_name]
    traces = [read_lines(file, parse) for file in trace_files(path)]
    requests = [request for trace in traces for request in trace.requests]
    requests.sort(key=lambda request: request.at_s)
    return Trace(traces[0].block_tokens, tuple(requests))


def trace_files(path: Path) -> list[Path]:
    """The file itself, or a folder's `.jsonl` and `.csv` files by name. Raises TraceError."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".csv"))
    if not 0 < len(files) <= FILES_MAX:
        raise TraceError(f"{path}: holds {len(files)} .jsonl or .csv files, 1 to {FILES_MAX} do")
    return files


def read_lines(file: Path, parse: Callable[[Iterable[bytes]], Parsed]) -> Parsed:
    """What `parse` makes of a file's lines. Raises TraceError, whose message names the file."""
    try:
        with file.open("rb") as lines:
            return parse(lines)
    except OSError as error:
        raise TraceError(f"can't read trace {file}: {error.strerror}") from error
    except TraceError as error:
        raise TraceError(f"{file}: {error}") from error
