"""Those who are held: who blocks whom, who is asked again and when."""

from dataclasses import replace
from random import Random

import pytest

from mesh.core.lifecycle.queue_scheduler import (
    CHOOSY_MAX,
    OTHERS_WAIT,
    RETRY_S,
    UNCHANGED_S,
)
from mesh.core.lifecycle.release_order import SORTED_MAX, UNCACHED_KNOWN_S
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.model.settings import RouterSettings
from mesh.core.policies.base import Choice, Layered
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from schemas.decision import Placement
from schemas.exchange import Priority
from schemas.ids import ModelId, RouterId
from schemas.state import FirstWaiting, ReplicaState
from tests.mesh.core.build import MODEL, ROUTER, US, beat, core, digest, request

OTHER = ModelId("other")
SPEED = {"prefill_s_per_token": 1e-4, "prefill_base_s": 0.01}


class Picky(Layered):
    """Sends each request to the replica that its session names, and nowhere else."""

    joint = True
    judges_load = True

    def __init__(self):
        self.asked = []
        self.ahead = []
        self.cached = {}

    def hit_ratio(self, request):
        return self.cached.get(request.key, 0.0)

    def choose(self, request, targets, now):
        self.asked.append(request.key)
        self.ahead.append(targets[0].ahead)
        wanted = [target for target in targets if target.name == request.session]
        return Choice(wanted[0] if wanted else None, f"it wants {request.session}")


class Region:
    """A router whose policy is picky."""

    def __init__(self, **settings):
        self.policy = Picky()
        settings = RouterSettings(policy="picky", **settings)
        self.core = RouterCore(
            RouterState(
                region=US,
                router=ROUTER,
                epoch=1,
                settings=settings,
                dice=Random(1),
                makers={"picky": lambda settings, dice: self.policy},
            )
        )
        self.seq = 0

    def hear(self, name, **fields):
        """A heartbeat; returns the keys of requests that were placed thereupon."""
        self.seq += 1
        return self._placed(ev.HeartbeatSeen(beat(name, self.seq, **fields)))

    def ask(self, key, wants=None, model=MODEL, **fields):
        """A newcomer's decision."""
        fields = {"arrived_at": float(key)} | fields
        asked = request(key, session=wants, model=model, **fields)
        effects = self.core.handle(ev.RequestArrived(asked), 0.0)
        return next(e.decision for e in effects if hasattr(e, "decision"))

    def _placed(self, event):
        self.policy.asked.clear()
        effects = self.core.handle(event, 0.0)
        decided = [e for e in effects if hasattr(e, "decision")]
        return [e.key for e in decided if e.decision.placement is Placement.LOCAL]


@pytest.fixture
def region():
    region = Region()
    region.hear("a")
    return region


def test_a_request_held_by_choice_blocks_no_other(region):
    assert region.ask(1, "b").placement is Placement.HOLD
    assert region.ask(2, "a").placement is Placement.LOCAL
    assert region.hear("b") == [1]


def test_who_waits_for_want_of_room_is_joined_by_those_of_its_model(region):
    assert region.ask(1, "b", OTHER).reason == "no replica is ready, and no peer has one"
    assert region.ask(2, "a", OTHER).placement is Placement.HOLD
    assert region.ask(3, "a").placement is Placement.LOCAL


def test_the_choosy_of_one_model_do_not_let_others_overtake_in_another(region):
    for key in range(1, 4):
        region.ask(key, "b")
    region.ask(4, None, OTHER)
    region.hear("a")
    assert region.ask(5, None, OTHER).placement is Placement.HOLD


def test_a_newcomer_behind_the_choosy_is_asked_at_once(region):
    region.ask(1, "b")
    region.policy.asked.clear()
    region.ask(2, "b")
    region.ask(3, "a")
    assert region.policy.asked == [2, 3]


def test_who_left_makes_no_room_for_overtaking(region):
    region.hear("b", models=(OTHER,))
    region.ask(1, "c", OTHER)  # by choice
    region.core.handle(ev.ClientGone(1), 0.0)
    region.hear("b", state=ReplicaState.DRAINING, models=(OTHER,))
    region.ask(2, "b", OTHER)  # for want of room
    assert region.ask(3, "b", OTHER).placement is Placement.HOLD


