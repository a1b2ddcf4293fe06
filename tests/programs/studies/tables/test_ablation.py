"""Ablated policies are the whole one but for one part."""

from random import Random

import pytest

from mesh.core.model.prompt import Prompt
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import find_maker
from mesh.core.policies.base import Destination, Target
from mesh.core.policies.mesh import MeshPolicy
from mesh.core.policies.mesh_price import Price, PromptHolders
from mesh.core.policies.mesh_prices import Prices
from mesh.core.policies.mesh_speeds import SpeedModel
from mesh.core.view.peers import Peer, RoundTripEstimate
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind
from schemas.state import ModelCapacity
from tests.mesh.core.build import MODEL, ROUTER, beat, digest, request
from tests.programs.studies.ablation import PARTS as SHOWN
from tests.programs.studies.tables.ablation import (
    OWN_TERMS,
    PARTS,
    PRICES,
    MeshWithout,
    with_ablations,
)

NOW = 100.0


def busy():
    """A replica and a peer whose prices have no term that is 0, but for a load of adapters."""
    one = Replica(
        beat(
            "a", prefill_queued_tokens=4000, kv_used_ratio=1.0, kv_capacity_tokens=1000, running=4
        ),
        NOW,
    )
    far = Peer(pings=RoundTripEstimate(0.1), seen_at=NOW)
    capacity = ModelCapacity(ready=1, free=0, wait_s=3.0, running=4.0, kv_free_tokens=0)
    far.digests[ROUTER] = digest("eu", queue=3, models={MODEL: capacity})
    return [
        Target("a", one.load, CandidateKind.REPLICA, 0.002, one, ahead=2),
        Target("eu", 0, CandidateKind.PEER, 0.1, peer=far, ahead=3),
    ]


BUSY = busy()


def priced(kind):
    speeds = SpeedModel()
    for at in range(20):  # prompts that go on, in a region that works
        speeds.prompt(1000, goes_on=True)
        speeds.demand.add(1.0, NOW - 20 + at)
    asked = request(1, prompt=Prompt(1000, ()), model=MODEL)
    return [Price._make(row) for row in kind(speeds, asked, NOW).rows(BUSY, PromptHolders({}, {}))]


@pytest.mark.parametrize("term", OWN_TERMS)
def test_a_price_without_a_term_is_less_by_it(term):
    for whole, left in zip(priced(Prices), priced(PRICES[term]), strict=True):
        seconds = getattr(whole, f"{term}_s")
        assert seconds > 0.0
        assert left.seconds == pytest.approx(whole.seconds - seconds)
        assert getattr(left, f"{term}_s") == 0.0
        assert left._replace(seconds=whole.seconds, **{f"{term}_s": seconds}) == whole


def test_what_others_pay_is_less_by_its_parts():
    here, far = priced(Prices)
    for name in ("line", "work"):
        for whole, left in zip((here, far), priced(PRICES[name]), strict=True):
            assert left.others_s < whole.others_s, name
    near, away = priced(PRICES["returns"])
    assert (near, away.seconds < far.seconds) == (here, True)


def test_without_held_requests_there_is_no_line():
    assert [one.line_s > 0.0 for one in priced(Prices)] == [True, True]
    assert [one.line_s for one in priced(PRICES["line"])] == [0.0, 0.0]


def test_every_part_that_the_study_takes_out_can_be():
    makers = with_ablations(lambda world: {})(None)
    assert {f"mesh-without-{part}" for part in PARTS} <= makers.keys()
    for policy, _ in SHOWN.values():
        known = makers if policy in makers else None
        maker = makers[policy] if known else find_maker(policy)
        assert maker(RouterSettings(), Random(1)).joint


def test_what_is_taken_out_is_not_learned_again():
    policy = MeshWithout(RouterSettings(), Random(1), "rtt")
    far = [BUSY[1]]
    for key in range(20):
        asked = request(key, prompt=Prompt(1000, ()), model=MODEL, streams=True)
        [score] = policy.choose(asked, far, NOW).scores
        policy.placed(asked, Destination(CandidateKind.PEER, "eu"), NOW)
        whole_s = MeshPolicy(RouterSettings(), Random(1)).choose(asked, far, NOW).scores[0].seconds
        others_s = score.terms["others_s"]
        policy.began(asked, Destination(CandidateKind.PEER, "eu"), NOW + whole_s - others_s)
        assert policy._delays.of("eu", NOW) == pytest.approx(0.0, abs=1e-6)
