"""One message of a peer or an engine does not spoil what `mesh` knows of all others."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Served
from mesh.core.policies.base import Destination
from mesh.core.policies.mesh import _starves
from mesh.core.policies.mesh_peers import FORWARDS_MAX, OpenForwards, PeerDelays, SentForward
from mesh.core.policies.mesh_price import HELD_NOTHING, Price
from mesh.core.policies.mesh_speeds import SpeedModel
from schemas.decision import CandidateKind
from schemas.listed_replicas import ListedReplicas
from schemas.state import SLOPE_MIN, ModelCapacity
from tests.mesh.core.build import EU, MODEL, beat, core, digest, request
from tests.mesh.core.policies.test_mesh import EU as EU_SPOT
from tests.mesh.core.policies.test_mesh import asked, mesh, peer, place, replica

REPLICA = Destination(CandidateKind.REPLICA, "us-1")
SLOPE, BASE_S = 5e-4, 0.05


def honest(speeds, since, number):
    for each in range(number):
        tokens = 500.0 + each % 50 * 10
        speeds.began(REPLICA, tokens, 8, BASE_S + SLOPE * tokens, now=since + each)


@pytest.mark.parametrize("slope", [5e-324, 1e-9, 1e-7, 1e-6])
@pytest.mark.parametrize("wait_s", [0.001, 0.4, 60.0])
@pytest.mark.parametrize("spot", [EU_SPOT, REPLICA])
def test_a_hundred_honest_answers_restore_the_fleets_speed(slope, wait_s, spot):
    speeds = SpeedModel()
    honest(speeds, 0.0, 200)
    before = speeds.fleet_speed
    speeds.began(spot, wait_s / slope, 8, 0.1, now=60.0)
    honest(speeds, 61.0, 100)
    after = speeds.fleet_speed
    assert after.s_per_token == pytest.approx(before.s_per_token, rel=0.2)
    assert after.base_s == pytest.approx(before.base_s, rel=0.2)


@pytest.mark.parametrize("spot", [EU_SPOT, REPLICA])
def test_one_endless_answer_hardly_changes_the_usual_length(spot):
    speeds = SpeedModel()
    honest(speeds, 0.0, 1)
    for _ in range(200):
        speeds.answer(REPLICA, 800, 200)
    speeds.answer(spot, 800, 2**31)
    assert speeds.output_tokens == pytest.approx(200, rel=0.25)


def test_one_endless_prompt_hardly_changes_the_usual_lengths():
    speeds = SpeedModel()
    for _ in range(200):
        speeds.prompt(500, goes_on=False)
        speeds.answer(REPLICA, 600, 100)
    speeds.prompt(1_000_000, goes_on=False)
    speeds.answer(REPLICA, 1_000_000, 100)
    assert speeds.prefill_tokens == pytest.approx(500, rel=0.25)
    assert speeds.kv_tokens == pytest.approx(700, rel=0.25)
    for _ in range(300):  # where all are long, they are soon the usual ones
        speeds.prompt(100_000, goes_on=False)
        speeds.answer(REPLICA, 100_000, 100)
    assert speeds.prefill_tokens == pytest.approx(100_000, rel=0.05)
    assert speeds.kv_tokens == pytest.approx(100_100, rel=0.05)


def test_lengths_of_peers_answers_count_where_no_replica_answers():
    speeds = SpeedModel()
    for _ in range(200):
        speeds.answer(EU_SPOT, 800, 700)
    assert speeds.output_tokens == pytest.approx(700, rel=0.05)


def test_a_reported_speed_is_believed_within_what_engines_have():
    policy = mesh()
    quick = replica("us-1", prefill_s_per_token=5e-324, prefill_queued_tokens=2**62)
    for target in (quick, peer(prefill_s_per_token=5e-324), peer(prefill_s_per_token=1e9)):
        chosen = policy.choose(asked(1, "Z" * 10), [target], 1.0)
        assert all(math.isfinite(one.seconds) for one in chosen.scores)
    speed = policy._speeds(asked(1, "Z")).reported(quick)
    assert speed is not None
    assert speed.s_per_token == SLOPE_MIN


class Region:
    """One idle replica, and a peer that reports that it is idle and very quick."""

    def __init__(self):
        self.core, self.now, self.seq, self.key = core(peers=(EU,)), 0.0, 1, 0
        self.queued = 0
        self.sent = {}  # key: forwarded at

    def feed(self, event):
        return self.core.handle(event, self.now)

    def step(self):
        self.now += 0.1
        self.seq += 1
        own = {"prefill_s_per_token": 1e-4, "prefill_base_s": BASE_S}
        own["prefill_queued_tokens"] = self.queued
        self.feed(ev.HeartbeatSeen(beat("us-1", seq=self.seq, running=2, outstanding=2, **own)))
        idle = {MODEL: ModelCapacity(ready=4, free=4, wait_s=0.0, running=0.0)}
        line = {"prefill_s_per_token": 1e-6, "prefill_base_s": 0.001}
        self.feed(ev.DigestSeen(digest("eu", seq=self.seq, models=idle, **line)))
        if self.seq % 10 == 0:
            self.feed(ev.RttMeasured(EU, 0.08))
        self.feed(ev.Tick())

    def ask(self):
        """Whether a new request is forwarded."""
        self.key += 1
        prompt = Prompt(1000, tuple(hash((self.key, block)) for block in range(10)), 100.0)
        asked_now = replace(request(self.key, arrived_at=self.now), prompt=prompt)
        effects = self.feed(ev.RequestArrived(asked_now))
        is_forwarded = any(isinstance(effect, fx.Forward) for effect in effects)
        if is_forwarded:
            self.sent[self.key] = self.now
        elif any(isinstance(effect, fx.Dispatch) for effect in effects):
            self.now += 0.15
            self.feed(ev.AnswerStarted(self.key, 1))
            self.feed(ev.AnswerEnded(self.key, 1, Served(1000, 0, 100)))
        return is_forwarded


def test_a_peer_that_answers_nobody_gets_little_work_and_is_tried_again():
    region = Region()
    forwarded = []
    for number in range(600):
        region.step()
        for key in region.sent:  # it is alive, and says so
            region.feed(ev.AttemptProgressed(key, 1))
        if number > 20 and number % 2:
            forwarded.append(region.ask())
    assert 0 < sum(forwarded) < 20, "289 of 289 without"
    for key in list(region.core.inflight):  # all clients leave; the peer is mended
        region.feed(ev.ClientGone(key))
    region.sent.clear()
    region.queued = 4000  # 0.4 s
    again = 0
    for number in range(4000):
        region.step()
        if number % 20 == 0 and region.ask():
            again += 1
            region.feed(ev.AnswerStarted(region.key, 1))
            region.feed(ev.AnswerEnded(region.key, 1, Served(1000, 0, 100)))
    assert again > 20


def test_a_peer_is_tried_again_a_while_after_slow_answers():
    def cheapest(policy, now):
        load = {"running": 4, "outstanding": 4, "pending": 4, "prefill_s_per_token": 1e-4}
        busy, abroad = replica("us-1", prefill_queued_tokens=20_000, **load), peer()
        busy.replica.seen_at = abroad.peer.seen_at = now
        choice = policy.choose(asked(1, "Z" * 10, arrived_at=now), [busy, abroad], now)
        return choice.scores[0].target.name

    policy = mesh()
    assert cheapest(policy, 0.0) == "eu"
    for number in range(6):
        one = asked(100 + number, "ABCDEF"[number] * 10)
        place(policy, one, peer(), now=float(number))
        policy.began(one, EU_SPOT, float(number) + 20)
        policy.left(one, EU_SPOT, float(number) + 21)
    assert cheapest(policy, 30.0) == "us-1"
    assert cheapest(policy, 7200.0) == "eu"


def test_many_first_tokens_under_way_show_one_delay():
    delays = PeerDelays()
    for key in range(100):
        delays.forwarded("eu", key, 0.2, key / 1000)
    for key in range(100):
        delays.began("eu", key, key / 1000 + 0.7)
    assert delays.of("eu", 0.8) == pytest.approx(0.5, rel=0.05)
    for key in range(100, 200):  # expected with the delay, and as late as before: it stays
        delays.forwarded("eu", key, 0.2 + delays.of("eu", 1.0), 1.0)
    for key in range(100, 200):
        delays.began("eu", key, 1.7)
    assert delays.of("eu", 1.7) == pytest.approx(0.5, rel=0.05)


def test_the_most_overdue_forward_counts_whichever_was_first():
    delays = PeerDelays()
    delays.forwarded("eu", 0, 30.0, 0.0)
    for key in range(1, 200):
        delays.forwarded("eu", key, 0.3, 0.1 * key)
    assert delays.of("eu", 20.0) == pytest.approx(20.0 - 0.1 - 1.6)
    for key in range(1, 200):
        delays.began("eu", key, 20.0)
    assert delays.of("eu", 20.0) > 5.0  # first tokens came as late as that
    assert delays.of("eu", 600.0) == pytest.approx(600.0 - 61.0)


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0.0, 20.0), st.booleans()), max_size=60))
def test_the_first_due_of_open_forwards_is_the_least(steps):
    open_forwards, due = OpenForwards(), {}
    for at, (key, expected_s, leaves) in enumerate(steps):
        if leaves:
            sent = SentForward(float(at), expected_s, 0.0)
            open_forwards.by_key.pop(key, None)
            open_forwards.add(key, sent)
            due[key] = sent.due_at
        else:
            open_forwards.by_key.pop(key, None)
            due.pop(key, None)
        assert open_forwards.first_due_at() == min(due.values(), default=math.inf)


def test_open_forwards_are_limited():
    open_forwards = OpenForwards()
    for key in range(5 * FORWARDS_MAX):
        open_forwards.add(key, SentForward(float(key), 0.1, 0.0))
    assert len(open_forwards.by_key) == FORWARDS_MAX
    assert len(open_forwards._due) <= 2 * FORWARDS_MAX
    assert open_forwards.first_due_at() == 4 * FORWARDS_MAX + 1.2


HUGE = 1.7e308


def test_a_digest_with_any_numbers_stops_no_placement():
    region = Region()
    region.step()
    names = ("eu-0", "eu-1")
    listed = ListedReplicas(
        names=names, wait_s=(HUGE, HUGE), running=(2**62, 0), kv_free_tokens=(0, None),
        prefill_s_per_token=(HUGE, 5e-324), prefill_base_s=(HUGE, HUGE),
    )  # fmt: skip
    load = {"wait_s": HUGE, "running": HUGE, "kv_free_tokens": 0, "load_s": HUGE}
    capacity = ModelCapacity(ready=2**62, free=0, listed=(0, 1), **load)
    about = {"prefill_s_per_token": HUGE, "prefill_base_s": HUGE, "requests_per_s": HUGE}
    for shown in (listed, ListedReplicas()):
        region.seq += 1
        seen = digest("eu", seq=region.seq, models={MODEL: capacity}, replicas=shown, **about)
        region.feed(ev.DigestSeen(seen))
        assert not region.ask()


def test_work_on_its_way_counts_where_an_engine_reports_no_pending():
    target = replica("us-1", pending=None)
    price = Price(1.0, target, HELD_NOTHING, 100.0, 1.0, *(0.1,) * 8)
    assert _starves(price, 10.0)
    target.replica.on_the_way.add(1, 1000, 1000, 0.0)
    assert not _starves(price, 10.0)


def test_what_an_answer_teaches_does_not_depend_on_a_peers_count(monkeypatch):
    policy = mesh()
    at = [replica("us-1", running=4, outstanding=4), replica("us-2", running=4, outstanding=4)]
    for number in range(20):
        one = asked(number, "A")
        policy.placed(one, REPLICA, 0.5)
        policy._speeds(one).began(REPLICA, 100.0, 4, 0.1, now=0.5)
        policy.served(one, REPLICA, Served(100, 0, 100), 1.0)
    before = policy.choose(asked(50, "Q"), at, 2.0)
    policy.served(asked(51, "B"), EU_SPOT, Served(100, 0, 2**31), 2.0)
    assert policy.choose(asked(52, "Q"), at, 2.0).name == before.name
