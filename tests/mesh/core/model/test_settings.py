"""Settings out of range are refused by name."""

import itertools
import math
from dataclasses import fields

import pytest

from mesh.core.model.settings import RouterSettings

DEFAULTS = {field.name: getattr(RouterSettings(), field.name) for field in fields(RouterSettings)}
NUMBERS = [name for name, value in DEFAULTS.items() if isinstance(value, int | float)]
NUMBERS += ["own_ttft_goal_s"]  # a number, or none
MAY_BE_ZERO = {
    "peer_queue_max",
    "hops_max",
    "trie_bytes_per_s",
    "siblings_bytes_per_s",
    "continuations_max",
    "lease_s",
    "queue_delay_s_max",
}


def test_the_defaults_are_in_range():
    assert RouterSettings().peer_queue_max == 10


def test_each_number_has_its_range():
    for name, value in itertools.product(NUMBERS, (-1, 0, math.nan, math.inf)):
        if value == 0 and name in MAY_BE_ZERO:
            assert getattr(RouterSettings(**{name: value}), name) == 0
            continue
        with pytest.raises(ValueError, match=name):
            RouterSettings(**{name: value})
            pytest.fail(f"{name} may be {value}")


def test_values_must_fit_each_other():
    with pytest.raises(ValueError, match="heartbeat_late_s"):
        RouterSettings(heartbeat_late_s=3.0, heartbeat_lost_s=2.0)
    with pytest.raises(ValueError, match="digest_late_s"):
        RouterSettings(digest_late_s=2.0, digest_lost_s=1.0)
