"""Recorded traces: when requests came, how long they were, which prefixes they shared.

A trace keeps what every published format has: arrival time, prompt and answer length in tokens,
and the ids of the prompt's leading blocks. Two prompts that begin with the same ids begin with the
same tokens. Times are kept as recorded; `schedule` turns them into departures.

Every error names the line, because a trace may have a million lines. The limits
lie far beyond any published trace.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.problems import what_it_must_be

REQUESTS_MAX = 1_000_000
TOKENS_MAX = 10_000_000  # of one prompt or answer
BLOCK_ID_MAX = 2**63 - 1

TokenCount = Annotated[int, Field(ge=0, le=TOKENS_MAX)]
TokenCountFrom1 = Annotated[int, Field(ge=1, le=TOKENS_MAX)]
BlockId = Annotated[int, Field(ge=0, le=BLOCK_ID_MAX)]
ParsedRow = TypeVar("ParsedRow", bound="TraceRow")


class TraceError(ValueError):
    """The trace can't be used; the message names the line and the error."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. `blocks` may cover only the beginning of the prompt.

    `session`: the recorder's name for the conversation; empty where it gave none.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests in order of arrival."""

    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def scaled(self, factor: float) -> "Trace":
        """The same trace with prompts and answers `factor` times as long, for small engines.

        Blocks shrink with the prompts, so the sharing of leading blocks stays as recorded.
        """
        if factor == 1:
            return self
        block_tokens = max(1, round(self.block_tokens * factor))

        def shrink(request: TraceRequest) -> TraceRequest:
            whole = min(len(request.blocks), request.input_tokens // self.block_tokens)
            tail = request.input_tokens - whole * self.block_tokens
            return replace(
                request,
                input_tokens=max(1, whole * block_tokens + round(tail * factor)),
                output_tokens=max(1, round(request.output_tokens * factor)),
            )

        return Trace(block_tokens, tuple(map(shrink, self.requests)))


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that aren't blank, numbered from 1. Raises TraceError for too many."""
    for number, line in enumerate(lines, 1):
        if number > REQUESTS_MAX:
            raise TraceError(f"more than {REQUESTS_MAX} lines: split the file")
        if line.strip():
            yield number, line


class TraceRow(BaseModel):
    """A line of a JSON format. Values of other types are refused, unknown fields ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


def parsed_row(model: type[ParsedRow], line: bytes, number: int) -> ParsedRow:
    """The line as that model. Raises TraceError that names the line and the field."""
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, words = ".".join(map(str, first["loc"])), what_it_must_be(first)
        problem = f"{field} {words}" if field else f"not a JSON object ({words})"
        raise TraceError(f"line {number}: {problem}") from error
