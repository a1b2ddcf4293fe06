"""Answers are the same for the same prompt and as long as asked."""

import statistics

from hypothesis import given
from hypothesis import strategies as st

from agents.sim.text import LengthOptions, answer


@given(prompt=st.binary(), room=st.integers(1, 400), limit=st.integers(1, 400))
def test_ignore_eos_gives_exactly_the_requested_length(prompt, room, limit):
    said = answer(prompt, LengthOptions(room=room, max_tokens=limit, ignore_eos=True), 0)
    assert said.tokens == min(room, limit)
    assert len(said.text) == 4 * said.tokens
    assert said.finish_reason == "length"


@given(prompt=st.binary(), limit=st.integers(1, 400), least=st.integers(0, 400))
def test_lengths_keep_within_their_limits(prompt, limit, least):
    least = min(least, limit)
    said = answer(prompt, LengthOptions(room=1000, max_tokens=limit, min_tokens=least), 0)
    assert max(least, 1) <= said.tokens <= limit
    assert said.finish_reason == "stop" or said.tokens == limit


def test_the_seed_and_the_prompt_decide():
    wishes = LengthOptions(room=1000)
    assert answer(b"a", wishes, 1) == answer(b"a", wishes, 1)
    assert answer(b"a", wishes, 1).text != answer(b"b", wishes, 1).text
    assert answer(b"a", wishes, 1).text != answer(b"a", wishes, 2).text


def test_drawn_lengths_have_the_median_of_the_azure_trace():
    lengths = [answer(b"%d" % n, LengthOptions(room=10_000), 0).tokens for n in range(2000)]
    assert 115 < statistics.median(lengths) < 143
    assert max(lengths) <= 2048


def test_a_stop_sequence_ends_the_answer_and_is_not_shown():
    full = answer(b"prompt", LengthOptions(room=50, ignore_eos=True), 0)
    stop = full.text[41:46]
    cut = answer(b"prompt", LengthOptions(room=50, ignore_eos=True, stop=(stop, "zzzz")), 0)
    at = full.text.find(stop)
    assert cut.finish_reason == "stop"
    assert cut.shown(0, cut.tokens) == full.text[:at]
    assert cut.tokens == -(-(at + 5) // 4)
    assert "".join(cut.shown(n, n + 1) for n in range(cut.tokens)) == full.text[:at]