def test_so_many_are_asked_again_and_no_more(region):
    for key in range(1, 2 * CHOOSY_MAX):
        region.ask(key, "b")
    region.hear("a")
    assert region.policy.asked == list(range(1, CHOOSY_MAX + 2))
    assert region.ask(99, "a").reason == OTHERS_WAIT


def test_a_newcomer_behind_a_line_may_go_to_a_peer(region):
    for key in range(1, CHOOSY_MAX + 2):
        region.ask(key, "b")
    region.core.handle(ev.DigestSeen(digest("eu")), 0.0)
    assert region.ask(98, "a").reason == OTHERS_WAIT
    assert region.ask(99, "eu").peer == "eu"


def test_who_goes_before_is_counted_by_model(region):
    region.hear("a", models=(MODEL, OTHER))
    for key, model in enumerate((MODEL, OTHER, MODEL, OTHER, MODEL), start=1):
        region.ask(key, "b", model)
    region.policy.ahead.clear()
    region.hear("a", models=(MODEL, OTHER))
    assert region.policy.ahead == [0, 0, 1, 1, 2]


def test_in_the_order_of_arrival(region):
    for key in (3, 1, 2):
        region.ask(key, "b")
    assert region.hear("b") == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, [1]),
        ({"full": True, "pending": 9}, [1]),  # this policy judges by itself what is too busy
        ({"state": ReplicaState.DRAINING}, []),
        ({"models": (OTHER,)}, []),
    ],
)
def test_held_requests_are_tried_at_the_heartbeat_of_a_replica_with_room(region, fields, asked):
    region.ask(1, "c")
    region.hear("b", **fields)
    assert region.policy.asked == asked


def test_a_tick_or_a_heartbeat_just_after_a_try_causes_no_other(region):
    region.ask(1, "c")
    region.hear("b")  # tried at 0.0
    region.policy.asked.clear()
    for event in (ev.Tick(), ev.HeartbeatSeen(beat("b", 9, prefill_queued_tokens=7))):
        region.core.handle(event, RETRY_S / 2)
    assert region.policy.asked == []
    region.core.handle(ev.Tick(), RETRY_S)
    assert region.policy.asked == [1]


def test_without_news_a_held_request_is_tried_again_after_a_while_only(region):
    region.ask(1, "c")
    region.hear("b")  # tried at 0.0
    region.policy.asked.clear()
    for event in (ev.HeartbeatSeen(beat("b", 9, served_total=3)), ev.Tick()):
        region.core.handle(event, UNCHANGED_S / 2)
    assert region.policy.asked == []
    region.core.handle(ev.Tick(), UNCHANGED_S)
    assert region.policy.asked == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_queued_tokens": 1},
        {"kv_used_ratio": 0.1},
        {"pending": 1},
        {"waited": FirstWaiting(9.0, 100)},
    ],
)
def test_what_a_price_depends_on_is_news(region, change):
    region.ask(1, "c")
    region.hear("b", **SPEED)
    region.policy.asked.clear()
    region.core.handle(ev.HeartbeatSeen(beat("b", 9, **SPEED, **change)), RETRY_S)
    assert region.policy.asked == [1]


def test_a_wait_for_the_prompts_before_it_is_no_news(region):
    """As a prompt that waits has waited longer at each heartbeat: else those of a flood would be
    tried at each of them."""
    region.ask(1, "c")
    region.hear("b", **SPEED)
    region.policy.asked.clear()
    later = beat("b", 9, **SPEED, waited=FirstWaiting(0.01, 1000))
    region.core.handle(ev.HeartbeatSeen(later), RETRY_S)
    assert region.policy.asked == []


def test_what_cannot_serve_a_held_request_is_no_news(region):
    region.ask(1, "c")
    region.hear("b")
    region.policy.asked.clear()
    for seq in range(1, 4):
        other = beat("z", seq, models=(OTHER,), running=seq)
        region.core.handle(ev.HeartbeatSeen(other), RETRY_S * seq)
    assert region.policy.asked == []


def test_the_end_of_a_request_that_was_placed_by_the_last_try_is_news(region):
    region.ask(1, "b")
    region.ask(2, "c")
    region.hear("b")  # 1 goes there
    region.policy.asked.clear()
    region.core.handle(ev.ClientGone(1), RETRY_S)
    assert region.policy.asked == [2]


