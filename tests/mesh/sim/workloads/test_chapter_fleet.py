"""Code 23.2.1's arrivals."""

from collections import Counter

import pytest

from agents.sim.profiles import CHAPTER
from mesh.sim.workloads.chapter_fleet import OWN_TOKENS, PREFIX_TOKENS, chapter


def test_300_requests_a_second_over_50_equal_prefixes():
    arrivals = chapter().arrivals
    assert len(arrivals) / 60 == pytest.approx(300, rel=0.03)
    prefixes = Counter(arrival.node.prompt[0] for arrival in arrivals)
    assert len(prefixes) == 50
    assert min(prefixes.values()) > 0.75 * len(arrivals) / 50
    assert {arrival.node.answer.tokens for arrival in arrivals} == {1}


def test_the_profile_computes_a_prefix_in_3_ms_and_holds_twelve():
    assert CHAPTER.token_s * PREFIX_TOKENS == pytest.approx(0.003)
    assert CHAPTER.knots == ((CHAPTER.max_seqs * OWN_TOKENS, 0.040),)
    assert CHAPTER.kv_tokens // PREFIX_TOKENS == 12
