"""A router whose replicas, or peers, fail what they are sent: who gets the requests."""

from collections.abc import Callable
from random import Random

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Served
from mesh.core.requests.retry_budget import PER_S_MIN, SAVED_S, SHARE
from mesh.core.view.outliers import OUT_S
from schemas.ids import ModelId
from schemas.state import EngineResults, ReplicaState
from tests.mesh.core.build import EU, beat, core, digest, request

NAMES = ("a", "b", "c", "d")
POLICIES = ["mesh", "least-load", "round-robin", "skywalker", "cache-aware", "power-of-two"]


class World:
    """Four idle replicas; those of `bad` fail each request at once, and their agents tell it.

    `poison`: requests with these keys fail everywhere.
    """

    def __init__(
        self, bad: set[str], policy: str = "mesh", status: int | None = 500, **settings
    ) -> None:
        self.router, self.bad, self.status = core(policy=policy, **settings), bad, status
        self.poison: Callable[[int], bool] = lambda key: False
        self.in_a_row = dict.fromkeys(NAMES, 0)
        self.now, self.seq, self.key = 10.0, 0, 0
        self.names = NAMES
        self.tries: list[str] = []
        self.served = Served(100, 0, 16)
        self.beats()

    def beats(self, **fields) -> None:
        self.seq += 1
        self.fields = fields
        for name in self.names:
            told = None
            if (count := self.in_a_row[name]) and self.status not in (400, 404, 429, 501):
                told = EngineResults(failed=count, of=count, in_a_row=count, what="HTTP 500")
            now = beat(name, self.seq, results=told, **fields)
            self.router.handle(ev.HeartbeatSeen(now), self.now)

    def ask(self) -> str:
        """One request, to its end: "ok", "error" or "held"."""
        self.key += 1
        key, self.now = self.key, self.now + 0.1
        effects = self.router.handle(ev.RequestArrived(request(key, arrived_at=self.now)), self.now)
        effects += self.router.finish()
        waited = 0
        while True:
            went = [one for one in effects if isinstance(one, fx.Dispatch | fx.Forward)]
            if any(isinstance(one, fx.Fail | fx.PassEngineError) for one in effects):
                return "error"
            if not went:
                waited += 1
                if waited > 10:
                    return "held"
                self.now += 0.05
                self.beats(**self.fields)
                effects = self.router.handle(ev.Tick(), self.now)
                continue
            place = went[0].replica if isinstance(went[0], fx.Dispatch) else went[0].peer
            self.tries.append(place)
            attempt = went[0].attempt
            if place in self.bad or self.poison(key):
                if place in self.in_a_row:
                    self.in_a_row[place] = min(64, self.in_a_row[place] + 1)
                    self.beats()
                event = ev.AttemptFailed(key, attempt, "no answer: b'Dear Ms'", self.status)
                effects = self.router.handle(event, self.now)
                continue
            if isinstance(went[0], fx.Forward):
                self.router.handle(ev.PlacedByPeer(key, attempt, "x"), self.now)
            self.router.handle(ev.AnswerStarted(key, attempt), self.now)
            self.router.handle(ev.AnswerEnded(key, attempt, self.served), self.now)
            if place in self.in_a_row:
                self.in_a_row[place] = 0
            self.beats()
            return "ok"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("status", [500, 503, None])
@pytest.mark.parametrize("bad", [{"a"}, {"b", "c"}, {"a", "b", "c"}])
def test_the_healthy_ones_get_the_work(bad, status, policy):
    world = World(bad, policy, status)
    said = [world.ask() for _ in range(180)]
    errors = said.count("error")
    assert said.count("held") == 0
    assert errors <= 6, "before they are known; 180 of 180 were seen with three of four failing"
    assert errors == said[:40].count("error"), "later none"
    wasted = sum(place in bad for place in world.tries)
    assert wasted <= 12 * len(bad)


def test_the_receipt_says_that_it_fails_and_not_that_it_is_full():
    world = World({"a"}, "least-load", status=None)
    for _ in range(50):
        world.ask()
    world.router.replicas.refused("a", world.now)
    effects = world.router.handle(ev.RequestArrived(request(1000)), world.now)
    [decided] = [one for one in effects if isinstance(one, fx.Decided)]
    whys = {one.name: one.why for one in decided.decision.candidates}
    assert whys["a"].startswith("failing: ")


def test_where_all_fail_all_are_tried():
    world = World(set(NAMES))
    assert [world.ask() for _ in range(60)] == ["error"] * 60
    assert set(world.tries[-60:]) == set(NAMES)
    world.bad = set()
    world.beats()
    assert [world.ask() for _ in range(10)] == ["ok"] * 10


