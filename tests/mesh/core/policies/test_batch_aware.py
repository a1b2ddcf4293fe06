"""Batch-aware: affinity, two choices on occupancy, and the bounded fill wait."""

from collections import Counter
from random import Random

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.policies.base import Target
from mesh.core.policies.batch_aware import BatchAware, BatchAwareOptions, occupancy
from mesh.core.view.peers import Peer
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind, Placement
from tests.mesh.core.build import MODEL, beat, core, digest, foreign, request, spot

WAIT_S = 0.025
GREEDY = BatchAwareOptions(fill_wait_s=0.0)


def target(name, running=1, **fields):
    replica = Replica(beat(name, running=running, **fields), 0.0)
    return Target(name, replica.load, replica=replica)


def peer(name, free, ready=4, sent=0):
    known = Peer(digests={"r1": digest(name, free=free, ready=ready)})
    known.forwarded_at.extend([0.0] * sent)
    return Target(name, sent, CandidateKind.PEER, 0.1, peer=known)


def policy(options=None, held=(), seed=1):
    made = BatchAware(Random(seed), 100, options or BatchAwareOptions())
    for name, text in held:
        made.placed(request(1, text), spot(name), 0.0)
    return made


# Occupancy.


@pytest.mark.parametrize(
    ("place", "filled"),
    [
        (target("a", 2), 0.25),
        (target("a", 8, pending=4), 1.5),  # with what is queued there
        (target("a", 2, outstanding=6), 0.75),
        (target("a", 2, kv_used_ratio=0.9, kv_capacity_tokens=1000), 0.9),  # the fuller of both
        (target("a", 2, kv_used_ratio=0.1, kv_capacity_tokens=1000), 0.25),
        (target("a", 2, batch_max=None, kv_used_ratio=0.5, kv_capacity_tokens=1000), 0.5),
        (target("a", 2, batch_max=None), None),
        (peer("eu", 3), 0.25),
        (peer("eu", 3, sent=2), 0.75),
        (peer("eu", 0, ready=0), None),
        (Target("a", 3), None),
    ],
)
def test_occupancy_is_what_is_there_against_what_fits(place, filled):
    assert occupancy(place, MODEL) == filled


def test_what_is_on_the_way_is_there():
    place = target("a", 0, kv_used_ratio=0.5, kv_capacity_tokens=1000)
    place.replica.on_the_way.add(1, 200, 200, 0.0)
    assert occupancy(place, MODEL) == 0.7


# Two choices.


def test_of_two_the_less_occupied_is_chosen_not_the_less_loaded():
    small, large = target("small", 4, batch_max=4), target("large", 5, batch_max=64)
    choice = policy().choose(request(1), [small, large], 1.0)
    assert choice.name == "large"
    assert {score.target.name: dict(score.terms) for score in choice.scores} == {
        "small": {"occupancy": 1.0},
        "large": {"occupancy": 5 / 64},
    }


def test_who_does_not_say_comes_after_the_other():
    silent, full = target("silent", 1, batch_max=None), target("full", 8)
    assert {policy(seed=seed).choose(request(1), [silent, full], 1.0).name
            for seed in range(10)} == {"full"}  # fmt: skip
    assert policy().choose(request(1), [silent], 1.0).name == "silent"


def test_equals_share():
    made, seen = policy(), Counter()
    targets = [target(name) for name in "abc"]
    for _ in range(3000):
        seen[made.choose(request(1), targets, 1.0).name] += 1
    assert all(abs(count - 1000) < 120 for count in seen.values()) and len(seen) == 3


def test_replicas_before_peers_and_the_less_busy_peer():
    peers = [peer("eu", 1), peer("ap", 3)]
    assert policy().choose(request(1), [target("a", 8), *peers], 1.0).name == "a"
    assert policy().choose(request(1), peers, 0.0).name == "ap"  # and nothing waits for a peer


# Affinity.


def test_the_holder_gets_it_at_once_however_idle_or_busy():
    made = policy(held=[("a", "ABCD")])
    for running in (0, 7, 8):
        targets = [target("a", running), target("b", 1)]
        choice = made.choose(request(1, "ABCZ"), targets, 0.0)
        assert (choice.name, choice.matched_blocks) == ("a", 3)
        assert choice.reason == "holds 75% of the prompt"


def test_a_backlog_beyond_the_threshold_breaks_it():
    made = policy(held=[("a", "ABCD")])
    other = target("b", 1)
    assert made.choose(request(1, "ABCD"), [target("a", 8, pending=1), other], 1.0).name == "b"
    patient = policy(BatchAwareOptions(backlog_max=2.0), held=[("a", "ABCD")])
    assert patient.choose(request(1, "ABCD"), [target("a", 8, pending=8), other], 1.0).name == "a"
    assert patient.choose(request(1, "ABCD"), [target("a", 8, pending=9), other], 1.0).name == "b"


