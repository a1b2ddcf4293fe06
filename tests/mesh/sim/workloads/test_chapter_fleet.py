"""Code 23.2.1's arrivals."""

from collections import Counter

import pytest

from agents.sim.profiles import CHAPTER
from mesh.core.model.settings import RouterSettings
from mesh.sim.config import WorldConfig
from mesh.sim.workloads.prefix_groups import OWN_TOKENS, PREFIX_TOKENS, chapter
from mesh.sim.world import run
from schemas.ids import RegionId
from schemas.settings import parse_pushing


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


def test_round_robin_runs_the_chapter_s_half_empty_batches_all_the_time():
    # Output 23.2.1: 303 requests/s, batches 45% full, 240 GPU seconds in a minute of 4 replicas.
    settings = RouterSettings(policy="round-robin", pushing=parse_pushing("blind"))
    config = WorldConfig(regions={RegionId("us"): [CHAPTER] * 4}, settings=settings)
    played = run(chapter(duration_s=6.0, seed=1), config)
    assert played["failed"] == played["shed"] == 0
    assert played["batch_occupancy"] == pytest.approx(0.45, abs=0.04)
    assert played["gpu_busy_s"] / played["duration_s"] == pytest.approx(240.1 / 60, rel=0.02)
