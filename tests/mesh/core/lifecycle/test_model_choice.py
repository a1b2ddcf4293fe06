"""Held requests of an alias go to another target when nothing serves theirs, and only then."""

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.model_targets import Asked, ModelRule
from mesh.core.model.served_names import served_name
from mesh.core.model.settings import RouterSettings
from mesh.core.recording import (
    RecordingHeader,
    decode_header,
    decode_line,
    encode_header,
    encode_step,
)
from schemas.http import MESSAGES, RESPONSES
from schemas.residency import ground
from schemas.state import ModelCapacity, ReplicaState
from tests.mesh.core import build

RULES = (ModelRule(name="chat", to=(("stable", 0.5), ("canary", 0.5))),)
ASKED = Asked("chat", 1)


def beat(core, replica, model, now, seq=1, **fields):
    return core.handle(ev.HeartbeatSeen(build.beat(replica, seq, models=(model,), **fields)), now)


def region(**settings):
    core = build.core(policy="least-load", models=RULES, **settings)
    beat(core, "us-0", "stable", 0.0)
    beat(core, "us-1", "canary", 0.0, full=True, pending=1)
    return core


def arrive(core, key, model="canary", now=0.1, **fields):
    request = build.request(key, model=model, arrived_at=now, asked=ASKED, **fields)
    return core.handle(ev.RequestArrived(request), now)


