"""What an agent's last run has learned of a simulated engine's speed. No twin probes it."""

from agents.core.engine_load import PrefillLine
from agents.core.known_speed import LONG_TOKENS, SHORT_TOKENS, KnownSpeed, of_last_run
from agents.sim.profiles import Profile


def known_speed(engine: str, profile: Profile) -> KnownSpeed:
    """Of an engine of that kind with that profile."""
    slope = (profile.alone_s(LONG_TOKENS) - profile.alone_s(SHORT_TOKENS)) / (
        LONG_TOKENS - SHORT_TOKENS
    )
    base_s = profile.alone_s(SHORT_TOKENS) - slope * SHORT_TOKENS
    return of_last_run(engine, (), PrefillLine(slope, base_s))
