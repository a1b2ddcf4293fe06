"""One model's backlog takes nothing from the requests for another."""

from mesh.core.lifecycle import timeouts
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.model_targets import ModelRule
from mesh.core.model.settings import RouterSettings
from schemas.decision import Placement
from schemas.ids import ModelId
from tests.mesh.core import build

SATURATED, QUIET = ModelId("saturated"), ModelId("quiet")


def region(**settings):
    """One full replica of each model; both report it."""
    core = build.core(policy="least-load", **settings)
    for number, model in enumerate((SATURATED, QUIET)):
        beat = build.beat(f"us-{number}", models=(model,), full=True, pending=1)
        core.handle(ev.HeartbeatSeen(beat), 0.0)
    return core


def arrive(core, key, model, now=0.1, **options):
    request = build.request(key, model=model, arrived_at=now, **options)
    return core.handle(ev.RequestArrived(request), now)


def placements(effects):
    return {
        effect.key: effect.decision.placement
        for effect in effects
        if isinstance(effect, fx.Decided)
    }


def test_a_full_queue_sheds_the_saturated_models_newest_for_another_models_request():
    core = region(hold_max=4, queue_delay_s_max=0.0)
    for key in range(1, 5):
        assert placements(arrive(core, key, SATURATED)) == {key: Placement.HOLD}
    assert placements(arrive(core, 5, SATURATED)) == {5: Placement.SHED}
    assert placements(arrive(core, 6, QUIET)) == {4: Placement.SHED, 6: Placement.HOLD}
    assert placements(arrive(core, 7, SATURATED)) == {7: Placement.SHED}
    assert core.held.waiting(QUIET) == 1 and len(core.held) == 4


def test_models_share_a_full_queue_evenly_and_then_none_displaces_another():
    core = region(hold_max=4, queue_delay_s_max=0.0)
    for key in range(1, 5):
        arrive(core, key, SATURATED)
    for key in range(11, 15):
        arrive(core, key, QUIET)
    assert (core.held.waiting(SATURATED), core.held.waiting(QUIET)) == (2, 2)
    for key, model in ((21, SATURATED), (22, QUIET)):
        assert placements(arrive(core, key, model)) == {key: Placement.SHED}


def test_a_models_own_limits_are_for_its_requests_alone():
    rule = ModelRule(name=SATURATED, hold_max=1, queue_delay_s_max=2.0)
    core = region(queue_delay_s_max=0.0, models=(rule,))
    arrive(core, 1, SATURATED)
    assert placements(arrive(core, 2, SATURATED)) == {2: Placement.SHED}
    assert placements(arrive(core, 3, QUIET)) == {3: Placement.HOLD}
    assert placements(arrive(core, 4, QUIET)) == {4: Placement.HOLD}
    asked = [build.request(9, model=name) for name in (SATURATED, QUIET)]
    assert [timeouts.queue_delay_s(core.state, one) for one in asked] == [2, 0]


def test_a_changed_rule_holds_for_what_comes_then():
    core = region(queue_delay_s_max=0.0)
    for key in (1, 2):
        arrive(core, key, SATURATED)
    rules = (ModelRule(name=SATURATED, hold_max=1, policy="least-load"),)
    core.handle(ev.SettingsChanged(RouterSettings(models=rules)), 0.2)
    assert placements(arrive(core, 3, SATURATED, 0.2)) == {3: Placement.SHED}
    assert len(core.held) == 2
    core.handle(
        ev.SettingsChanged(RouterSettings(policy="least-load", queue_delay_s_max=0.0)), 0.25
    )
    assert placements(arrive(core, 4, SATURATED, 0.25)) == {4: Placement.HOLD}


def test_a_models_policy_places_its_requests_whatever_their_class():
    rule = ModelRule(name=QUIET, policy="least-load")
    core = build.core(policy="round-robin", models=(rule,))
    for number, model in enumerate((SATURATED, QUIET)):
        beat = build.beat(f"us-{number}", models=(model,))
        core.handle(ev.HeartbeatSeen(beat), 0.0)
    for key, (model, policy) in enumerate(((SATURATED, "round-robin"), (QUIET, "least-load"))):
        [decided] = [one for one in arrive(core, key, model) if isinstance(one, fx.Decided)]
        assert decided.decision.policy == policy