def kinds(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def test_a_request_waits_while_its_model_is_served_and_moves_when_it_is_not():
    core = region()
    assert not kinds(arrive(core, 1), fx.Dispatch)
    assert not kinds(core.handle(ev.Tick(), 0.2), fx.Retargeted)
    beat(core, "us-0", "stable", 0.25, seq=2)
    beat(core, "us-1", "other", 0.25, seq=2)
    effects = core.handle(ev.Tick(), 0.3)
    assert kinds(effects, fx.Retargeted) == [fx.Retargeted(1, "stable")]
    [dispatch] = kinds(effects, fx.Dispatch)
    assert (dispatch.key, dispatch.replica) == (1, "us-0")
    assert effects.index(dispatch) > effects.index(fx.Retargeted(1, "stable"))
    assert core.inflight[1].request.model == "stable" and not core.held


def test_a_draining_canary_serves_no_more():
    core = region()
    arrive(core, 1)
    beat(core, "us-1", "canary", 0.2, seq=2, state=ReplicaState.DRAINING)
    assert kinds(core.handle(ev.Tick(), 0.25), fx.Retargeted)


def test_a_failure_of_the_only_replica_moves_the_request_instead_of_failing_it():
    core = region()
    beat(core, "us-1", "canary", 0.05, seq=2)
    [dispatch] = kinds(arrive(core, 1), fx.Dispatch)
    assert dispatch.replica == "us-1"
    effects = core.handle(ev.AttemptFailed(1, 1, "gone"), 0.2)
    assert kinds(effects, fx.Retargeted) and not kinds(effects, fx.Fail)
    assert [one.replica for one in kinds(effects, fx.Dispatch)] == ["us-0"]


def test_where_each_targets_only_replica_has_failed_it_the_request_ends_at_once():
    core = region(failures_max=5)
    beat(core, "us-1", "canary", 0.05, seq=2)
    arrive(core, 1)
    assert kinds(core.handle(ev.AttemptFailed(1, 1, "gone"), 0.2), fx.Dispatch)
    effects = core.handle(ev.AttemptFailed(1, 2, "gone too"), 0.3)
    assert [one.message for one in kinds(effects, fx.Fail)] == ["gone too"]
    assert not kinds(effects, fx.Retargeted) and not core.held and not core.inflight


def test_an_engines_error_ends_a_request_whose_other_target_only_that_engine_serves():
    core = build.core(policy="least-load", models=RULES)
    both = build.beat("us-0", models=("stable", "canary"))
    core.handle(ev.HeartbeatSeen(both), 0.0)
    assert kinds(arrive(core, 1), fx.Dispatch)
    effects = core.handle(ev.AttemptFailed(1, 1, "HTTP 500", status=500), 0.2)
    assert kinds(effects, fx.PassEngineError) == [fx.PassEngineError(1)]
    assert not kinds(effects, fx.Retargeted) and not core.held and not core.inflight


def test_without_another_target_that_is_served_it_stays_what_it_is():
    core = region()
    arrive(core, 1)
    beat(core, "us-0", "else", 0.2, seq=2)
    beat(core, "us-1", "else", 0.2, seq=2)
    assert not kinds(core.handle(ev.Tick(), 0.25), fx.Retargeted)
    assert core.held.waiting("canary") == 1


def test_a_path_stays_and_what_one_replica_keeps_moves_nowhere():
    core = build.core(policy="least-load", models=RULES)
    paths = (*build.beat("us-0").paths, MESSAGES, RESPONSES)
    beat(core, "us-0", "stable", 0.0, paths=paths)
    beat(core, "us-1", "canary", 0.0, full=True, pending=1, paths=paths)
    kept = f"{served_name('canary', RESPONSES)} at us/us-1"
    for key, name in ((1, served_name("canary", MESSAGES)), (2, kept)):
        assert not kinds(arrive(core, key, name), fx.Dispatch)
    beat(core, "us-1", "other", 0.2, seq=2, paths=paths)
    moved = kinds(core.handle(ev.Tick(), 0.25), fx.Retargeted)
    assert moved == [fx.Retargeted(1, served_name("stable", MESSAGES))]


def test_what_a_region_keeps_stays_with_the_model_that_made_it():
    core = build.core(policy="least-load", models=RULES, peers=(build.EU,))
    beat(core, "us-0", "else", 0.0)
    has = ModelCapacity(ready=1, free=1)
    paths = {RESPONSES: {"stable": has}}
    far = build.digest("eu", models={"stable": has}, models_by_path=paths)
    core.handle(ev.DigestSeen(far), 0.0)
    core.handle(ev.RttMeasured(build.EU, 0.01), 0.0)
    for key, place in ((1, ""), (2, " at eu/")):
        arrive(core, key, f"{served_name('canary', RESPONSES)}{place}")
    moved = kinds(core.handle(ev.Tick(), 0.2), fx.Retargeted)
    assert moved == [fx.Retargeted(1, served_name("stable", RESPONSES))]


def test_what_is_chosen_is_served_or_may_come_back():
    core = region()
    path = "/v1/chat/completions"
    by_number = {core.model_for("chat", one, path, (), 0.1) for one in range(40)}
    assert by_number == {"stable", "canary"}  # a full one serves
    beat(core, "us-1", "other", 0.2, seq=2)
    assert {core.model_for("chat", one, path, (), 0.2) for one in range(40)} == {"stable"}
    empty = build.core(models=RULES)
    assert {empty.model_for("chat", one, path, (), 0.1) for one in range(40)} == by_number


def test_where_no_target_answers_the_path_one_is_chosen_so_that_its_client_is_told_of_the_path():
    core = region()
    assert core.model_for("chat", 1, RESPONSES, (), 0.1) in {"stable", "canary"}


def test_only_a_target_on_a_replica_with_the_label_is_chosen_for_a_labelled_request():
    core = build.core(policy="least-load", models=RULES, ground=ground({build.US: ("us",)}))
    beat(core, "us-0", "stable", 0.0, residency=())
    beat(core, "us-1", "canary", 0.0, residency=("us",))
    path = "/v1/chat/completions"
    for labels, targets in (((), {"stable", "canary"}), (("us",), {"canary"})):
        found = {core.model_for("chat", one, path, labels, 0.1) for one in range(40)}
        assert found == targets


def test_a_copy_begins_at_once_or_ends():
    core = region()
    for key, model in ((1, "stable"), (2, "canary")):
        request = build.request(key, model=model, arrived_at=0.1, shadow=True)
        effects = core.handle(ev.RequestArrived(request), 0.1)
        assert len(kinds(effects, fx.Dispatch)) == (key == 1)
        assert len(kinds(effects, fx.Fail)) == (key == 2)
    refused = ev.AttemptRefused(1, 1, "full", build.US, "us-0", -1, -1)
    assert kinds(core.handle(refused, 0.2), fx.Fail) and not core.inflight and not core.held


def test_a_copy_is_not_forwarded():
    core = build.core(peers=(build.EU,))
    core.handle(ev.DigestSeen(build.digest("eu")), 0.0)
    core.handle(ev.RttMeasured(build.EU, 0.01), 0.0)
    for key, is_copy in ((1, True), (2, False)):
        request = build.request(key, arrived_at=0.1, shadow=is_copy)
        effects = core.handle(ev.RequestArrived(request), 0.1)
        assert bool(kinds(effects, fx.Forward)) is not is_copy


def test_rules_and_mapped_requests_are_recorded_as_they_are():
    whole = RecordingHeader(
        version="x",
        region=build.US,
        router=build.ROUTER,
        epoch=1,
        seed=1,
        settings=RouterSettings(models=RULES),
    )
    assert decode_header(encode_header(whole)) == whole
    event = ev.RequestArrived(build.request(1, asked=Asked("chat", 2**64 - 1), shadow=True))
    assert decode_line(encode_step(1.0, event, [])).event == event
