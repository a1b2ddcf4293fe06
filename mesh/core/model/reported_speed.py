"""Bounds on what others report of engines' speeds, which must not spoil what is known of all."""

from schemas.state import SLOPE_MAX, SLOPE_MIN

BASE_S_MAX = 60.0  # of a first token, whatever its prompt


def believed_slope(s_per_token: float) -> float:
    """What is reported, within what an engine may have."""
    return min(SLOPE_MAX, max(SLOPE_MIN, s_per_token))
