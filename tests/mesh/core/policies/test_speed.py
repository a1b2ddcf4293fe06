"""Speeds: what a target says, the papers' figures where it says nothing."""

import pytest

from mesh.core.policies.base import (
    DECODE_S_PER_TOKEN,
    PREFILL_S_PER_TOKEN,
    TYPICAL,
    Target,
    prefill_s_per_token,
    speed_of,
)
from mesh.core.view.peers import Peer
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind
from schemas.ids import RouterId
from schemas.state import PrefillPrior
from tests.mesh.core.build import beat, digest


def of_replica(**fields):
    return speed_of(Target("a", 0, replica=Replica(beat("a", **fields), 0.0)))


def test_a_replica_reports_its_own():
    said = {"prefill_s_per_token": 1e-4, "prefill_base_s": 0.02, "decode_tokens_per_s": 50.0}
    speed = of_replica(**said)
    assert speed == (1e-4, 0.02, 0.02)
    assert speed.prefill_s(1000) == pytest.approx(0.12)


@pytest.mark.parametrize("fields", [{}, {"prefill_s_per_token": 0.0, "decode_tokens_per_s": 0.0}])
def test_unknown_and_zero_are_the_typical_ones(fields):
    assert of_replica(**fields) == TYPICAL == (PREFILL_S_PER_TOKEN, 0.0, DECODE_S_PER_TOKEN)


def test_until_it_has_learned_its_own_a_replica_has_the_speed_that_its_agent_knew():
    prior = PrefillPrior(short_tokens=100, short_s=0.08, more_tokens=1000, more_s=0.3, error=0.1)
    target = Target("a", 0, replica=Replica(beat("a", prefill_prior=prior), 0.0))
    assert speed_of(target) == pytest.approx((3e-4, 0.05, DECODE_S_PER_TOKEN))
    assert prefill_s_per_token(target) == pytest.approx(3e-4)
    learned = {"prefill_s_per_token": 1e-4, "prefill_base_s": 0.02}
    assert of_replica(prefill_prior=prior, **learned) == (1e-4, 0.02, DECODE_S_PER_TOKEN)


def test_a_peer_reports_it_by_its_routers():
    peer = Peer()
    target = Target("eu", 0, CandidateKind.PEER, 0.1, peer=peer)
    assert speed_of(target) == TYPICAL
    for router, s_per_token in (("r1", 1e-4), ("r2", 3e-4), ("r3", None)):
        peer.digests[RouterId(router)] = digest("eu", prefill_s_per_token=s_per_token)
    assert speed_of(target).prefill_s_per_token == pytest.approx(2e-4)


def test_nothing_at_all_is_typical():
    assert speed_of(Target("a", 0)) == TYPICAL
