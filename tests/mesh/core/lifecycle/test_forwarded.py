"""What a region takes of its peers' work, and what it keeps for its own clients."""

from dataclasses import replace
from functools import partial

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.served_names import keeper_name, kept_name, served_name
from schemas.exchange import Refusal
from schemas.http import RESPONSES, Fault
from schemas.ids import ModelId
from schemas.state import ModelCapacity, ReplicaState
from tests.mesh.core.build import MODEL, beat, core, digest, foreign, request

SPEED = {"prefill_s_per_token": 0.001, "prefill_base_s": 0.05, "prefill_queued_tokens": 0}


def region(*beats, **settings):
    router = core(**({"policy": "least-load"} | settings))
    for one in beats:
        router.handle(ev.HeartbeatSeen(one), 0.0)
    return router


def asked(router, key=1, now=0.0, tokens=1000, **fields):
    """What becomes of a peer's request: the replica, or the reason."""
    letters = "".join(chr(ord("A") + number) for number in range(tokens // 64))
    wanted = foreign(key, letters, now, **fields)
    for effect in router.handle(ev.RequestArrived(wanted), now):
        if isinstance(effect, fx.RefusePeer):
            return Refusal(effect.reason)
        if isinstance(effect, fx.Dispatch):
            return effect.replica
    raise AssertionError("neither placed nor refused")


def test_without_a_goal_whatever_fits_is_taken():
    router = region(beat("a", **SPEED))
    assert asked(router) == "a"


def test_what_goes_on_with_a_response_is_refused_where_its_keeper_is_gone():
    for keeper in (
        partial(kept_name, "us"),
        partial(keeper_name, served_name(MODEL, RESPONSES), "us"),
    ):
        router = region(replace(beat("a", **SPEED), paths=(RESPONSES,)))
        assert asked(router, 1, model=keeper("a")) == "a"
        assert asked(router, 2, model=keeper("b")) is Refusal.NOT_KEPT
        drained = beat("a", 2, **SPEED, state=ReplicaState.DRAINING)
        router.handle(ev.HeartbeatSeen(replace(drained, paths=(RESPONSES,))), 0.0)
        assert asked(router, 3, model=keeper("a")) is Refusal.KEEPER_DRAINS
        just_started = region()
        assert asked(just_started, model=keeper("b")) is Refusal.NO_REPLICA


@pytest.mark.parametrize(
    ("name", "why", "fault"),
    [
        (kept_name("eu"), Refusal.NOT_KEPT, Fault.RESPONSE_UNKNOWN),
        (keeper_name(served_name(MODEL, RESPONSES), "eu"), Refusal.NOT_KEPT, Fault.STATE_GONE),
        (kept_name("eu"), Refusal.KEEPER_DRAINS, Fault.NO_REPLICA),
        (MODEL, Refusal.NOT_KEPT, None),
        (MODEL, Refusal.KEEPER_DRAINS, None),
    ],
)
def test_a_peer_s_word_that_a_keeper_is_gone_or_drained_is_the_end(name, why, fault):
    router = region()
    paths = {RESPONSES: {MODEL: ModelCapacity(ready=1, free=1)}}
    there = digest("eu", models=paths[RESPONSES], models_by_path=paths)
    router.handle(ev.DigestSeen(there), 0.0)
    [forward] = [
        effect for effect in router.handle(ev.RequestArrived(request(1, model=name)), 0.0)
        if isinstance(effect, fx.Forward)
    ]  # fmt: skip
    refused = ev.AttemptRefused(1, forward.attempt, why, "eu", None, -1, -1)
    found = [each for each in router.handle(refused, 0.1) if isinstance(each, fx.Fail)]
    assert [each.fault for each in found] == ([] if fault is None else [fault])


def test_what_would_spoil_the_own_goal_is_refused():
    # 100 tokens of the peer's and as many of a client's: 0.25 s with the 0.05 of every first one.
    strict, lax = (region(beat("a", **SPEED), own_ttft_goal_s=goal_s) for goal_s in (0.249, 0.251))
    assert asked(strict) is Refusal.OWN_WORK
    assert asked(lax) == "a"


def test_another_replica_with_room_keeps_the_goal():
    router = region(beat("a", **SPEED), beat("b", **SPEED), own_ttft_goal_s=0.16)
    assert asked(router) in ("a", "b")
    assert asked(router, 2) is Refusal.OWN_WORK  # the other one is what is left for our clients


def test_own_goal_is_kept_for_whoever_comes_next():
    router = region(beat("a", **SPEED), beat("b", **SPEED), own_ttft_goal_s=0.16)
    asked(router)
    effects = router.handle(ev.RequestArrived(request(9, arrived_at=0.0)), 0.0)
    assert any(isinstance(effect, fx.Dispatch) for effect in effects)


def test_the_last_slot_is_not_given_away():
    full_but_one = beat("a", running=7, outstanding=7, **SPEED)
    assert asked(region(full_but_one, own_ttft_goal_s=60.0)) is Refusal.OWN_WORK
    assert asked(region(full_but_one)) == "a"
    two_left = beat("a", running=6, outstanding=6, **SPEED)
    assert asked(region(two_left, own_ttft_goal_s=60.0)) == "a"


@pytest.mark.parametrize("unknown", ["prefill_s_per_token", "prefill_queued_tokens"])
def test_nobody_is_turned_away_for_a_guess(unknown):
    goal_s = 0.01 if unknown == "prefill_s_per_token" else 0.26
    router = region(beat("a", **(SPEED | {unknown: None})), own_ttft_goal_s=goal_s)
    assert asked(router) == "a"


def test_own_clients_who_wait_go_first():
    router = region(beat("a", pending=1, **SPEED))
    router.handle(ev.RequestArrived(request(5)), 0.0)
    assert asked(router) is Refusal.OWN_WORK


def test_a_model_that_nobody_has_and_a_router_that_leaves():
    router = region(beat("a", **SPEED))
    assert asked(router, model=ModelId("other")) is Refusal.NO_REPLICA
    router.handle(ev.Drain(), 0.0)
    assert asked(router, 2) is Refusal.DRAINING


def test_a_refusal_tells_how_the_region_is_now():
    router = region(beat("a", pending=3, **SPEED))
    [told] = [
        effect
        for effect in router.handle(ev.RequestArrived(foreign(1)), 0.5)
        if isinstance(effect, fx.RefusePeer)
    ]
    assert (told.fresh.replicas_ready, told.fresh.replicas_free) == (1, 0)
    [capacity] = told.fresh.models.values()
    assert (capacity.ready, capacity.free) == (1, 0)
