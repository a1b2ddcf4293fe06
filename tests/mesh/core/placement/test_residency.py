"""Where requests with labels go, and where they don't: tables, and chaos watched from outside."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.residency import Residency
from schemas.decision import Placement
from schemas.exchange import Refusal
from schemas.http import Fault
from schemas.residency import ground
from schemas.state import ModelCapacity
from tests.mesh.core import build
from tests.mesh.core.build import AP, EU, MODEL, US, beat, core, digest, foreign, request
from tests.mesh.core.labelled_chaos import LabelledChaos

FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
GROUND = ground({US: ("us",), EU: ("eu",), AP: ()})


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def router(where=GROUND, **choices):
    made = core(ground=where, **choices)
    made.handle(ev.HeartbeatSeen(beat("us-0")), 0.0)
    for region, labels in (("eu", ("eu",)), ("ap", ())):
        made.handle(ev.DigestSeen(digest(region, residency=labels)), 0.0)
    return made


def arrive(made, *labels, now=0.1, **fields):
    return made.handle(ev.RequestArrived(request(1, residency=labels, **fields)), now)


@FEW
@given(st.integers(0, 2**32 - 1))
@example(1)
@example(2)
def test_no_request_is_placed_and_no_prefix_published_outside_its_labels(seed):
    chaos = LabelledChaos(seed)
    chaos.run(300)
    chaos.heal()
    left = [case.request.key for case in chaos.ledger.cases.values() if case.ended_by is None]
    assert left == [], "a request that may go nowhere is refused"
    assert (len(chaos.core.held), len(chaos.core.held.held_needs)) == (0, 0)


@settings(FEW, max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_the_same_events_have_the_same_effects_on_any_ground(seed):
    first = LabelledChaos(seed)
    first.run(150)
    again = build.core(seed, **first.settings)
    effects = [[*again.handle(event, now), *again.finish()] for event, now in first.history]
    assert effects == first.effects


def test_the_chaos_does_what_it_is_to_be_safe_from():
    """Else the property above would hold of a world where nothing happens."""
    seen = Counter()
    for seed in range(30):
        chaos = LabelledChaos(seed)
        chaos.run(300)
        seen.update(chaos.counts)
    assert len(seen) == 8
    assert all(count > 20 for count in seen.values()), seen


def test_a_request_goes_to_the_peer_that_carries_its_label_though_home_is_free():
    effects = arrive(router(), "eu")
    [forward], [decided] = of(fx.Forward, effects), of(fx.Decided, effects)
    assert forward.peer == EU
    assert decided.decision.residency == ("eu",)
    assert {one.name: one.why for one in decided.decision.candidates} == {
        "eu": None,
        "us-0": "residency",
        "ap": "residency",
    }


def test_one_of_its_labels_is_enough():
    [dispatch] = of(fx.Dispatch, arrive(router(), "eu", "us"))
    assert dispatch.replica == "us-0"


def test_who_wants_no_label_may_go_anywhere():
    assert of(fx.Dispatch, arrive(router()))


def test_a_label_on_no_map_is_refused_at_once_with_the_receipt():
    effects = arrive(router(), "mars")
    [fail], [decided] = of(fx.Fail, effects), of(fx.Decided, effects)
    assert fail.fault is Fault.RESIDENCY
    assert "no region that can be asked from here carries mars" in fail.message
    assert decided.decision.placement is Placement.SHED
    assert {one.why for one in decided.decision.candidates} == {"residency"}


def test_who_would_do_and_is_busy_is_waited_for():
    made = router(policy="skywalker")
    made.handle(ev.DigestSeen(digest("eu", 2, free=0, residency=("eu",))), 0.1)
    assert not of(fx.Fail, arrive(made, "eu"))
    assert len(made.held) == 1
    effects = made.handle(ev.DigestSeen(digest("eu", 3, free=1, residency=("eu",))), 0.2)
    assert [forward.peer for forward in of(fx.Forward, effects)] == [EU]


def test_who_waits_for_other_ground_does_not_block_those_behind():
    made = router(policy="skywalker")
    made.handle(ev.DigestSeen(digest("eu", 2, free=0, residency=("eu",))), 0.1)
    arrive(made, "eu")
    late = made.handle(ev.RequestArrived(request(2, arrived_at=0.1)), 0.1)
    assert [dispatch.replica for dispatch in of(fx.Dispatch, late)] == ["us-0"]


@pytest.mark.parametrize("away_s", [5.0, 3600.0])
@pytest.mark.parametrize("policy", ["skywalker", "mesh"])
def test_away_carriers_hold_a_request_and_absent_ones_refuse_it(away_s, policy):
    made = router(policy=policy)
    for now in (1.0, away_s - 2.0, away_s - 1.0, away_s):  # nothing was read: not before the last
        made.handle(ev.Tick(), now)
    made.handle(ev.HeartbeatSeen(beat("us-0", 2)), away_s)
    held = arrive(made, "eu", now=away_s, arrived_at=away_s, deadline=away_s + 999.0)
    assert not of(fx.Fail, held) and len(made.held) == 1
    [decision] = [one.decision for one in of(fx.Decided, held)]
    whys = {"us-0": "residency", "eu": "silent", "ap": "residency"}
    assert {one.name: one.why for one in decision.candidates} == whys
    assert "that carries eu is ready" in decision.reason

    over = away_s + RouterSettings().hold_s_max
    made.handle(ev.HeartbeatSeen(beat("us-0", 3)), over)
    ended = made.handle(ev.Tick(), over)
    [fail], [decided] = of(fx.Fail, ended), of(fx.Decided, ended)
    assert fail.fault is Fault.NO_REPLICA and fail.fault.value.status == 503
    assert fail.retry_after_s > 0.0
    assert decided.decision.placement is Placement.SHED
    assert fail.message == decided.decision.reason
    assert fail.message == f"no replica that carries eu serves {MODEL!r} at present"
    assert not of(fx.Dispatch, ended) and not of(fx.Forward, ended)


def test_a_carrier_that_comes_back_gets_what_waits_for_it():
    made = router()
    made.handle(ev.Tick(), 300.0)
    arrive(made, "eu", now=300.0, arrived_at=300.0, deadline=400.0)
    back = made.handle(ev.DigestSeen(digest("eu", 2, residency=("eu",))), 301.0)
    assert [forward.peer for forward in of(fx.Forward, back)] == [EU]


def test_a_carrier_that_is_busy_is_called_busy():
    made = router(policy="skywalker")
    made.handle(ev.DigestSeen(digest("eu", 2, free=0, residency=("eu",))), 0.1)
    [decided] = of(fx.Decided, arrive(made, "eu"))
    assert decided.decision.reason == "no replica and no peer that carries eu is free"


def test_a_refusal_distinguishes_never_from_not_now():
    made = router()
    made.handle(ev.HeartbeatSeen(beat("us-0", 2, residency=())), 0.1)  # it carries nothing now
    for key, label, why in ((1, "us", Refusal.NO_REPLICA), (2, "eu", Refusal.RESIDENCY)):
        asked = ev.RequestArrived(foreign(key, residency=(label,)))
        [refusal] = of(fx.RefusePeer, made.handle(asked, 0.1))
        assert refusal.reason is why


def test_a_replica_may_vouch_for_fewer_labels_and_never_for_more():
    made = core(ground=GROUND)
    for seq, claimed, goes in [(1, (), False), (2, ("eu",), False), (3, ("us",), True)]:
        now = float(seq)
        made.handle(ev.HeartbeatSeen(beat("us-0", seq, residency=claimed)), now)
        for label in ("us", "eu"):
            asked = request(10 * seq + (label == "us"), residency=(label,))
            sent = of(fx.Dispatch, made.handle(ev.RequestArrived(asked), now))
            assert bool(sent) == (goes and label == "us"), (claimed, label)


def test_a_peer_that_claims_what_the_file_does_not_give_it_gets_nothing():
    made = router()
    made.handle(ev.DigestSeen(digest("ap", 2, residency=("eu", "us"))), 0.1)
    made.handle(ev.DigestSeen(digest("eu", 2, residency=None)), 0.1)  # it knows of no labels
    assert not of(fx.Forward, arrive(made, "eu"))


def test_a_peer_with_few_replicas_on_that_ground_counts_those_alone():
    few = {"eu": {MODEL: digest("eu", ready=1, free=0).models[MODEL]}}
    made = router(policy="skywalker")
    made.handle(ev.DigestSeen(digest("eu", 2, residency=("eu",), models_by_label=few)), 0.1)
    assert not of(fx.Forward, arrive(made, "eu"))


def capacity(**fields):
    idle = {"ready": 4, "free": 4, "wait_s": 0.0, "running": 0.0}
    return {MODEL: ModelCapacity(**(idle | fields))}


@pytest.mark.parametrize(("labels", "goes_to"), [(("eu",), AP), ((), EU), (("eu", "hr"), EU)])
def test_what_a_peer_costs_is_what_its_replicas_on_that_ground_cost(labels, goes_to):
    """eu's only replica that carries eu is busy for 9 s, its others are idle."""
    made = router(ground({US: ("us",), EU: ("eu", "hr"), AP: ("eu",)}), policy="mesh")
    made.handle(ev.HeartbeatSeen(beat("us-0", 2, prefill_queued_tokens=200_000)), 0.1)
    few = {"eu": capacity(ready=1, free=0, wait_s=9.0, running=8.0), "hr": capacity(ready=3)}
    told = {
        "eu": {"models": capacity(), "residency": ("eu", "hr"), "models_by_label": few},
        "ap": {"models": capacity(wait_s=1.0, running=1.0), "residency": ("eu",)},
    }
    for region, fields in told.items():
        made.handle(ev.DigestSeen(digest(region, 2, **fields)), 0.1)
    assert [forward.peer for forward in of(fx.Forward, arrive(made, *labels))] == [goes_to]


