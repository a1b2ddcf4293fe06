"""Gauges read from the core when somebody scrapes: what is unknown or gone has no sample."""

import pytest
from prometheus_client import CollectorRegistry

from mesh.adapters.metrics import (
    MODELS_MAX,
    OTHER,
    SETS_MAX,
    TENANTS_MAX,
    RequestLabels,
    RouterMetrics,
)
from mesh.core.model import events as ev
from mesh.core.view.outliers import IN_A_ROW
from mesh.session.cost import Cost
from schemas.state import ReplicaState
from tests.mesh.core.build import EU, MODEL, beat, core, digest, request


@pytest.fixture
def router():
    return core()


@pytest.fixture
def page(router):
    metrics = RouterMetrics(router, CollectorRegistry(), lambda: 0.5)
    return metrics.registry.get_sample_value


def test_what_an_engine_does_not_tell_has_no_sample(router, page):
    router.handle(ev.HeartbeatSeen(beat("a", pending=0, running=3, kv_used_ratio=None)), 0.0)
    router.handle(ev.HeartbeatSeen(beat("b", pending=2, running=None, kv_used_ratio=0.5)), 0.0)
    told = {
        (name, replica): page(f"mesh_replica_{name}", {"replica": replica})
        for name in ("pending", "running", "kv_used_ratio")
        for replica in "ab"
    }
    assert told == {
        ("pending", "a"): 0.0,
        ("pending", "b"): 2.0,
        ("running", "a"): 3.0,
        ("running", "b"): None,
        ("kv_used_ratio", "a"): None,
        ("kv_used_ratio", "b"): 0.5,
    }


def test_full_replicas_are_counted_apart_from_ready_ones(router, page):
    states = [ReplicaState.READY, ReplicaState.READY, ReplicaState.READY, ReplicaState.DRAINING]
    for number, state in enumerate(states):
        seen = beat(f"g{number}", state=state, full=number in (2, 3))
        router.handle(ev.HeartbeatSeen(seen), 0.0)
    counts = {s: page("mesh_replicas", {"state": s}) for s in ("ready", "full", "draining", "down")}
    assert counts == {"ready": 2.0, "full": 1.0, "draining": 1.0, "down": None}


def test_a_peer_is_shown_while_it_is_heard(router, page):
    router.handle(ev.DigestSeen(digest("eu", free=3, queue=2)), 0.0)
    labels = {"peer": "eu"}
    assert page("mesh_peer_replicas_free", labels) == 3.0
    assert page("mesh_peer_queue", labels) == 2.0
    assert page("mesh_peer_rtt_seconds", labels) is None  # not measured yet
    router.handle(ev.RttMeasured(EU, 0.08), 0.1)
    assert page("mesh_peer_rtt_seconds", labels) == 0.08
    router.handle(ev.Tick(), 60.0)
    assert page("mesh_peer_replicas_free", labels) is None


def test_a_peers_health_and_way_are_shown_even_when_it_is_silent(router, page):
    labels = {"peer": "eu"}
    router.handle(ev.RttMeasured(EU, None), 0.0)
    assert page("mesh_peer_health", labels) == 0.0
    assert page("mesh_peer_ping_loss_ratio", labels) == 1.0
    router.handle(ev.DigestSeen(digest("eu")), 0.0)
    assert page("mesh_peer_health", labels) == 1.0  # half a second ago
    router.handle(ev.DigestSeen(digest("eu", 2)), 0.4)
    assert page("mesh_peer_health", labels) == 2.0
    for rtt_s in (0.08, 0.096, 0.08):
        router.handle(ev.RttMeasured(EU, rtt_s), 0.5)
    assert page("mesh_peer_jitter_seconds", labels) == pytest.approx(0.0019375)
    assert page("mesh_peer_ping_loss_ratio", labels) == 0.25


