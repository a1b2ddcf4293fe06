"""A router's index follows what agents report of their engines, through gaps and restarts."""

import random

import pytest

from mesh.core.gossip.held_prefixes import ASK_S, GRACE_S, UNDER_WAY_S
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.policies.mesh_caches import with_loading
from mesh.core.policies.mesh_price import HeldPrefix
from schemas.held import PARTS_MAX, HeldDelta, HeldPart
from schemas.state import ReplicaState
from tests.mesh.core import build

NAME = "us-0"


class Scene:
    """A router, and one replica whose engine reports."""

    def __init__(self, **settings):
        self.core = build.core(policy="mesh", **settings)
        self.seq = 0
        self.now = 0.0

    def beat(self, held_seq, *, now=None, epoch=1):
        self.seq += 1
        self.now = self.now if now is None else now
        beat = build.beat(NAME, self.seq, held_seq=held_seq, epoch=epoch)
        return self.core.handle(ev.HeartbeatSeen(beat), self.now)

    def delta(self, seq, *, epoch=1, **blocks):
        return self.core.handle(ev.HeldDeltaSeen(NAME, HeldDelta(epoch, seq, **blocks)), self.now)

    def part(self, seq, part, parts, **blocks):
        message = HeldPart(1, seq, part, parts, **blocks)
        return self.core.handle(ev.HeldPartSeen(NAME, message), self.now)

    def asks(self, now):
        self.now = now
        if (known := self.core.replicas.get(NAME)) is not None:
            self.beat(known.heartbeat.held_seq)
        effects = self.core.handle(ev.Tick(), now)
        return [effect for effect in effects if isinstance(effect, fx.AskHeld)]

    def asked(self):
        """The router notices that deltas are missing, and asks."""
        self.asks(self.now)
        [ask] = self.asks(self.now + GRACE_S)
        return ask

    @property
    def index(self):
        [index] = self.core.state.placer.replica_indexes
        return index

    @property
    def held(self):
        return {block for block, _ in self.index.held(NAME)}


@pytest.fixture
def scene():
    scene = Scene()
    scene.beat(0)
    return scene


def test_deltas_in_order_are_the_index(scene):
    scene.delta(1, gpu=(1, 2, 3))
    scene.delta(2, gpu=(4,), lost=(2, 9))
    assert scene.held == {1, 3, 4}
    scene.delta(3, gpu=(7,), cleared=1)
    assert scene.held == {7}


def test_repeated_and_foreign_deltas_change_nothing(scene):
    scene.delta(1, gpu=(1,))
    scene.delta(1, lost=(1,))
    scene.delta(2, epoch=2, lost=(1,))
    scene.core.handle(ev.HeldDeltaSeen("unknown", HeldDelta(1, 1, (5,))), 0.0)
    assert scene.held == {1}


def test_a_replica_that_reports_nothing_has_no_reported_blocks():
    scene = Scene()
    scene.beat(None)
    scene.delta(1, gpu=(1,))
    assert scene.held == set() and scene.index.reporting == set()


def test_a_gap_is_noticed_and_the_whole_set_repairs_it(scene):
    scene.delta(1, gpu=(1, 2))
    scene.delta(3, gpu=(4,))
    assert scene.held == {1, 2}
    scene.beat(3)
    assert scene.asked() == fx.AskHeld(NAME, 1)
    scene.now += UNDER_WAY_S
    scene.core.held_prefixes._known[NAME].asked_at = scene.now
    scene.part(3, 0, 2, gpu=(2, 4))
    assert scene.held == {1, 2}
    scene.part(3, 1, 2, cpu=(5,))
    assert scene.held == {2, 4, 5}
    scene.delta(4, gpu=(6,))
    assert scene.held == {2, 4, 5, 6}


def test_what_is_under_way_survives_the_whole_set(scene):
    scene.index.insert(NAME, (10, 11), scene.now)
    scene.beat(1)
    scene.asked()
    scene.part(1, 0, 1, gpu=(2,))
    assert scene.held == {10, 11, 2}


def test_it_asks_seldom_and_only_while_it_lacks_something(scene):
    scene.beat(2)
    assert scene.asks(0.5) == []
    assert len(scene.asks(0.5 + GRACE_S)) == 1
    assert scene.asks(0.5 + GRACE_S + ASK_S - 0.6) == []
    assert len(scene.asks(0.5 + GRACE_S + ASK_S)) == 1
    scene.part(2, 0, 1)
    assert scene.asks(scene.now + ASK_S) == []


