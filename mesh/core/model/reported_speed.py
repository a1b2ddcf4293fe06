"""Bounds on what others report of engines' speeds, which must not spoil what is known of all.

Seconds per prompt token: from a tenth of a small model's on the quickest GPU to a large one's on a
CPU.
"""

SLOPE_MIN, SLOPE_MAX = 1e-7, 0.1  # seconds per prompt token
BASE_S_MAX = 60.0  # of a first token, whatever its prompt


def believed_slope(s_per_token: float) -> float:
    """What is reported, within what an engine may have."""
    return min(SLOPE_MAX, max(SLOPE_MIN, s_per_token))
