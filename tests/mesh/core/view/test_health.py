"""Colours of a gap."""

import math

import pytest

from mesh.core.view.peers import health
from schemas.state import Health


@pytest.mark.parametrize(
    ("gap_s", "colour"),
    [
        (0.0, Health.GREEN),
        (0.3, Health.GREEN),
        (0.31, Health.YELLOW),
        (1.0, Health.YELLOW),
        (1.01, Health.RED),
        (math.inf, Health.RED),
    ],
)
def test_the_longer_the_gap_the_worse_the_colour(gap_s, colour):
    assert health(gap_s, 0.3, 1.0) is colour
