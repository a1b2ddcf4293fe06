"""What an agent knows of its engine's prefill speed before it has answered requests.

The line that its last run learned, kept in a file in its state directory; else what its profile
predicts; else what a probe measured (`agents.core.speed_probe`). Routers get it as a
`PrefillPrior`, with how far it may be off, and lean on it until the engine's own answers say more:
without it a fleet of two kinds of GPUs is taken for one kind until each replica has answered some
requests. It counts only while the engine serves the same models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter

from agents.core.engine_curves import PrefillPoint
from agents.core.latency_predictor import BatchLoad
from agents.core.offline_profile import OfflineProfile
from agents.core.prefill_speed import PrefillLine
from schemas.ids import ModelId, ValidModelId
from schemas.json_messages import decoder
from schemas.state import SLOPE_MAX, SLOPE_MIN, PrefillPrior, rounded

SPEED_BYTES_MAX = 16 * 1024
MODELS_MAX = 128
# By a line, first tokens of any length; lines of engines are straight up to some thousand tokens.
SHORT_TOKENS, LONG_TOKENS = 256, 4096
LAST_RUN_ERROR = 0.2  # the same engine, perhaps with other options or beside other work
PROFILE_ERROR = 0.4  # measured without its HTTP server and queue
PROBE_ERROR = 0.3  # of a prompt or two of each length
PROBE_TOKENS_MAX = 1_000_000  # far more than a probe's prompt can have
FIRST_TOKEN_S_MAX, ERROR_MAX = 3600.0, 10.0  # of a heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSpeed:
    """Of one engine, which served these models; no models: whatever it serves."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    v: Literal[1] = 1
    engine: Annotated[str, Field(max_length=64)]
    models: Annotated[tuple[ValidModelId, ...], Field(max_length=MODELS_MAX)]
    prior: PrefillPrior

    def is_of(self, engine: str, models: tuple[ModelId, ...]) -> bool:
        """Whether it is likely to hold for this engine."""
        return self.engine == engine and (not self.models or set(self.models) == set(models))


_SPEED: TypeAdapter[KnownSpeed] = TypeAdapter(KnownSpeed)


def encode_speed(speed: KnownSpeed) -> bytes:
    """The file, for people to read too."""
    return _SPEED.dump_json(speed, indent=2) + b"\n"


decode_speed = decoder(KnownSpeed)


def of_last_run(engine: str, models: tuple[ModelId, ...], line: PrefillLine) -> KnownSpeed:
    """What a line that was learned says to the next run."""
    short_s, long_s = line.ttft_s(SHORT_TOKENS), line.ttft_s(LONG_TOKENS)
    prior = _prior(short_s, long_s - short_s, LAST_RUN_ERROR)
    return KnownSpeed(engine=engine, models=models[:MODELS_MAX], prior=prior)


def of_profile(profile: OfflineProfile) -> KnownSpeed:
    """The first tokens that were measured for a profile; without any, what its iterations take,
    prompt by prompt, which leaves out what a request costs before the engine's scheduler."""
    sizes = SHORT_TOKENS, LONG_TOKENS
    if profile.curves is not None:
        error, points = LAST_RUN_ERROR, profile.curves.prefill
        short_s, long_s = (_measured_s(points, tokens) for tokens in sizes)
    else:
        error = max(PROFILE_ERROR, min(ERROR_MAX, profile.predictor_error or 0.0))
        short_s, long_s = (_alone_s(profile, tokens) for tokens in sizes)
    prior = _prior(short_s, long_s - short_s, error)
    return KnownSpeed(engine=profile.engine, models=(ModelId(profile.model),), prior=prior)


class FirstToken(NamedTuple):
    """How long one took, after so many prompt tokens that were computed for it."""

    seconds: float
    tokens: int


NO_PROMPT = FirstToken(0.0, 0)


def of_probe(
    engine: str,
    models: tuple[ModelId, ...],
    short: Sequence[FirstToken],
    long: Sequence[FirstToken],
) -> KnownSpeed | None:
    """The quickest first token after a short and after a long prompt, as whatever else goes on only
    delays one. The error is at least by how much those after long prompts differ. None where the
    two don't make a line that an engine may have."""
    short_s, short_tokens = min(short)
    long_s, long_tokens = min(long)
    more_s, more_tokens = long_s - short_s, long_tokens - short_tokens
    if not 1 <= short_tokens <= more_tokens <= PROBE_TOKENS_MAX:
        return None
    if not SLOPE_MIN <= more_s / more_tokens <= SLOPE_MAX:
        return None
    error = max(PROBE_ERROR, min(ERROR_MAX, (max(long).seconds - long_s) / more_s))
    prior = PrefillPrior(
        short_tokens=short_tokens,
        short_s=rounded(short_s),
        more_tokens=more_tokens,
        more_s=rounded(more_s),
        error=rounded(error),
    )
    return KnownSpeed(engine=engine, models=models[:MODELS_MAX], prior=prior)


def _measured_s(points: Sequence[PrefillPoint], tokens: int) -> float:
    """On the line between the two points around it, or on the last such line."""
    lines = list(pairwise(points))
    before, after = next((one for one in lines if tokens <= one[1].tokens), lines[-1])
    slope = (after.ttft_s - before.ttft_s) / (after.tokens - before.tokens)
    return before.ttft_s + slope * (tokens - before.tokens)


def _alone_s(profile: OfflineProfile, tokens: int) -> float:
    times, chunk, seconds = profile.times, profile.chunk_tokens, 0.0
    for start in range(0, tokens, chunk):
        seconds += times.predict_s(BatchLoad().with_prefill(min(chunk, tokens - start), start))
    return seconds


def _prior(short_s: float, more_s: float, error: float) -> PrefillPrior:
    return PrefillPrior(
        short_tokens=SHORT_TOKENS,
        short_s=rounded(min(FIRST_TOKEN_S_MAX, max(0.0, short_s))),
        more_tokens=LONG_TOKENS - SHORT_TOKENS,
        more_s=rounded(min(FIRST_TOKEN_S_MAX, max(0.0, more_s))),
        error=error,
    )
