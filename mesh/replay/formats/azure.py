"""Azure's LLM inference traces: a CSV of times and token counts, and nothing of the prompts.

Nothing says what two prompts share, so every prompt is its own: on such a trace no router can
gain by prefixes, which is what makes it worth playing. Times are wall clock with seven decimals;
a time without an offset is UTC.

Source: Patel et al., "Splitwise", ISCA 2024; AzurePublicDataset, AzureLLMInferenceDataset2023.
"""

import csv
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from mesh.replay.formats.lines import TOKENS_MAX, at_least_one, numbered
from mesh.replay.trace import Trace, TraceError, TraceRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK_TOKENS = 512  # no request names a block; texts are made in pieces of this length
LINE_BYTES_MAX = 1000


def parse_azure(lines: Iterable[bytes]) -> Trace:
    """The trace of these lines, in order of time. Raises TraceError that names a line."""
    rows = _rows(lines)
    places = _places(next(rows, (1, [])))
    requests = at_least_one([_request(row, places, number) for number, row in rows])
    requests.sort(key=lambda request: request.at_s)
    return Trace(BLOCK_TOKENS, tuple(requests))


def _rows(lines: Iterable[bytes]) -> Iterator[tuple[int, list[str]]]:
    for number, line in numbered(lines):
        if len(line) > LINE_BYTES_MAX:
            raise TraceError(f"line {number}: {len(line)} bytes are no line of this format")
        text = line.decode("utf-8-sig", "replace").strip()
        try:
            yield number, next(csv.reader([text], strict=True))
        except csv.Error as error:
            raise TraceError(f"line {number}: not CSV ({error})") from error


def _places(header: tuple[int, list[str]]) -> list[int]:
    number, names = header
    missing = [column for column in COLUMNS if column not in names]
    if missing:
        raise TraceError(
            f"line {number}: the header lacks {missing[0]}: "
            f"it should name {', '.join(COLUMNS)}, separated by commas"
        )
    return [names.index(column) for column in COLUMNS]


def _request(row: list[str], places: list[int], number: int) -> TraceRequest:
    if len(row) <= max(places):
        raise TraceError(f"line {number}: {len(row)} fields are fewer than the header's")
    at, prompt, answer = (row[place] for place in places)
    return TraceRequest(
        at_s=_seconds(at, number),
        input_tokens=_tokens(prompt, COLUMNS[1], number, least=1),
        output_tokens=_tokens(answer, COLUMNS[2], number, least=0),
    )


def _seconds(value: str, number: int) -> float:
    try:
        at = datetime.fromisoformat(value)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise TraceError(
            f"line {number}: TIMESTAMP must be like 2023-11-16 18:15:46.68, got {value!r}"
        ) from error


def _tokens(value: str, column: str, number: int, *, least: int) -> int:
    count = int(value) if value.isascii() and value.isdigit() and len(value) < 12 else -1
    if not least <= count <= TOKENS_MAX:
        raise TraceError(
            f"line {number}: {column} must be a whole number from {least} to {TOKENS_MAX}, "
            f"got {value!r}"
        )
    return count