def test_so_is_work_that_a_replica_has_begun_to_answer(region):
    region.ask(1, "a")  # placed there
    region.ask(2, "c")
    region.core.handle(ev.HeartbeatSeen(beat("a", 9)), 0.2)
    region.policy.asked.clear()
    region.core.handle(ev.AnswerStarted(1, 1, True), 0.25)
    assert region.policy.asked == [2]


def test_a_digest_is_news_where_its_region_has_other_room(region):
    region.ask(1, "c")
    for seq, free, at, tries in ((1, 2, 1.0, 1), (2, 2, 1.03, 1), (3, 1, 1.06, 2), (4, 0, 2.0, 2)):
        said = digest("eu", seq, replicas_free=free, queue=0)
        region.core.handle(ev.DigestSeen(said), at)
        assert len(region.policy.asked) == tries + 1, (seq, region.policy.asked)


def test_two_routers_of_a_region_that_tell_the_same_are_no_news(region):
    region.ask(1, "c")
    for seq, router in ((1, "r1"), (2, "r2"), (3, "r1"), (4, "r2")):
        said = replace(digest("eu", seq, replicas_free=2, queue=0), router=RouterId(router))
        region.core.handle(ev.DigestSeen(said), 1.0 + 0.03 * seq)
    assert len(region.policy.asked) == 1 + 2  # as it came, and when each was heard first


BUSY = {
    "pending": 2,
    "running": 8,
    "batch_max": 16,
    "prefill_queued_tokens": 100,
    "prefill_s_per_token": 1e-6,
}
LOW_BY_MESH = {"policy": "least-load", "policy_by_priority": ((Priority.LOW, "mesh"),)}


def placed(effects):
    decided = [effect for effect in effects if hasattr(effect, "decision")]
    return [one.key for one in decided if one.decision.placement is Placement.LOCAL]


def test_classes_with_policies_of_their_own_do_not_block_each_other():
    """A busy replica is nothing for least-load and something for mesh, which judges load."""
    router = core(**LOW_BY_MESH)
    router.handle(ev.HeartbeatSeen(beat("a", **BUSY)), 0.0)
    assert placed(router.handle(ev.RequestArrived(request(1)), 0.0)) == []
    assert placed(router.handle(ev.RequestArrived(request(2, priority=Priority.LOW)), 0.0)) == []
    assert placed(router.handle(ev.Tick(), 0.1)) == [2]
    assert [held.key for held in router.held] == [1]


def test_a_busy_replicas_heartbeat_reaches_the_class_that_would_use_it():
    router = core(**LOW_BY_MESH)
    router.handle(ev.RequestArrived(request(1, priority=Priority.LOW)), 0.0)
    assert placed(router.handle(ev.HeartbeatSeen(beat("a", **BUSY)), 0.1)) == [1]


def test_requests_that_avoid_a_place_leave_it_to_others():
    router = core(policy="least-load")
    for key in (1, 2):
        router.handle(ev.RequestArrived(request(key)), 0.0)
    router.inflight[1].avoid = frozenset({"a"})
    assert placed(router.handle(ev.HeartbeatSeen(beat("a")), 0.1)) == [2]
    assert [held.key for held in router.held] == [1]


# At 1 ms a token, and 30 times that, of 2,000, 1,000, 500 and 100 tokens: 30 s at most, 30, 15, 3.
LONG, HALF, QUARTER, SHORT = (Prompt(tokens, ()) for tokens in (2000, 1000, 500, 100))
SPEED = {"prefill_s_per_token": 0.001}


def test_less_to_compute_goes_first_among_those_that_came_soon_after():
    region = Region(queue_delay_s_max=0.0)
    for key, (at, prompt) in enumerate(
        ((0.0, LONG), (0.1, HALF), (14.9, QUARTER), (26.9, SHORT), (27.1, SHORT)), start=1
    ):
        region.ask(key, "b", prompt=prompt, arrived_at=at)
    region.hear("a", **SPEED)
    assert region.policy.asked == [3, 4, 1, 2, 5]


