"""How one engine's times were measured to be: what a simulated engine is made of.

`mesh-agent profile` writes them into its file, with `--calibrate` nothing else; `mesh sim` and
`mesh-agent engine-sim` take the file as a `--profile`. A point is a median of several measurements.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from schemas.problems import problem_of

FILE_BYTES_MAX = 1024 * 1024
POINTS_MAX = 1000
REQUESTS_MAX = 65_536

Seconds = Annotated[float, Field(gt=0.0, le=3600.0, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=100_000_000)]
Requests = Annotated[int, Field(ge=1, le=REQUESTS_MAX)]
Text = Annotated[str, Field(max_length=512)]


class CurvesInvalid(ValueError):
    """A file that holds no curves; the message names the field and says what it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPoint:
    """A prompt that the engine computed alone, nothing of it cached."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    tokens: Tokens
    ttft_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPoint:
    """A prompt that the engine computed alone, and had cached from its beginning in part."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    tokens: Tokens
    cached_tokens: Tokens
    ttft_s: Seconds

    def __post_init__(self) -> None:
        if self.cached_tokens >= self.tokens:
            raise ValueError(
                f"{self.cached_tokens} of {self.tokens} tokens cached: it should be fewer, as the "
                "last one is always computed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """Requests that only decoded. `context_tokens`: of all of them together."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    requests: Requests
    context_tokens: Tokens
    tbt_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCurves:
    """One engine's. Sizes in tokens."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    prefill: Annotated[tuple[PrefillPoint, ...], Field(min_length=2, max_length=POINTS_MAX)]
    """Time to first token by tokens of the prompt, which rise."""
    decode: Annotated[tuple[DecodePoint, ...], Field(min_length=1, max_length=POINTS_MAX)]
    """Time between tokens by requests and context."""
    chunk_tokens: Tokens
    """Most prompt tokens of one iteration."""
    kv_tokens: Tokens
    """What its KV memory holds."""
    batch_max: Requests
    """Most requests that it computes at once."""
    cached: Annotated[tuple[CachedPoint, ...], Field(max_length=POINTS_MAX)] = ()
    """Time to first token of prompts that were cached in part; of an engine that doesn't report
    cached tokens there are none."""

    def __post_init__(self) -> None:
        for before, after in pairwise(self.prefill):
            if after.tokens <= before.tokens:
                raise ValueError(
                    f"prefill: {after.tokens} tokens after {before.tokens}: they should rise"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedEngine:
    """A file's part that is of the engine's times; what else is in it is for agents."""

    v: Literal[1] = 1
    engine: Text
    """Kind of the engine: vllm, sglang, llamacpp, openai."""
    model: Text
    """What it served."""
    measured_at: Annotated[int, Field(ge=0)]
    """In seconds since 1970."""
    curves: EngineCurves


_FILE: TypeAdapter[CalibratedEngine] = TypeAdapter(CalibratedEngine)


def encode_calibrated(engine: CalibratedEngine) -> bytes:
    """The file of `--calibrate`, for people to read too."""
    return _FILE.dump_json(engine, indent=2) + b"\n"


def decode_calibrated(data: bytes) -> CalibratedEngine:
    """The engine in a file's bytes. Raises CurvesInvalid."""
    if len(data) > FILE_BYTES_MAX:
        raise CurvesInvalid(f"{len(data)} bytes: a profile has at most {FILE_BYTES_MAX}")
    try:
        return _FILE.validate_json(data)
    except ValidationError as error:
        raise CurvesInvalid(problem_of(error)) from error