def test_where_no_batch_is_known_anything_that_waits_is_a_backlog():
    made = policy(held=[("a", "ABCD")])
    targets = [target("b", 1)]
    free, queued = (target("a", 3, batch_max=None, pending=waits) for waits in (0, 1))
    assert made.choose(request(1, "ABCD"), [free, *targets], 1.0).name == "a"
    assert made.choose(request(1, "ABCD"), [queued, *targets], 1.0).name == "b"


def test_of_several_holders_the_least_occupied():
    made = policy(held=[("a", "ABCD"), ("b", "ABCD")])
    assert made.choose(request(1, "ABCD"), [target("a", 5), target("b", 4)], 1.0).name == "b"
    choice = made.choose(request(1, "ABCD"), [target("a", 5), target("b", 9)], 1.0)
    assert choice.name == "a"


def test_a_short_match_does_not_bind_and_the_forgotten_hold_nothing():
    made = policy(held=[("a", "ABCD")])
    targets = [target("a", 7), target("b", 1)]
    assert made.choose(request(1, "AZZZ"), targets, 1.0).name == "b"
    made.forget(spot("a"))
    assert made.choose(request(1, "ABCD"), targets, 1.0).name == "b"


# The fill wait.


def test_a_request_waits_at_an_idle_pick_and_no_longer_than_its_option():
    made, idle = policy(), [target("a", 0), target("b", 0)]
    asked = request(1, arrived_at=1.0)
    for now in (1.0, 1.0 + 0.9 * WAIT_S):
        choice = made.choose(asked, idle, now)
        assert (choice.target, choice.reason) == (None, "waits for others: its pick is idle")
    assert made.choose(asked, idle, 1.0 + 1.1 * WAIT_S).name in "ab"


def test_a_running_pick_is_joined_at_once():
    assert policy().choose(request(1, arrived_at=1.0), [target("a", 1)], 1.0).name == "a"


def test_what_a_peer_sent_never_waits():
    assert policy().choose(foreign(1, arrived_at=1.0), [target("a", 0)], 1.0).name == "a"


def test_without_a_wait_nothing_waits():
    assert policy(GREEDY).choose(request(1, arrived_at=1.0), [target("a", 0)], 1.0).name == "a"


def test_requests_held_meanwhile_go_along_until_the_batch_is_full():
    made = policy()
    idle = [target(name, 0) for name in "abcd"]
    first = made.choose(request(1), idle, 1.0)
    late = request(2, "B", arrived_at=1.0)
    for sent in range(1, 8):
        now_there = [target(one.name, sent if one.name == first.name else 0) for one in idle]
        along = made.choose(late, now_there, 1.0)
        assert (along.name, along.reason) == (first.name, f"goes along: {sent / 8:.0%} of a batch")
    full = [target(one.name, 8 if one.name == first.name else 0) for one in idle]
    assert made.choose(late, full, 1.0).target is None  # the next batch, which waits in its turn
    assert made.choose(late, now_there, 1.001).target is None  # so it does a moment later


def test_the_forgotten_are_not_gone_along_with():
    made = policy()
    first = made.choose(request(1), [target("a", 0)], 1.0)
    assert first.name == "a"
    made.forget(spot("a"))
    assert made.choose(request(2, arrived_at=1.0), [target("a", 1)], 1.0).reason.startswith("less")


def decided(effects):
    return [it.decision for it in effects if isinstance(it, fx.Decided)]


def test_a_router_fills_one_batch_with_what_came_within_the_wait():
    router = core(policy="batch-aware")
    for name in "abcd":
        router.handle(ev.HeartbeatSeen(beat(name)), 0.0)
    for key in range(5):
        arrived_at = 0.001 * key
        asked = request(key, chr(65 + key), arrived_at=arrived_at)
        [choice] = decided(router.handle(ev.RequestArrived(asked), arrived_at))
        assert choice.placement is Placement.HOLD
    assert decided(router.handle(ev.Tick(), 0.02)) == []
    went = decided(router.handle(ev.Tick(), 0.03))
    assert [one.placement for one in went] == [Placement.LOCAL] * 5
    assert len({one.replica for one in went}) == 1


@pytest.mark.parametrize(
    "options", [{"fill_wait_s": -1.0}, {"backlog_max": 0.0}, {"affinity": 0.0}]
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        BatchAwareOptions(**options)