def test_one_that_is_mended_is_used_again_and_one_that_is_not_gets_few():
    world = World({"a"}, "least-load")
    for _ in range(50):
        world.ask()
    world.tries.clear()
    world.now += OUT_S
    assert [world.ask() for _ in range(40)] == ["ok"] * 40
    assert world.tries.count("a") <= 2
    world.bad, world.now = set(), world.now + 100.0
    world.beats()
    world.tries.clear()
    for _ in range(80):
        world.ask()
    assert world.tries.count("a") >= 10


def test_a_failing_replica_that_is_alone_is_left_out_for_a_peer():
    world = World({"a"})
    world.names = ("a",)
    for name in NAMES[1:]:
        world.router.replicas.remove(name)
    world.router.handle(ev.RttMeasured(EU, 0.08), world.now)
    for seq in range(1, 60):
        world.router.handle(ev.DigestSeen(digest("eu", seq)), world.now)
        assert world.ask() == "ok"
    assert world.tries.count("a") <= 5
    receipt_of_last = world.tries[-1]
    assert receipt_of_last == EU


@pytest.mark.parametrize("status", [500, None])
def test_a_peer_whose_answers_fail_is_left_out(status):
    world = World({EU}, status=status)
    world.names = ("a",)
    for name in NAMES[1:]:
        world.router.replicas.remove(name)
    world.router.handle(ev.RttMeasured(EU, 0.001), world.now)
    said = []
    for seq in range(1, 80):
        world.router.handle(ev.DigestSeen(digest("eu", seq)), world.now)
        world.beats(prefill_s_per_token=1e-4, prefill_base_s=0.01, prefill_queued_tokens=4000)
        said.append(world.ask())
    assert "error" not in said
    assert world.tries.count(EU) <= 8
    effects = world.router.handle(ev.Tick(), world.now + 0.5)
    [told] = [one.digest for one in effects if isinstance(one, fx.PublishDigest)]
    assert told.avoided_peers[EU].startswith("failing: ")
    assert "Dear" not in told.avoided_peers[EU], "an answer's text is no other region's business"


def test_the_receipt_says_why():
    world = World({"a"}, "least-load")
    while "a" in world.tries[-1:] or world.tries.count("a") < 3:
        world.ask()
    world.key += 1
    effects = world.router.handle(ev.RequestArrived(request(world.key)), world.now)
    [decided] = [one for one in effects if isinstance(one, fx.Decided)]
    whys = {one.name: one.why for one in decided.decision.candidates}
    assert whys["a"] == "failing: 3 of its last 3, HTTP 500"


def test_what_an_agent_tells_counts_before_this_router_has_tried_it():
    world = World(set(), "least-load")
    told = EngineResults(failed=5, of=5, in_a_row=5, what="HTTP 500")
    world.router.handle(ev.HeartbeatSeen(beat("a", 100, results=told)), world.now)
    world.names = NAMES[1:]
    for _ in range(20):
        assert world.ask() == "ok"
    assert "a" not in world.tries


def test_too_many_requests_and_what_it_never_does_are_no_failure():
    for status in (429, 501):
        world = World({"a"}, "round-robin", status)
        for _ in range(40):
            world.ask()
        assert not world.router.replicas.failing.places


@pytest.mark.parametrize("status", [400, 404])
def test_a_client_error_that_one_replica_gives_to_everybody_is_not_the_clients(status):
    world = World({"a", "b"}, "round-robin", status)
    said = [world.ask() for _ in range(60)]
    assert said.count("error") <= 4 and "error" not in said[30:]
    assert world.tries.count("a") <= 8 and world.tries.count("b") <= 8


def test_a_client_error_that_all_give_is_the_clients():
    world = World(set(NAMES), "round-robin", 400)
    assert [world.ask() for _ in range(60)] == ["error"] * 60
    assert len(world.tries) == 180, "two more each"
    assert not world.router.replicas.failing.places, "nobody is blamed"


def test_what_the_bus_or_a_link_lost_is_no_failure_of_the_place():
    world = World({"a"}, "round-robin", None)
    for key in range(1, 40):
        world.now += 0.1
        world.beats()
        effects = world.router.handle(ev.RequestArrived(request(key)), world.now)
        [went] = [one for one in effects if isinstance(one, fx.Dispatch)]
        failed = ev.AttemptFailed(key, went.attempt, "cancelled", blameless=True)
        world.router.handle(failed, world.now)
        world.router.handle(ev.ClientGone(key), world.now)
    assert not world.router.replicas.failing.places


