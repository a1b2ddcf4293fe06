"""Prices by hand: each term alone, and what is not known."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.core.model.prompt import Prompt
from mesh.core.policies.base import Target
from mesh.core.policies.mesh_peers import RTT_START_S
from mesh.core.policies.mesh_price import HELD_NOTHING, HeldPrefix, Price, PromptHolders, score
from mesh.core.policies.mesh_prices import WORK_FACTOR, WORK_MAX, Prices, near_s
from mesh.core.policies.mesh_speeds import (
    RESIDENCE_START_S,
    RUNNING_START,
    SLOT_START_S,
    SPEED_START,
    STALL_WEIGHT,
    FittedSpeed,
    SpeedModel,
)
from mesh.core.view.peers import Peer, RoundTripEstimate
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind
from schemas.ids import ModelId, RouterId
from schemas.state import FirstWaiting, ModelCapacity
from tests.mesh.core.build import MODEL, ROUTER, beat, digest, request, spot

BASE_S, S_PER_TOKEN, _ = SPEED_START
IDLE = {"prefill_queued_tokens": 0, "kv_used_ratio": 0.0, "kv_capacity_tokens": 100_000}

NO_HOLDERS = PromptHolders({}, {})


def replica(name="a", rtt_s=0.0, sent=(), **fields):
    """`sent`: prompt tokens of each hand-off on its way, all of them to compute."""
    one = Replica(beat(name, **(IDLE | fields)), 100.0)
    for number, tokens in enumerate(sent, start=1):
        one.on_the_way.add(number, tokens, tokens, 100.0)
    return Target(name, one.load, CandidateKind.REPLICA, rtt_s, one)


def peer(name="eu", rtt_s=0.1, *, forwarded=0, queue=0, requests_per_s=0.0, **has):
    """A region of four idle replicas, seen just now."""
    known = Peer(pings=RoundTripEstimate(rtt_s), seen_at=100.0)
    capacity = ModelCapacity(**({"ready": 4, "free": 4, "wait_s": 0.0, "running": 0.0} | has))
    known.digests[ROUTER] = digest(
        name, queue=queue, requests_per_s=requests_per_s, models={MODEL: capacity}
    )
    known.forwarded_at.extend([100.0] * forwarded)
    return Target(name, 0, CandidateKind.PEER, rtt_s, peer=known, ahead=known.queue)


def price(target, tokens=1000, held=HELD_NOTHING, now=100.0, speeds=None, model=MODEL):
    asked = request(1, prompt=Prompt(tokens, ()), model=model)
    known = PromptHolders({target.name: held}, {target.name: held})
    rows = Prices(speeds or SpeedModel(), asked, now).rows([target], known)
    return Price._make(rows[0])


def test_an_idle_replica_costs_its_base_and_the_prompt():
    one = price(replica())
    assert score(one).terms == {
        "rtt_s": 0.0,
        "line_s": 0.0,
        "queue_s": 0.0,
        "prefill_s": pytest.approx(1000 * S_PER_TOKEN),
        "base_s": BASE_S,
        "memory_s": 0.0,
        "load_s": 0.0,
        "others_s": 0.0,
    }
    assert (one.tokens, one.running) == (1000, 0)


def test_what_it_holds_is_not_computed():
    one = price(replica(), held=HeldPrefix(6, 400))
    assert one.prefill_s == pytest.approx(600 * S_PER_TOKEN)
    assert score(one).matched_blocks == 6


def test_the_queue_is_the_reported_one_less_what_is_done_since_and_what_was_sent():
    one = price(replica(prefill_queued_tokens=3000, sent=(500, 200)), now=100.1)
    assert one.queue_s == pytest.approx((3000 + 700) * S_PER_TOKEN - 0.1)
    late = price(replica(prefill_queued_tokens=3000, sent=(500,)), now=200.0)
    assert late.queue_s == pytest.approx(500 * S_PER_TOKEN)


def test_a_queue_that_is_not_reported_is_estimated_from_its_requests():
    speeds = SpeedModel()
    typical_s = speeds.prefill_tokens * S_PER_TOKEN
    said = {"prefill_queued_tokens": None, "running": 4, "outstanding": 6}
    assert price(replica(pending=2, **said)).queue_s == pytest.approx(2 * typical_s)
    assert price(replica(pending=None, **said)).queue_s == pytest.approx(6 * typical_s)


def test_others_pay_for_our_prefill_as_many_as_there_are():
    one = price(replica(running=10))
    assert one.others_s == pytest.approx(10 * STALL_WEIGHT * 1000 * S_PER_TOKEN)
    assert one.seconds == pytest.approx(sum(score(one).terms.values()))
    silent = price(replica(running=None, pending=None, outstanding=10))
    assert silent.others_s == one.others_s


def given_back_per_s(speeds, running):
    """Tokens of memory: as many whole requests as run there, one residence each."""
    return max(1, running) * speeds.kv_tokens / RESIDENCE_START_S


@pytest.mark.parametrize("running", [1, 4])
def test_missing_memory_is_waited_for_until_running_requests_release_it(running):
    speeds = SpeedModel()
    tokens = round(10_500 - speeds.output_tokens)  # 500 more than is free
    one = price(replica(kv_used_ratio=0.9, running=running), tokens)
    assert one.memory_s == pytest.approx(500 / given_back_per_s(speeds, running))
    assert price(replica(kv_used_ratio=0.8, running=running), tokens).memory_s == 0.0


def test_what_it_holds_takes_no_more_memory():
    speeds = SpeedModel()
    tokens, held = round(13_500 - speeds.output_tokens), HeldPrefix(190, 3000)
    one = price(replica(kv_used_ratio=0.9, running=2), tokens, held)
    assert one.memory_s == pytest.approx(500 / given_back_per_s(speeds, 2))
    far = price(peer(kv_free_tokens=10_000, running=2.0), tokens, held)
    assert far.memory_s == pytest.approx(500 / given_back_per_s(speeds, 2))


@pytest.mark.parametrize("busy", [0.1, 0.5, 0.9])
def test_a_prefill_delays_others_where_prompts_are_queued_as_busy_as_replicas_are(busy):
    speeds = SpeedModel()
    for number in range(2000):
        speeds.demand.add(busy / 10, number / 10)
    weight = min(WORK_MAX, WORK_FACTOR * busy / (1 - busy))
    queued = price(replica(prefill_queued_tokens=50), now=200.0, speeds=speeds)
    assert queued.others_s == 0.0, "computed by now"
    queued = price(replica(prefill_queued_tokens=50, sent=(9,)), now=200.0, speeds=speeds)
    assert queued.others_s == pytest.approx(weight * queued.prefill_s, rel=0.1)
    targets = [replica(), peer(wait_s=0.01), peer("ap")]
    rows = Prices(speeds, request(1, prompt=Prompt(1000, ())), 100.0).rows(targets, NO_HOLDERS)
    here, busy_far, idle_far = map(Price._make, rows)
    assert busy_far.others_s > 0.0
    assert here.others_s == idle_far.others_s == 0.0, "a replica is idle there"


def test_demand_is_forgotten_and_one_prompt_is_no_rate():
    speeds = SpeedModel()
    assert speeds.demand.per_s(5.0) == 0.0
    speeds.demand.add(1.0, 5.0)
    assert speeds.demand.per_s(5.0) == 1.0
    assert speeds.demand.per_s(15.0) < 0.1
    assert speeds.demand.per_s(500.0) < 1e-6


def test_memory_that_no_request_will_release_is_not_waited_for():
    assert price(replica(kv_used_ratio=0.9), 50_000).memory_s == 0.0
    assert price(peer(kv_free_tokens=10, running=0.0), 50_000).memory_s == 0.0


def test_what_is_on_its_way_takes_memory_too():
    speeds = SpeedModel()
    tokens = round(11_000 - speeds.output_tokens)
    for used, sent in ((0.9, ()), (0.5, (40_000,)), (0.0, (90_000,))):
        one = price(replica(kv_used_ratio=used, sent=sent, running=1), tokens)
        assert one.memory_s == pytest.approx(1000 / given_back_per_s(speeds, 0))


def test_a_region_has_the_memory_of_its_emptiest_replica():
    speeds = SpeedModel()
    tokens = round(11_000 - speeds.output_tokens)
    one = price(peer(kv_free_tokens=10_000, running=2.0), tokens)
    assert one.memory_s == pytest.approx(1000 / given_back_per_s(speeds, 2))
    assert price(peer(kv_free_tokens=None), tokens).memory_s == 0.0


def test_all_that_decode_there_pay_for_the_stall():
    for target in (replica(running=10), peer(running=10.0)):
        one = price(target)
        assert one.others_s == pytest.approx(10 * STALL_WEIGHT * one.prefill_s)


def test_held_requests_that_go_first_are_waited_for():
    """They are prompts like others, shared among the replicas that serve the model."""
    speeds = SpeedModel()
    for target in (replica()._replace(ahead=6), peer(queue=6)):
        one = price(target, speeds=speeds)
        typical_s = speeds.prefill_tokens * speeds.speed(target).s_per_token
        ready = 1 if target.peer is None else target.peer.ready(MODEL)
        assert one.line_s == pytest.approx(6 * typical_s / ready)


def test_each_one_at_its_own_speed():
    speeds = SpeedModel()
    for _ in range(50):
        speeds.began(spot("slow"), 1000, 0, 5.0, now=100.0)
        speeds.began(spot("fast"), 1000, 0, 0.05, now=100.0)
    slow, fast = (price(replica(name), speeds=speeds) for name in ("slow", "fast"))
    assert slow.prefill_s == pytest.approx(1000 * speeds.speed(slow.target).s_per_token)
    assert slow.prefill_s > 3 * fast.prefill_s


def test_decodes_that_slow_a_first_token_are_in_the_base():
    speeds = SpeedModel()
    speeds.fleet_speed = FittedSpeed(0.1, 1e-4, 0.002)
    for target in (replica(running=10), peer(running=10.0)):
        assert price(target, speeds=speeds).base_s == pytest.approx(0.1 + 10 * 0.002)


def test_an_idle_peer_costs_its_distance_more():
    near, far = price(replica()), price(peer(rtt_s=0.08))
    assert far.seconds - near.seconds == pytest.approx(0.08)
    assert far.tokens == near.tokens


@pytest.mark.parametrize("target", [peer(rtt_s=None), replica(rtt_s=None)])
def test_an_unknown_distance_is_a_long_one(target):
    assert price(target).rtt_s == RTT_START_S


def test_what_a_region_holds_is_shared_among_its_replicas():
    speeds = SpeedModel()
    typical_s = speeds.prefill_tokens * S_PER_TOKEN
    assert price(peer(queue=8)).line_s == pytest.approx(8 / 4 * typical_s)
    assert price(peer(wait_s=0.3)).queue_s == pytest.approx(0.3)
    assert price(peer(wait_s=None)).queue_s == pytest.approx(typical_s)


def test_what_has_come_there_since_fills_the_free_and_then_waits():
    typical_s = SpeedModel().prefill_tokens * S_PER_TOKEN
    assert price(peer(free=2, forwarded=2)).queue_s == 0.0
    assert price(peer(free=2, forwarded=4)).queue_s == pytest.approx(2 / 4 * typical_s)
    strange = peer(free=0, requests_per_s=10.0, rtt_s=0.2)
    later = price(strange, now=100.3)  # 0.3 s since its digest, which was half a trip old
    assert later.queue_s == pytest.approx(10.0 * (0.3 + 0.1) / 4 * typical_s)


def test_a_region_of_several_routers_is_one_region():
    """Each reports the same replicas; clients come to each."""
    typical_s = SpeedModel().prefill_tokens * S_PER_TOKEN
    both = peer(queue=1, wait_s=0.4)
    other = {MODEL: ModelCapacity(ready=4, free=4, wait_s=0.2)}
    both.peer.digests[RouterId("r2")] = digest("eu", queue=3, models=other, router=RouterId("r2"))
    both = both._replace(ahead=both.peer.queue)
    assert price(both).queue_s == pytest.approx(0.2)
    assert price(both).line_s == pytest.approx(4 / 4 * typical_s)


def test_a_peer_without_that_model_has_no_numbers_for_it():
    one = price(peer(), model=ModelId("other"))
    assert one.running == RUNNING_START
    assert one.queue_s > 0.0


COUNTS = st.none() | st.integers(0, 2**31)


@given(
    COUNTS,
    COUNTS,
    COUNTS,
    COUNTS,
    st.none() | st.floats(0, 1),
    st.integers(1, 2**20),
    st.floats(-1e6, 1e6),
)
def test_any_report_makes_a_price(queued, pending, running, capacity, used, tokens, now):
    said = {
        "prefill_queued_tokens": queued,
        "pending": pending,
        "running": running,
        "kv_capacity_tokens": capacity,
        "kv_used_ratio": used,
    }
    one = price(replica(**said), tokens, now=now)
    assert one.seconds == pytest.approx(sum(score(one).terms.values()))
    assert all(0.0 <= term < float("inf") for term in score(one).terms.values())


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_kept_speeds_change_no_price(seed):
    """Whatever they say, are sent and teach between two prices."""
    dice, speeds, now = Random(seed), SpeedModel(), 100.0
    targets = [replica(name) for name in "abcd"]
    for seq in range(2, 40):
        one = dice.choice(targets)
        told = {
            "running": dice.choice([None, 0, 3, 12]),
            "prefill_queued_tokens": dice.choice([None, 0, 2000]),
            "kv_used_ratio": dice.choice([None, 0.0, 0.97]),
            "prefill_s_per_token": dice.choice([None, 0.0, 2e-4]),
        }
        kind = dice.randrange(4)
        if kind == 0:
            one.replica.update(beat(one.name, seq, **(IDLE | told)), now)
        elif kind == 1:
            one.replica.on_the_way.add(seq, 700, 500, now)
        elif kind == 2:
            speeds.began(
                spot(one.name), 1000 * dice.random(), dice.randrange(9), dice.random(), now=100.0
            )
        else:
            speeds.forget(spot(one.name))
        now += dice.choice([0.0, 0.004, 0.3])
        ahead = dice.choice([0, 0, 5])
        shown = [one._replace(ahead=ahead, load=one.replica.load) for one in targets]
        asked = request(1, prompt=Prompt(1000, ()))
        kept = Prices(speeds, asked, now).rows(shown, NO_HOLDERS)
        speeds.kept.clear()
        assert kept == Prices(speeds, asked, now).rows(shown, NO_HOLDERS)
        for row in map(Price._make, kept):
            own = row.target.replica
            s_per_token = speeds.speed(row.target).s_per_token
            queued = own.prefill_queue_tokens(now, s_per_token)
            if queued is not None:
                assert row.queue_s == queued * s_per_token


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_rows_that_cannot_be_wanted_are_left_out_and_no_others(seed):
    """However replicas differ, and whatever they hold."""
    dice, speeds, most = Random(seed), SpeedModel(), 4
    speeds.demand.add(dice.choice([0.0, 5.0]), 99.0)
    alike = dice.random() < 0.3
    targets = []
    for number in range(24):
        told = {
            "running": dice.choice([None, 0, 3, 12]),
            "prefill_queued_tokens": dice.choice([None, 0, 2000]),
            "kv_used_ratio": dice.choice([None, 0.0, 0.97]),
            "batch_max": dice.choice([None, 2]),
            "prefill_s_per_token": dice.choice([None, 1e-4, 2e-4]),
        }
        one = replica(f"r{number}", sent=dice.sample([100, 700], dice.randrange(2)), **told)
        targets.append(replica(f"r{number}") if alike else one)
    ahead = dice.choice([0, 5])
    targets = [one._replace(ahead=ahead) for one in targets]
    held = {one.name: HeldPrefix(1, dice.randrange(1000)) for one in targets if dice.random() < 0.3}
    prices = Prices(speeds, request(1, prompt=Prompt(1000, ())), 100.0)
    rows = prices.rows(targets, PromptHolders(held, {}))
    few = prices.rows(targets, PromptHolders(held, {}), most)
    seconds = sorted(row[0] for row in rows)
    limit_s = max(seconds[most - 1], near_s(seconds[0]))
    assert [row for row in few if row[0] <= limit_s] == [row for row in rows if row[0] <= limit_s]


def test_most_of_a_fleet_that_differs_needs_no_row():
    targets = [replica(f"r{running}", running=running) for running in range(64)]
    prices = Prices(SpeedModel(), request(1, prompt=Prompt(1000, ())), 100.0)
    assert len(prices.rows(targets, NO_HOLDERS)) == 64
    assert len(prices.rows(targets, NO_HOLDERS, 4)) == 4


def test_a_slot_is_waited_for_as_long_as_answers_that_were_seen_lasted():
    full = replica(running=4, outstanding=4, batch_max=4)
    speeds = SpeedModel()
    assert price(full, speeds=speeds).memory_s == pytest.approx(SLOT_START_S)
    for _ in range(60):
        speeds.resided(spot("a"), 8.0)
    assert price(full, speeds=speeds).memory_s == pytest.approx(8.0 / 4)
    over = replica(running=4, pending=2, outstanding=6, batch_max=4)
    assert price(over, speeds=speeds).memory_s == pytest.approx(3 * 8.0 / 4)
    assert price(replica(running=3, outstanding=3, batch_max=4), speeds=speeds).memory_s == 0.0
    assert price(replica(running=9, batch_max=None), speeds=speeds).memory_s == 0.0


def test_a_batch_of_unknown_size_is_full_as_long_as_requests_have_waited_for_it():
    idle_s = 2 * (price(replica()).base_s + 100 * SpeedModel().fleet_speed.s_per_token)
    for told_s, slot_s in ((idle_s + 1.5, 1.5), (idle_s - 0.01, 0.0)):
        waits = replica(pending=2, waited=FirstWaiting(told_s, 100))
        assert price(waits).queue_s == pytest.approx(slot_s)


@pytest.mark.parametrize("target", [replica(rtt_s=0.1), peer(rtt_s=0.1)])
def test_the_next_turns_pay_the_round_trip_too(target):
    speeds = SpeedModel()
    for _ in range(200):
        speeds.prompt(100, goes_on=True)
        speeds.prompt(100, goes_on=False)
    assert speeds.returns == pytest.approx(1.0, abs=0.05)
    alone, more = price(target), price(target, speeds=speeds)
    assert alone.others_s == 0.0
    assert more.others_s == pytest.approx(speeds.returns * 0.1)
    assert price(replica(rtt_s=0.0), speeds=speeds).others_s == 0.0


def test_work_is_shared_by_all_replicas_that_have_answered():
    """Of a large fleet only a sample is priced."""
    busy = replica("a", prefill_queued_tokens=1000)

    def others_s(known):
        speeds = SpeedModel()
        for number in range(known):
            speeds.began(spot(f"r{number}"), 100.0, 0, 0.1, now=90.0)
        for _ in range(20):
            speeds.demand.add(0.1, 99.0)
        return price(busy, speeds=speeds).others_s

    assert others_s(1) > 5 * others_s(40) > 0.0