def test_a_peer_whose_answers_fail_is_shown_as_left_out(router, page):
    for region in ("eu", "ap"):
        router.handle(ev.DigestSeen(digest(region)), 0.0)
    assert page("mesh_peer_left_out", {"peer": "eu"}) == 0.0
    for _ in range(IN_A_ROW):
        router.peers.failing.failed("eu", MODEL, "HTTP 500", 0.0)
    assert page("mesh_peer_left_out", {"peer": "eu"}) == 1.0
    assert page("mesh_peer_left_out", {"peer": "ap"}) == 0.0


def test_requests_are_shown_while_they_wait(router, page):
    labels = {"model": MODEL}
    router.handle(ev.HeartbeatSeen(beat("a", models=(MODEL,), full=True, pending=9)), 0.0)
    assert (page("mesh_hold_queue_length"), page("mesh_inflight", labels)) == (0.0, 0.0)
    router.handle(ev.RequestArrived(request(1)), 0.0)
    assert (page("mesh_hold_queue_length"), page("mesh_inflight", labels)) == (1.0, 1.0)
    router.handle(ev.ClientGone(1), 1.0)
    assert (page("mesh_hold_queue_length"), page("mesh_inflight", labels)) == (0.0, 0.0)


def labels_of(metrics, model=MODEL, tenant="", region="us"):
    names = ("model", "tenant", "served_region")
    return dict(zip(names, metrics.labels_of(model, tenant, region), strict=True))


def test_only_good_answers_have_a_duration(router):
    router.handle(ev.HeartbeatSeen(beat("a", models=(MODEL,))), 0.0)
    metrics = RouterMetrics(router, CollectorRegistry())
    labels, value = labels_of(metrics), metrics.registry.get_sample_value
    assert labels == {"model": MODEL, "tenant": "", "served_region": "us"}
    for outcome in ("ok", "shed", "failed", "client_gone"):
        metrics.ended(outcome, metrics.labels_of(MODEL, "", "us"), 2.5, streamed=False)
        assert value("mesh_requests_total", labels | {"outcome": outcome}) == 1.0
    labels["streamed"] = "false"
    assert value("mesh_request_duration_seconds_count", labels) == 1.0
    assert value("mesh_request_duration_seconds_sum", labels) == 2.5


def test_tokens_are_counted_and_of_them_the_estimates(router):
    metrics = RouterMetrics(router, CollectorRegistry())
    labels = metrics.labels_of(MODEL, "", "us")
    metrics.tokens_seen(labels, Cost(62, 8, 5))
    metrics.tokens_seen(labels, Cost(20, 10, 7, is_prompt_estimated=True))
    metrics.tokens_seen(labels, Cost(100, 0, 3, is_output_estimated=True))
    counted = [
        metrics.registry.get_sample_value(f"mesh_{kind}_tokens_total", labels_of(metrics))
        for kind in ("prompt", "cached", "output", "estimated")
    ]
    assert counted == [200.0, 18.0, 15.0, 33.0]


def test_whatever_clients_and_peers_name_the_label_sets_are_bounded():
    models = [f"model-{number}" for number in range(40)]
    labels = RequestLabels(lambda: models, ["us", "eu"])
    assert labels.of("a-client's", "", "us") == (OTHER, "", "us")
    assert labels.of("model-3", "acme", "mars") == ("model-3", "acme", OTHER)
    assert labels.of("model-3", "acme", "") == ("model-3", "acme", "")
    seen = {
        labels.of(model, f"tenant-{tenant}", region)
        for tenant in range(50)
        for model in models
        for region in ("us", "eu", "elsewhere", "")
    }
    assert len({one[0] for one in seen}) <= MODELS_MAX + 1
    assert len({one[1] for one in seen}) <= TENANTS_MAX + 1
    assert len(seen) <= SETS_MAX + 4  # and the four of what has no set of its own
    assert labels.of("model-3", "acme", "") == ("model-3", "acme", "")  # is kept
    assert labels.of("model-39", "tenant-49", "eu") == (OTHER, OTHER, "eu")