def test_a_peer_behind_a_cut_link_is_judged_by_its_silence_alone():
    world = World(set())
    world.names = ()
    for name in NAMES:
        world.router.replicas.remove(name)
    world.router.handle(ev.RttMeasured(EU, 0.08), world.now)
    world.router.handle(ev.DigestSeen(digest("eu", 1)), world.now)
    for key in range(1, 7):
        effects = world.router.handle(ev.RequestArrived(request(key)), world.now)
        assert any(isinstance(one, fx.Forward) for one in effects)
    world.now += 30.0
    world.router.handle(ev.Tick(), world.now)
    assert not world.router.peers.failing.places


def test_one_clients_bad_requests_leave_most_places_in():
    world, dice = World(set(), "round-robin"), Random(1)
    bad = {key for key in range(400) if dice.random() < 0.2}
    world.poison = bad.__contains__
    said, out = [], []
    for _ in range(300):
        said.append(world.ask())
        out.append(len(world.router.replicas.failing.out()))
    assert said == ["error" if key in bad else "ok" for key in range(1, 301)]
    assert sum(out) / len(out) <= 1.5


def test_a_model_that_fails_everywhere_takes_no_place_from_another():
    world = World(set(), "least-load")
    both = ("m", "bad")
    for name in NAMES:
        world.router.handle(ev.HeartbeatSeen(beat(name, 100, models=both)), 10.0)
    failing = world.router.replicas.failing
    for name in NAMES:
        for _ in range(9):
            failing.failed(name, ModelId("bad"), "HTTP 500", 10.0)
    world.names = ()
    assert [world.ask() for _ in range(8)] == ["ok"] * 8
    assert set(world.tries) <= set(NAMES)


@pytest.mark.parametrize("hops_max", [0, 1])
def test_a_region_that_forwards_nothing_uses_its_last_places(hops_max):
    world = World({"a", "b"}, "mesh", None, hops_max=hops_max)
    world.names = ("a", "b")
    for name in NAMES[2:]:
        world.router.replicas.remove(name)
    world.router.handle(ev.RttMeasured(EU, 0.08), world.now)
    said = []
    for seq in range(1, 30):
        world.router.handle(ev.DigestSeen(digest("eu", seq)), world.now)
        said.append(world.ask())
    assert "held" not in said
    assert said[-1] == ("ok" if hops_max else "error")


def test_a_request_that_failed_is_not_held_beside_the_last_idle_replica():
    world = World({"a", "b"}, "least-load", None)
    world.names = ("a", "b")
    for name in NAMES[2:]:
        world.router.replicas.remove(name)
    for _ in range(10):
        assert world.ask() == "error"
    world.now += OUT_S
    world.bad = {"a"}
    world.in_a_row = dict.fromkeys(NAMES, 0)
    world.beats()
    assert [world.ask() for _ in range(10)] == ["ok"] * 10


def test_a_replica_that_left_leaves_nothing_behind():
    world = World({"a"}, "least-load")
    for _ in range(30):
        world.ask()
    assert world.router.replicas.failing.places
    told = EngineResults(failed=5, of=5, in_a_row=5, what="HTTP 500")
    gone = beat("a", 1000, state=ReplicaState.GONE, results=told)
    world.router.handle(ev.HeartbeatSeen(gone), world.now)
    assert not world.router.replicas.failing.places
    world.router.handle(ev.HeartbeatSeen(beat("a", 1, epoch=2)), world.now)
    assert not world.router.replicas.failing.places


def test_peers_are_not_told_of_idle_replicas_that_fail():
    world = World({"a"}, "least-load")
    for _ in range(30):
        world.ask()
    world.beats(prefill_s_per_token=1e-4, prefill_base_s=0.01, prefill_queued_tokens=0)
    effects = world.router.handle(ev.Tick(), world.now + 0.5)
    [told] = [one.digest for one in effects if isinstance(one, fx.PublishDigest)]
    assert "a" not in told.replicas.names and told.replicas_free == 3


def test_a_bad_hour_is_not_doubled_by_second_attempts():
    world = World(set(NAMES))
    outcomes = [world.ask() for _ in range(2000)]  # ten a second
    assert set(outcomes) == {"error"}
    seconds = len(outcomes) * 0.1
    again = len(world.tries) - len(outcomes)
    attempts_per_s = len(world.tries) / seconds
    assert 0 < again < (SAVED_S + seconds) * (PER_S_MIN + SHARE * attempts_per_s)
    assert again < 0.4 * len(outcomes)  # each was tried twice before
    world.bad = set()
    world.beats()
    assert world.ask() == "ok"


def test_lost_attempts_are_tried_again_whatever_was_spent():
    world = World({"a", "b", "c"}, status=None)
    assert {world.ask() for _ in range(300)} == {"ok"}