def test_nobody_gives_way_for_longer_than_the_limit_of_queue_delay():
    region = Region(queue_delay_s_max=10.0)
    for key, (at, prompt) in enumerate(((0.0, LONG), (6.9, SHORT), (7.1, SHORT)), start=1):
        region.ask(key, "b", prompt=prompt, arrived_at=at)
    region.hear("a", **SPEED)
    assert region.policy.asked == [2, 1, 3]


@pytest.mark.parametrize(
    ("settings", "fields"),
    [({"hold_s_max": 20.0}, {}), ({}, {"slo_ttft_s": 20.0})],
)
def test_nobody_gives_way_for_longer_than_half_of_what_it_may_wait(settings, fields):
    region = Region(queue_delay_s_max=0.0, **settings)
    for key, (at, prompt) in enumerate(((0.0, LONG), (6.9, SHORT), (7.1, SHORT)), start=1):
        region.ask(key, "b", prompt=prompt, arrived_at=at, **fields)
    region.hear("a", **SPEED)
    assert region.policy.asked == [2, 1, 3]


def test_one_replica_that_reports_a_speed_of_its_own_changes_no_order():
    region = Region(queue_delay_s_max=0.0)
    region.ask(1, "b", prompt=LONG, arrived_at=0.0)
    region.ask(2, "b", prompt=SHORT, arrived_at=1.0)
    region.hear("c", prefill_s_per_token=1e-9)
    region.hear("d", **SPEED)
    region.policy.asked.clear()
    region.hear("a", **SPEED)
    region.core.handle(ev.Tick(), UNCACHED_KNOWN_S + 0.01)
    assert region.policy.asked == [2, 1]


def test_what_is_cached_need_not_be_computed(region):
    region.policy.cached = {2: 0.95}
    for key, at in enumerate((0.0, 1.0), start=1):
        region.ask(key, "b", prompt=LONG, arrived_at=at)
    region.hear("a", **SPEED)
    assert region.policy.asked == [2, 1]
    region.policy.cached = {1: 1.0, 2: 0.95}
    region.policy.asked.clear()
    region.core.handle(ev.Tick(), UNCACHED_KNOWN_S + 0.01)
    assert region.policy.asked == [1, 2], "it is cached since"


def test_the_quicker_the_replicas_the_less_a_long_prompt_gives_way(region):
    region.ask(1, "b", prompt=LONG, arrived_at=0.0)
    region.ask(2, "b", prompt=SHORT, arrived_at=1.0)
    region.hear("a", prefill_s_per_token=0.00001)
    assert region.policy.asked == [1, 2], "it gives way to those of 0.6 s after it"
    region.policy.asked.clear()
    region.hear("a", prefill_s_per_token=0.001)
    region.core.handle(ev.Tick(), UNCACHED_KNOWN_S + 0.01)
    assert region.policy.asked == [2, 1]


def test_a_class_keeps_its_turns_whatever_its_requests_take(region):
    high, low = Priority.HIGH, Priority.LOW
    region.ask(1, "b", prompt=LONG, arrived_at=1.0, priority=high)
    region.ask(2, "b", prompt=LONG, arrived_at=1.0)
    region.ask(3, "b", prompt=SHORT, arrived_at=1.1, priority=low)
    region.ask(4, "b", prompt=SHORT, arrived_at=1.2)
    region.ask(5, "b", prompt=SHORT, arrived_at=1.3, priority=high)
    region.hear("a", **SPEED)
    assert region.policy.asked == [5, 1, 4, 2, 3]


def test_a_model_that_nobody_serves_takes_no_turn_of_another_model(region):
    region.ask(1, "b", prompt=LONG, arrived_at=0.0, priority=Priority.HIGH)
    region.ask(2, "b", prompt=LONG, arrived_at=-5.0)
    region.ask(3, "b", prompt=SHORT, arrived_at=6.0, priority=Priority.HIGH, model="absent")
    region.hear("a", **SPEED)
    asked = [key for key in region.policy.asked if key != 3]
    assert asked == [1, 2]


def test_only_the_first_of_many_are_looked_at(region):
    region.policy.cached = {SORTED_MAX: 1.0, SORTED_MAX + 1: 1.0}
    for key in range(1, SORTED_MAX + 3):
        region.ask(key, "b", prompt=LONG, arrived_at=key / 1000)
    region.hear("a")
    assert region.policy.asked[:2] == [SORTED_MAX, 1]
