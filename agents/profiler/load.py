"""What a test run plays: online requests at their times, and offline ones without end.

Online requests come from a trace, or as a Poisson process: times between arrivals are exponential,
lengths log-normal around the given medians, as those of real requests are (the spread is that of
the answers of the Azure LLM inference trace of 2023, nearly). A trace is JSON lines with
`timestamp` (milliseconds), `input_length` and `output_length` (tokens), the names of Mooncake's
(Qin et al., FAST 2025). Only lengths and times count: every prompt is new.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.problems import problem_of

REQUESTS_MAX = 100_000
LINE_BYTES_MAX = 1024 * 1024
TOKENS_MAX = 10_000_000
MS_MAX = 10**15
SPREAD = 0.8  # standard deviation of a length's logarithm
LONGEST = 8.0  # times the median


class TraceInvalid(ValueError):
    """The trace can't be played; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class OnlineRequest:
    """One request, sent `at_s` seconds after the run's begin."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Medians of prompts and answers, in tokens."""

    prompt_tokens: int
    output_tokens: int

    def draw(self, dice: random.Random, context_tokens: int) -> tuple[int, int]:
        """One request's prompt and answer that fit an engine's context together."""
        prompt = _length(self.prompt_tokens, dice)
        output = _length(self.output_tokens, dice)
        output = min(output, max(1, context_tokens // 2))
        return max(1, min(prompt, context_tokens - output - 1)), output


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    timestamp: Annotated[float, Field(ge=0, le=MS_MAX)]
    input_length: Annotated[int, Field(ge=1, le=TOKENS_MAX)]
    output_length: Annotated[int, Field(ge=0, le=TOKENS_MAX)]


def poisson(
    dice: random.Random, per_s: float, seconds: float, lengths: Lengths, context_tokens: int
) -> list[OnlineRequest]:
    """The arrivals of so many seconds."""
    found: list[OnlineRequest] = []
    at_s = dice.expovariate(per_s)
    while at_s < seconds and len(found) < REQUESTS_MAX:
        found.append(OnlineRequest(at_s, *lengths.draw(dice, context_tokens)))
        at_s += dice.expovariate(per_s)
    return found


def read_trace(path: Path) -> list[OnlineRequest]:
    """The requests of a trace in order of time, the first at 0. Raises TraceInvalid."""
    try:
        with path.open("rb") as lines:
            rows = sorted(_rows(path, lines), key=lambda row: row.timestamp)
    except OSError as error:
        raise TraceInvalid(f"{path} can't be read: {error.strerror}") from error
    if not rows:
        raise TraceInvalid(f"{path} holds no request")
    first = rows[0].timestamp
    return [
        OnlineRequest((row.timestamp - first) / 1000, row.input_length, max(1, row.output_length))
        for row in rows
    ]


def _rows(path: Path, lines: Iterator[bytes]) -> Iterator[_Row]:
    count = 0
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_BYTES_MAX:
            raise TraceInvalid(f"{path}, line {number}: more than {LINE_BYTES_MAX} bytes")
        if not line.strip():
            continue
        count += 1
        if count > REQUESTS_MAX:
            raise TraceInvalid(f"{path}: more than {REQUESTS_MAX} requests: cut the file")
        try:
            yield _Row.model_validate_json(line)
        except ValidationError as error:
            raise TraceInvalid(f"{path}, line {number}: {problem_of(error)}") from error


def _length(median: int, dice: random.Random) -> int:
    drawn = median * math.exp(dice.gauss(0.0, SPREAD))
    return max(1, round(min(drawn, LONGEST * median)))