def test_after_a_failure_it_is_placed_again_inside_or_not_at_all():
    made = router()
    [forward] = of(fx.Forward, arrive(made, "eu"))
    effects = made.handle(ev.AttemptFailed(1, forward.attempt, "broke"), 0.2)
    assert not of(fx.Dispatch, effects) and not of(fx.Forward, effects)
    assert [fail.fault for fail in of(fx.Fail, effects)] == [Fault.ENGINE_FAILED]


def test_a_receiving_region_looks_again():
    made = router()
    asked = foreign(1, residency=("eu",))
    [refusal] = of(fx.RefusePeer, made.handle(ev.RequestArrived(asked), 0.1))
    assert refusal.reason is Refusal.RESIDENCY
    welcome = made.handle(ev.RequestArrived(foreign(2, residency=("us",))), 0.1)
    assert [dispatch.replica for dispatch in of(fx.Dispatch, welcome)] == ["us-0"]


def test_a_confined_region_sends_nothing_out_that_entered_there():
    confined = ground({US: ("us",), EU: ("eu",), AP: ("us",)}, {US: ("us",)})
    made = router(confined, policy="skywalker")
    made.handle(ev.HeartbeatSeen(beat("us-0", 2, full=True)), 0.1)
    made.handle(ev.DigestSeen(digest("ap", 2, residency=("us",), free=0)), 0.1)
    assert not of(fx.Forward, arrive(made))  # eu is free, and carries nothing that counts
    effects = made.handle(ev.DigestSeen(digest("ap", 3, residency=("us",))), 0.2)
    assert [forward.peer for forward in of(fx.Forward, effects)] == [AP]


