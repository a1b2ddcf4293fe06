import pytest

from agents.sim.profiles import LongPrefill, Profile

KNOTS = ((100, 10.0), (200, 30.0))


def profile(**changes) -> Profile:
    fields = {
        "name": "x",
        "knots": KNOTS,
        "token_s": 0.5,
        "sequence_s": 0.0,
        "context_s": 0.0,
        "arrival_s": 0.0,
        "batch_tokens": 512,
        "kv_tokens": 1000,
        "max_seqs": 8,
    }
    return Profile(**{**fields, **changes})


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(1, 10.0), (100, 10.0), (150, 20.0), (200, 30.0), (210, 35.0)],
)
def test_linear_time_is_flat_then_joined_then_a_slope(tokens, seconds):
    assert profile().linear_s(tokens) == pytest.approx(seconds)


def test_an_iteration_adds_sequences_context_and_chunks():
    priced = profile(sequence_s=1.0, context_s=0.01)
    # 150 + 10 tokens in the linear layers, 10 sequences, 400 + 600 tokens of context.
    expected = priced.linear_s(160) + 10 * 1.0 + 0.01 * 1000
    assert priced.iteration_s(((150, 400),), 10, 600) == pytest.approx(expected)


def test_decoding_is_an_iteration_without_chunks():
    priced = profile(sequence_s=1.0, context_s=0.01)
    assert priced.decode_s(4, 100) == priced.iteration_s((), 4, 100)


def test_a_long_prefill_costs_more_only_beyond_its_threshold():
    long = LongPrefill(threshold=1000, per_token_s=1.0, per_context_token_s=2.0, per_pair_s=3.0)
    assert long.seconds(10, 100) == 0.0
    assert long.seconds(10, 101) == 10.0 + 202.0 + 3030.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"knots": ()}, "above zero"),
        ({"knots": ((0, 0.0),)}, "above zero"),
        ({"token_s": 0.0}, "above zero"),
        ({"batch_tokens": 0}, "1 or more"),
        ({"kv_tokens": 0}, "1 or more"),
        ({"max_seqs": 0}, "1 or more"),
    ],
)
def test_a_profile_that_takes_no_time_or_room_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        profile(**changes)
