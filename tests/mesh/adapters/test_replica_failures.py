"""Which failures of attempts are counted as an engine's, and of which replicas."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.replica_failures import KINDS, kind_of
from mesh.core.model import events as ev
from mesh.core.model.prompt import PromptReader
from mesh.runtime.request_observer import RequestObserver
from mesh.session.usage_book import UsageBook
from schemas.exchange import Outcome
from schemas.state import EngineResults, ReplicaState
from tests.mesh.core.build import EU, beat, core


@pytest.mark.parametrize(
    ("status", "outcome", "kind"),
    [
        (500, "", "server_error"),
        (503, "", "server_error"),
        (501, "", None),
        (400, "", None),
        (429, "", None),
        (None, Outcome.ENGINE_LOST, "connection"),
        (None, Outcome.ENGINE_BROKEN, "broken"),
        (None, Outcome.ENGINE_FAILED, "broken"),
        (None, Outcome.CANCELLED, None),
        (None, Outcome.PREEMPTED, None),
        (None, "", None),
        (None, "an agent's own word", None),
    ],
)
def test_kinds_of_failures(status, outcome, kind):
    assert kind_of(status, outcome) == kind
    assert kind is None or kind in KINDS


def test_failures_are_counted_of_known_replicas_from_zero_on():
    router = core()
    metrics = RouterMetrics(router, CollectorRegistry(), lambda: 0.5)
    router.handle(ev.HeartbeatSeen(beat("a")), 0.0)
    router.handle(ev.HeartbeatSeen(beat("b")), 0.0)

    def count(replica: str, kind: str) -> float | None:
        labels = {"replica": replica, "kind": kind}
        return metrics.registry.get_sample_value("mesh_replica_failures_total", labels)

    assert {count(replica, kind) for replica in "ab" for kind in KINDS} == {0.0}
    failed = metrics.replica_failures.failed
    failed("a", 500, "")
    failed("a", 502, "")
    failed("a", 400, "")
    failed("stranger", 500, "")
    failed(None, 500, "")
    assert count("a", "server_error") == 2.0
    assert count("b", "server_error") == count("a", "broken") == 0.0
    assert count("stranger", "server_error") is None
    router.handle(ev.HeartbeatSeen(beat("a", seq=2, state=ReplicaState.GONE)), 0.1)
    assert count("a", "server_error") is None
    failed("b", 500, "")  # a new one: those that are gone are forgotten
    router.handle(ev.HeartbeatSeen(beat("a", epoch=2)), 0.2)
    assert (count("a", "server_error"), count("b", "server_error")) == (0.0, 1.0)


def test_replicas_that_fail_are_counted():
    router = core()
    page = RouterMetrics(router, CollectorRegistry(), lambda: 0.5).registry.get_sample_value
    assert page("mesh_replicas_failing") == 0.0
    fails = EngineResults(failed=9, of=10, in_a_row=2, what="HTTP 500")
    some = EngineResults(failed=1, of=10, in_a_row=1, what="HTTP 500")
    for name, results in (("a", fails), ("b", some), ("c", None)):
        router.handle(ev.HeartbeatSeen(beat(name, results=results)), 0.0)
    assert page("mesh_replicas_failing") == 1.0


def test_an_attempt_counts_for_the_replica_that_had_it():
    router = core()
    metrics = RouterMetrics(router, CollectorRegistry(), lambda: 0.5)
    router.handle(ev.HeartbeatSeen(beat("a")), 0.0)
    router.replicas.see(beat("eu/b", region=EU), 0.0)  # adopted
    observer = RequestObserver(
        SimpleNamespace(region="us", peers=()),
        metrics,
        PromptReader("key"),
        lambda: 0.5,
        None,
        None,
        UsageBook("us", "r1", 1, ("us",)),
    )

    def count(replica: str = "a") -> dict[str, float]:
        page = metrics.registry.get_sample_value
        return {
            kind: value
            for kind in KINDS
            if (value := page("mesh_replica_failures_total", {"replica": replica, "kind": kind}))
        }

    def fail(failed_as: str = "", place=("us", "a"), **event) -> dict[str, float]:
        region, replica = place
        answer = SimpleNamespace(region=region, replica=replica, failed_as=failed_as)
        request = SimpleNamespace(shadow=False, request_id="q")
        record = SimpleNamespace(answer=answer, request=request, steps=())
        observer.attempt_failed(record, ev.AttemptFailed(1, 1, "why", **event))
        return count()

    assert fail(status=500) == {"server_error": 1.0}
    assert fail(Outcome.ENGINE_LOST) == {"server_error": 1.0, "connection": 1.0}
    before = count()
    assert fail(status=500, prefill=True) == before  # another replica's
    assert fail(Outcome.PREEMPTED, preempted=True) == before
    assert fail(status=500, place=("eu", "a")) == before, "a peer's, which has that name too"
    assert fail(status=500, place=(None, None)) == before
    assert count("eu/b") == count("eu/a") == {}
    fail(status=500, place=("eu", "b"))
    assert count("eu/b") == {"server_error": 1.0}, "of an adopted region"