@pytest.mark.parametrize(("part", "parts"), [(-1, 1), (1, 1), (0, 0), (0, PARTS_MAX + 1)])
def test_parts_that_cannot_be_are_ignored(scene, part, parts):
    scene.beat(1)
    scene.asked()
    scene.part(1, part, parts, gpu=(1,))
    assert scene.held == set()


def test_parts_that_nobody_asked_for_are_ignored(scene):
    scene.part(1, 0, 1, gpu=(1,))
    assert scene.held == set()


def test_an_agent_that_restarted_begins_anew(scene):
    scene.delta(1, gpu=(1,))
    scene.beat(0, epoch=2)
    assert scene.held == set()
    scene.delta(1, epoch=2, gpu=(2,))
    assert scene.held == {2}


def test_a_replica_that_stops_reporting_is_estimated_again(scene):
    assert scene.asks(1.0) == [] and scene.index.reporting == {NAME}
    scene.beat(None, now=1.1)
    assert scene.asks(2.0) == [] and scene.index.reporting == set()


@pytest.mark.parametrize("seed", range(10))
def test_the_index_is_the_agents_set_after_losses_and_repairs(seed):
    dice = random.Random(seed)
    scene = Scene()
    truth, seq = set(), 0
    for step in range(100):
        now = (UNDER_WAY_S + 2.0) * step  # nothing counts as under way
        scene.beat(seq, now=now)
        gained = {dice.randrange(50) for _ in range(dice.randrange(4))}
        lost = {dice.randrange(50) for _ in range(dice.randrange(4))} - gained
        seq, truth = seq + 1, (truth | gained) - lost
        if dice.random() < 0.8:
            scene.delta(seq, gpu=tuple(gained), lost=tuple(lost))
        scene.beat(seq)
        scene.asks(now)
        if scene.asks(now + GRACE_S):
            scene.part(seq, 0, 1, gpu=tuple(truth))
    assert scene.held == truth


def test_blocks_in_slower_tiers_are_worth_less(scene):
    prompt = build.prompt("ABCD", tokens=400)
    a, b, c, d = prompt.hashes
    scene.delta(1, gpu=(a, b), cpu=(c,), disk=(d,))
    full = HeldPrefix(4, 256)
    [fast] = with_loading({"other": full}, scene.index, prompt).values()
    [slow] = with_loading({NAME: full}, scene.index, prompt).values()
    assert fast == full
    assert slow == HeldPrefix(4, 256 - round(0.4 * prompt.block_tokens))
    scene.delta(2, gpu=(c, d))
    assert with_loading({NAME: full}, scene.index, prompt) == {NAME: full}


def test_prompts_are_sent_with_their_blocks_to_replicas_that_report_alone():
    for held_seq in (None, 0):
        scene = Scene()
        scene.beat(held_seq)
        effects = scene.core.handle(ev.RequestArrived(build.request(1)), 0.0)
        [dispatch] = [one for one in effects if isinstance(one, fx.Dispatch)]
        assert dispatch.with_blocks is (held_seq is not None)


@pytest.mark.parametrize("heartbeat_first", [False, True])
def test_what_an_engine_has_lost_is_no_estimate_in_either_order_of_its_messages(heartbeat_first):
    """The connection to its events is lost: the agent knows nothing more, and that all is gone."""
    scene = Scene()
    scene.beat(0)
    scene.asks(0.5)
    scene.delta(1, gpu=(7, 8))
    assert scene.held == {7, 8}
    scene.now = 1.0
    if heartbeat_first:
        scene.beat(None)
        scene.asks(1.5)
    scene.delta(2, cleared=1)
    if not heartbeat_first:
        scene.beat(None)
        scene.asks(1.5)
    assert scene.held == set()


@pytest.mark.parametrize(("epoch", "cleared"), [(2, 1), (1, 0)])
def test_other_deltas_of_an_agent_that_estimates_change_nothing(epoch, cleared):
    scene = Scene()
    scene.beat(0)
    scene.asks(0.5)
    scene.delta(1, gpu=(7, 8))
    scene.beat(None)
    scene.delta(2, epoch=epoch, lost=(7,), gpu=(9,), cleared=cleared)
    assert scene.held == {7, 8}


@pytest.mark.parametrize(("why", "left"), [("asleep", set()), ("hung", {1, 2, 3})])
def test_an_engine_that_was_put_to_sleep_holds_nothing(why, left):
    scene = Scene()
    scene.beat(None)
    scene.index.insert(NAME, (1, 2, 3), 0.0)
    beat = build.beat(NAME, 9, state=ReplicaState.DOWN, down_reason=why)
    scene.core.handle(ev.HeartbeatSeen(beat), 1.0)
    assert scene.held == left
