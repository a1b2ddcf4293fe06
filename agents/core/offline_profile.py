"""What `mesh-agent profile` learns of one engine, and `mesh-agent run --profile` takes: the file.

JSON, one object. It holds the functions by which iterations are timed, the latency budget that kept
the online objectives, what offline requests may hold of the engine, and every trial, so that a
reader sees what the budget rests on. A profile is of one engine, model and hardware; nothing in it
is repaired: a value out of range is an error that names its field.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from agents.core.engine_curves import EngineCurves
from agents.core.latency_predictor import FEATURES, IterationTimes
from agents.core.slo_profile import Measure
from schemas.problems import what_it_must_be_instead

PROFILE_BYTES_MAX = 1024 * 1024
TRIALS_MAX = 1000
TOKENS_MAX = 100_000_000
SECONDS_MAX = 3600.0
ITERATION_S_MIN = 1e-6  # no engine is faster
KV_SHARE = 0.5  # unless the profile says another
QUEUED_REQUESTS, QUEUED_TOKENS = 64, 65_536

Coefficient = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0.0, le=SECONDS_MAX, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=TOKENS_MAX)]
Text = Annotated[str, Field(max_length=512)]
Function = Annotated[tuple[Coefficient, ...], Field(min_length=FEATURES, max_length=FEATURES)]


class ProfileInvalid(ValueError):
    """A file that is no profile; the message names the field and says what it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTrial:
    """One test run of the search: a budget, what online requests saw, whether they kept it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    budget_s: Seconds
    latency_s: dict[Measure, Seconds]
    kept: bool
    offline_tokens_per_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineProfile:
    """One engine's profile for offline work. Times are seconds, sizes tokens."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    engine: Text
    """Kind of the engine: vllm, sglang, llamacpp, openai."""
    model: Text
    """What it served."""
    measured_at: Annotated[int, Field(ge=0)]
    """When the profiling run ended, in seconds since 1970."""
    computing: Function
    """Coefficients of (1, Sp, Sd, Sp², Sd², Np, Nd): seconds of an iteration that computes."""
    waiting: Function
    """The same for one that waits for memory. An iteration takes the larger."""
    latency_budget_s: Seconds
    """The longest iteration, as predicted, with which the online objectives were kept."""
    burst_s: Annotated[float, Field(ge=0.0, le=60.0)] = 0.0
    """Seconds by which iterations may exceed the budget, all together, if shorter ones have made up
    for it before: the budget is then a mean. 0: none may exceed it."""
    limits_s: Annotated[dict[Measure, Seconds], Field(min_length=1)]
    """These objectives."""
    chunk_tokens: Tokens
    """Most prompt tokens that the engine computes in one iteration."""
    prefill_tokens_max: Tokens
    """Most prompt tokens of offline requests that may be under computation at the engine."""
    kv_share: Annotated[float, Field(gt=0.0, le=1.0)] = KV_SHARE
    """Of the KV memory, what offline requests may hold."""
    queued_requests_max: Annotated[int, Field(ge=1, le=4096)] = QUEUED_REQUESTS
    """Most offline requests that the agent keeps waiting beside its engine."""
    queued_tokens_max: Tokens = QUEUED_TOKENS
    """Most tokens that these have, of prompts and of the most that they may generate."""
    predictor_error: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """Mean error of the predictions, relative, on batches that it was not fitted to."""
    trials: Annotated[tuple[ProfileTrial, ...], Field(max_length=TRIALS_MAX)] = field(
        default_factory=tuple
    )
    """Every test run of the search."""
    curves: EngineCurves | None = None
    """For a simulated engine like this one; None without `--calibrate`."""

    @property
    def times(self) -> IterationTimes:
        """The functions by which its iterations are timed."""
        return IterationTimes(self.computing, self.waiting)


_PROFILE: TypeAdapter[OfflineProfile] = TypeAdapter(OfflineProfile)


def encode_profile(profile: OfflineProfile) -> bytes:
    """The file, for people to read too. Without `curves` agents of 0.1.0 read it."""
    return _PROFILE.dump_json(profile, indent=2, exclude_none=True) + b"\n"


def decode_profile(data: bytes) -> OfflineProfile:
    """The profile in a file's bytes. Raises ProfileInvalid."""
    if len(data) > PROFILE_BYTES_MAX:
        raise ProfileInvalid(f"{len(data)} bytes: a profile has at most {PROFILE_BYTES_MAX}")
    try:
        profile = _PROFILE.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        problem = what_it_must_be_instead(first)
        raise ProfileInvalid(f"{where}: {problem}" if where else problem) from error
    fastest_s = max(profile.computing[0], profile.waiting[0])
    if fastest_s < ITERATION_S_MIN:
        raise ProfileInvalid("computing, waiting: the first of one must be 1e-6 s or more")
    return profile
