"""smg's gate, case by case, and where a request goes that the gate turns away."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.policies.base import Target
from mesh.core.policies.smg import Smg, SmgOptions, expected_wait_s
from mesh.core.view.replica import Replica
from tests.mesh.core.build import beat, request, spot

PUBLISHED, TIGHT = SmgOptions(), SmgOptions(balance_abs=4)


def policy(options=PUBLISHED, seed=1):
    policy = Smg(Random(seed), 100, options)
    for text, name in (("ABCD", "x"), ("ABCD", "y"), ("ABEE", "z")):
        policy.placed(request(1, text), spot(name), 0.0)
    return policy


def targets(loads):
    return [Target(name, load) for name, load in loads.items()]


def pick(policy, text, loads):
    choice = policy.choose(request(1, text), targets(loads), 0.0)
    return choice.name, choice.matched_blocks


@pytest.mark.parametrize(
    ("options", "text", "loads", "expected"),
    [
        (PUBLISHED, "ABCD", {"x": 9, "y": 8, "z": 0}, ("y", 4)),  # the less loaded holder
        (PUBLISHED, "ABCD", {"x": 9, "z": 0}, ("x", 4)),  # others' idleness is no imbalance
        (PUBLISHED, "AZZZ", {"x": 2, "y": 2, "z": 0}, ("z", 1)),  # a quarter does not bind
        (PUBLISHED, "", {"x": 1, "z": 0}, ("z", 0)),
        # More than 1.5 times the mean load *and* more than 4 above it.
        (TIGHT, "ABEE", {"z": 12, "x": 4, "y": 8}, ("z", 4)),  # mean 8: 12 is neither
        (TIGHT, "ABEE", {"z": 14, "x": 4, "y": 6}, ("x", 2)),  # mean 8: 14 > 12 and > 12
        (TIGHT, "ABEE", {"z": 5, "x": 0, "y": 0}, ("z", 4)),  # 5 > 2.5, not 4 above 1.7
        (TIGHT, "ABEE", {"z": 60, "x": 44, "y": 46}, ("z", 4)),  # 10 above, not 1.5 times
        (
            SmgOptions(),
            "ABEE",
            {"z": 96, "x": 0, "y": 0},
            ("z", 4),
        ),  # mean 32: 64 above is not more
        (PUBLISHED, "ABEE", {"z": 97, "x": 0, "y": 1}, ("x", 2)),
    ],
)
def test_who_is_chosen(options, text, loads, expected):
    assert pick(policy(options), text, loads) == expected


def test_a_spilled_prefix_gets_a_second_holder():
    spilled = policy(TIGHT)
    assert pick(spilled, "ABEE", {"z": 14, "x": 0, "w": 1})[0] == "x"
    spilled.placed(request(1, "ABEE"), spot("x"), 0.0)
    assert pick(spilled, "ABEE", {"z": 3, "x": 1, "w": 0}) == ("x", 4)


def target(name, **fields):
    return Target(name, 1, replica=Replica(beat(name, **fields), 0.0))


def test_what_is_turned_away_goes_where_the_wait_is_least():
    few_long = target("a", prefill_queued_tokens=9000, kv_used_ratio=0.1, prefill_s_per_token=1e-4)
    quick = target("b", prefill_queued_tokens=9000, kv_used_ratio=0.1, prefill_s_per_token=1e-5)
    unknown = target("c")
    all_three = [few_long, quick, unknown]
    waiting = policy().choose(request(1, "ZZZZ"), all_three, 0.0)
    assert waiting.name == "b"
    assert waiting.reason == "best match 0%, least wait 0.107 s"
    by_requests = policy(SmgOptions(expected_wait=0)).choose(request(1, "ZZZZ"), all_three, 0.0)
    assert by_requests.reason == "best match 0%, least load 1"


@pytest.mark.parametrize(
    ("fields", "expected_s"),
    [
        # 10,000 tokens at 2,000 a second, and memory that is half full: 5 s + 0.15 s.
        (
            {
                "prefill_queued_tokens": 10_000,
                "kv_used_ratio": 0.5,
                "prefill_s_per_token": 1 / 2000,
            },
            5.15,
        ),
        ({"prefill_queued_tokens": 0, "kv_used_ratio": 0.9}, 1.35),
        ({"prefill_queued_tokens": 0, "kv_used_ratio": 1.0}, 149.85),
        ({"prefill_queued_tokens": 0, "kv_used_ratio": None}, None),
        ({"prefill_queued_tokens": None, "kv_used_ratio": 0.5}, None),
    ],
)
def test_the_expected_wait(fields, expected_s):
    assert expected_wait_s(target("a", **fields), 0.0) == (
        None if expected_s is None else pytest.approx(expected_s)
    )


@given(
    st.text("ABEZ", max_size=6),
    st.dictionaries(st.sampled_from("vwxyz"), st.integers(0, 200), min_size=1),
    st.integers(0, 3),
)
def test_one_of_the_candidates_the_same_for_the_same_seed(text, loads, seed):
    first, second = (pick(policy(TIGHT, seed), text, loads) for _ in range(2))
    assert first == second
    assert first[0] in loads


@pytest.mark.parametrize("options", [{"cache_threshold": 1.5}, {"expected_wait": 2}])
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SmgOptions(**options)