def told(made, until):
    blocks, now = set(), 1.0
    while now < until:
        now += 0.1
        for effect in of(fx.PublishTrie, made.handle(ev.Tick(), now)):
            blocks.update(effect.delta.gained)
    return blocks


def test_a_prefix_is_published_only_if_all_receivers_may_know():
    made = router(ground({US: ("us",), EU: ("us",), AP: ()}))
    arrive(made, "us", text="AB")
    made.handle(ev.RequestArrived(request(2, "AC")), 0.1)
    assert told(made, 2.0) == set(build.prompt("AC").hashes)  # "A" is the open prompt's as well
    everywhere = router(ground({US: ("us",), EU: ("us",), AP: ("us",)}))
    arrive(everywhere, "us", text="AB")
    assert told(everywhere, 2.0) == set(build.prompt("AB").hashes)


def test_a_confined_region_publishes_to_its_kind():
    """Regions not of its kind do not receive it, by the links' rules."""
    made = router(ground({US: ("us",), EU: (), AP: ("us",)}, {US: ("us",)}))
    arrive(made, text="AB")
    assert told(made, 2.0) == set(build.prompt("AB").hashes)


def test_labels_that_have_nothing_in_common_lead_nowhere():
    home = Residency(US, ground({US: ("us",), EU: ("eu",)}, {US: ("us",)}))
    asked = request(1, residency=("eu",))
    assert home.wanted(asked) == frozenset()
    assert home.forbids(asked) is not None
