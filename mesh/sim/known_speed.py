"""What an agent's last run has learned of a simulated engine's speed."""

from agents.core.engine_load import PrefillLine
from agents.core.known_speed import LONG_TOKENS, SHORT_TOKENS, KnownSpeed, of_last_run
from agents.sim.profiles import Profile


def known_speed(engine: str, profile: Profile) -> KnownSpeed:
    """Of an engine of that kind with that profile."""
    slope = (_alone_s(profile, LONG_TOKENS) - _alone_s(profile, SHORT_TOKENS)) / (
        LONG_TOKENS - SHORT_TOKENS
    )
    base_s = _alone_s(profile, SHORT_TOKENS) - slope * SHORT_TOKENS
    return of_last_run(engine, (), PrefillLine(slope, base_s))


def _alone_s(profile: Profile, tokens: int) -> float:
    """A prompt's time to first token on an idle engine."""
    ends = [*range(profile.batch_tokens, tokens, profile.batch_tokens), tokens]
    starts = [0, *ends[:-1]]
    chunks = zip(starts, ends, strict=True)
    seconds = sum(profile.iteration_s(((end - start, end),), 0, 0) for start, end in chunks)
    return profile.arrival_s + seconds
