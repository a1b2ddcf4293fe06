"""Prices of peers that list their replicas: each with what it holds and its own load."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.gossip.remote_prefixes import Origin, RemotePrefixes
from mesh.core.model.prompt import Prompt
from mesh.core.model.settings import RouterSettings
from mesh.core.policies.base import Target
from mesh.core.policies.mesh import MeshPolicy
from mesh.core.policies.mesh_peers import FORWARDS_MAX, PEERS_MAX, UNSENT, Forward, Forwards
from mesh.core.policies.mesh_price import HELD_NOTHING, HeldPrefix, Price, PromptHolders, score
from mesh.core.policies.mesh_prices import Prices
from mesh.core.policies.mesh_speeds import SpeedModel
from mesh.core.view.peers import Peer, RoundTripEstimate
from schemas.decision import CandidateKind
from schemas.listed_replicas import ListedReplicas
from schemas.state import ModelCapacity
from tests.mesh.core.build import EU, MODEL, ROUTER, digest, request, spot

PEER = CandidateKind.PEER
S_PER_TOKEN = 1e-3
NOW = 100.0


def peer(*rows, rtt_s=0.1, ready=None, seen_at=NOW, queue=0, **region):
    """Rows of name, wait_s, running, kv_free_tokens; all at one speed."""
    columns = [*zip(*rows, strict=True)] or [(), (), (), ()]
    listed = ListedReplicas(
        names=columns[0],
        wait_s=columns[1],
        running=columns[2],
        kv_free_tokens=columns[3],
        prefill_s_per_token=(S_PER_TOKEN,) * len(rows),
        prefill_base_s=(0.05,) * len(rows),
    )
    has = {"free": 4, "wait_s": 0.0, "running": 0.0, "listed": tuple(range(len(rows)))} | region
    capacity = ModelCapacity(ready=ready or max(1, len(rows)), **has)
    known = Peer(pings=RoundTripEstimate(rtt_s), seen_at=seen_at)
    known.digests[ROUTER] = digest(
        "eu",
        queue=queue,
        models={MODEL: capacity},
        replicas=listed,
        prefill_s_per_token=S_PER_TOKEN,
        prefill_base_s=0.05,
    )
    return Target("eu", 0, PEER, rtt_s, peer=known, ahead=queue)


def price(target, named=(), held=HELD_NOTHING, tokens=1000, speeds=None, forwards=None, now=NOW):
    """`named`: tokens that replicas hold."""
    of = {name: HeldPrefix(count // 100, count, name) for name, count in dict(named).items()}
    held = max([held, *(HeldPrefix(one.blocks, one.tokens) for one in of.values())])
    asked = request(1, prompt=Prompt(tokens, ()))
    known = PromptHolders({}, {"eu": held}, {"eu": of})
    prices = Prices(speeds or SpeedModel(), asked, now, forwards or Forwards())
    return Price._make(prices.rows([target], known)[0])


def test_a_holder_is_priced_with_its_own_wait():
    target = peer(("eu-0", 0.0, 0, 50_000), ("eu-1", 0.6, 0, 50_000))
    near = price(target, {"eu-1": 900})
    assert (near.held.replica, near.queue_s) == ("eu-1", 0.6)
    assert near.prefill_s == pytest.approx(100 * S_PER_TOKEN)
    far = price(target, {"eu-1": 300})  # waiting for it takes longer than computing it
    assert (far.held, far.queue_s) == (HeldPrefix(0, 0, "eu-0"), 0.0)
    assert far.prefill_s == pytest.approx(1000 * S_PER_TOKEN)
    assert far.seconds == pytest.approx(sum(score(far).terms.values()))


def test_without_a_list_the_region_is_priced_as_one_replica_with_the_best_of_all():
    one = price(peer(wait_s=0.25), {"eu-1": 900})
    assert (one.queue_s, one.held) == (0.25, HeldPrefix(9, 900))
    assert one.prefill_s == pytest.approx(100 * S_PER_TOKEN)


def test_where_no_holder_is_named_the_region_may_hold_it_anywhere():
    target = peer(("eu-0", 0.7, 0, 50_000), wait_s=0.7)
    one = price(target, held=HeldPrefix(9, 900))
    assert (one.held, one.queue_s) == (HeldPrefix(9, 900), pytest.approx(0.7))
    partly = price(target, {"eu-0": 500}, held=HeldPrefix(9, 900))
    assert partly.held == HeldPrefix(9, 900)


def test_a_holder_that_is_not_listed_is_as_busy_as_the_busiest_that_is():
    target = peer(("eu-0", 0.1, 0, None), ("eu-1", 0.4, 0, None), ready=40)
    one = price(target, {"eu-7": 900})
    assert (one.held.replica, one.queue_s) == ("eu-7", pytest.approx(0.4))


def test_memory_is_of_the_replica_that_is_priced():
    full, empty = ("eu-0", 0.0, 4, 0), ("eu-1", 0.0, 4, 50_000)
    assert price(peer(full, empty)).memory_s == 0.0
    assert 0.0 < price(peer(full), {"eu-0": 900}).memory_s < price(peer(full)).memory_s
    idle = ("eu-0", 0.0, 0, 0)  # nothing runs there that would release any
    assert price(peer(idle)).memory_s == 0.0


def test_the_next_turns_pay_the_round_trip_to_listed_replicas_too():
    speeds = SpeedModel()
    for _ in range(200):
        speeds.prompt(100, goes_on=True)
        speeds.prompt(100, goes_on=False)
    assert speeds.returns == pytest.approx(1.0, abs=0.05)
    target = peer(("eu-0", 0.0, 0, 50_000))
    assert price(target).others_s == 0.0
    assert price(target, speeds=speeds).others_s == pytest.approx(speeds.returns * 0.1)


def test_what_was_forwarded_counts_where_it_was_priced_until_a_digest_may_have_it():
    target, forwards = peer(("eu-0", 0.0, 0, None), ("eu-1", 0.2, 0, None)), Forwards()
    forwards.add("eu", Forward(NOW - 0.05, "eu-0", 700, 800))
    one = price(target, forwards=forwards)
    assert (one.held.replica, one.queue_s) == ("eu-1", 0.2)
    later = peer(("eu-0", 0.0, 0, None), seen_at=NOW + 0.06)
    assert price(later, forwards=forwards, now=NOW + 0.1).queue_s == 0.0
    assert forwards.unseen("eu", 0.0) == {}


def test_forwards_are_limited():
    forwards = Forwards()
    for _number in range(FORWARDS_MAX + 5):
        forwards.add("eu", Forward(0.0, "eu-0", 1, 2))
    assert forwards.unseen("eu", 0.0)["eu-0"] == (FORWARDS_MAX, 2 * FORWARDS_MAX)
    for number in range(PEERS_MAX):
        forwards.add(f"r{number}", Forward(0.0, "a", 1, 2))
    assert forwards.unseen("eu", 0.0).get("eu-0", UNSENT) == UNSENT


ROWS = st.tuples(
    st.sampled_from(["eu-0", "eu-1", "eu-2"]),
    st.floats(0, 1e6),
    st.integers(0, 2**31),
    st.none() | st.integers(0, 2**40),
)


@given(
    st.lists(ROWS, max_size=12),
    st.dictionaries(st.sampled_from(["eu-0", "eu-1", "eu-9"]), st.integers(1, 999)),
    st.integers(0, 50),
)
def test_any_list_makes_a_price(rows, named, queue):
    one = price(peer(*rows, queue=queue), named)
    assert one.seconds == pytest.approx(sum(score(one).terms.values()))
    assert all(0.0 <= term < float("inf") for term in score(one).terms.values())


def test_places_beyond_the_list_and_replicas_without_speed_are_ignored():
    target = peer(("eu-0", 0.3, 0, None), listed=(0, 5))
    assert price(target).queue_s == 0.3
    strange = peer(("eu-0", 0.3, 0, None), wait_s=0.1)
    lists = strange.peer.digests[ROUTER].replicas
    object.__setattr__(lists, "prefill_s_per_token", (0.0,))
    assert price(strange).queue_s == 0.1


def test_it_is_forwarded_for_the_holder_and_the_next_one_meets_that_work():
    policy = MeshPolicy(RouterSettings(), Random(1))
    target = peer(("eu-0", 0.0, 0, None), ("eu-1", 0.05, 0, None))
    asked = request(1, "ABCDEFGH")
    known, origin = RemotePrefixes(), Origin("eu", "r1")
    known.trust(origin, True)
    known.add(origin, asked.prompt.hashes, ("eu-1",), (1,) * 8)
    policy.indexes[PEER].announced = known
    choice = policy.choose(asked, [target], NOW)
    assert choice.target is target and choice.matched_blocks == 8
    policy.placed(asked, spot(EU, PEER), NOW)
    [next_one] = policy.choose(request(2, "ABCDEFGH"), [target], NOW).scores
    assert next_one.terms["queue_s"] == pytest.approx(0.05 + S_PER_TOKEN)  # its last token
