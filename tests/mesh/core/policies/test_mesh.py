"""The mesh policy: the least of all prices, when it would rather wait, and what it remembers."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Served
from mesh.core.model.served_names import kept_name, served_name
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import mesh as module
from mesh.core.policies.base import Destination, Target
from mesh.core.policies.mesh import QUEUE_S, SCORES_MAX, MeshPolicy
from mesh.core.policies.mesh_prices import TIE_RATIO, TIE_S
from mesh.core.policies.mesh_speeds import (
    OUTPUT_TOKENS_START,
    PREFILL_TOKENS_START,
    RESIDENCE_START_S,
    SLOT_START_S,
    SPEED_START,
    STALL_WEIGHT,
)
from mesh.core.view.peers import Peer, RoundTripEstimate
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind
from schemas.http import CHAT, EMBEDDINGS, MESSAGES
from schemas.ids import ModelId
from schemas.state import ModelCapacity
from tests.mesh.core.build import MODEL, ROUTER, beat, digest, foreign, prompt, request, spot

BLOCK = 100  # tokens
BASE_S, S_PER_TOKEN, _ = SPEED_START
EU = Destination(CandidateKind.PEER, "eu")


def asked(key, text="A", blocks=None, **fields):
    """A block a letter."""
    tokens = BLOCK * (len(text) if blocks is None else blocks)
    return request(key, prompt=Prompt(tokens, prompt(text).hashes, float(BLOCK)), **fields)


def replica(name, rtt_s=0.0, **fields):
    idle = {"prefill_queued_tokens": 0, "kv_used_ratio": 0.0, "kv_capacity_tokens": 100_000}
    idle["batch_max"] = None
    one = Replica(beat(name, **(idle | fields)), 0.0)
    return Target(name, one.load, CandidateKind.REPLICA, rtt_s, one)


def peer(name="eu", rtt_s=0.1, **fields):
    known = Peer(pings=RoundTripEstimate(rtt_s), seen_at=0.0)
    capacity = ModelCapacity(ready=4, free=4, wait_s=0.0, running=0.0)
    known.digests[ROUTER] = digest(name, **({"models": {MODEL: capacity}} | fields))
    return Target(name, 0, CandidateKind.PEER, rtt_s, peer=known)


def mesh(seed=1):
    return MeshPolicy(RouterSettings(), Random(seed))


def place(policy, one, *targets, now=0.0):
    """Choose and follow the choice."""
    choice = policy.choose(one, targets, now)
    policy.placed(one, Destination(choice.target.kind, choice.target.name), now)
    return choice


def queued(seconds):
    """Tokens that take so long at the start speed."""
    return round(seconds / S_PER_TOKEN)


def test_the_shortest_queue_of_equals():
    short, long = (replica(n, prefill_queued_tokens=t) for n, t in (("a", 100), ("b", 900)))
    choice = mesh().choose(asked(1), [long, short], 0.0)
    assert choice.name == "a"
    first_s = BASE_S + 200 * S_PER_TOKEN
    assert choice.reason == f"first token in {first_s:.3f} s: cheapest of 2"
    assert [score.target.name for score in choice.scores] == ["a", "b"]
    assert choice.scores[0].seconds == pytest.approx(first_s)


def test_a_prefix_is_worth_the_seconds_that_it_saves():
    policy, text = mesh(), "A" * 20
    policy.placed(asked(1, text), spot("a"), 0.0)
    saved_s = (20 * BLOCK - 1) * S_PER_TOKEN
    for factor, name in ((0.8, "a"), (1.2, "b")):
        holder = replica("a", prefill_queued_tokens=queued(factor * saved_s))
        choice = policy.choose(asked(2, text), [holder, replica("b")], 0.0)
        assert choice.name == name
        assert (choice.matched_blocks, choice.held_tokens) == (
            (20, 1999) if name == "a" else (0, 0)
        )


def test_a_distance_is_worth_the_seconds_of_a_queue():
    for factor, name in ((0.8, "a"), (1.2, "eu")):
        busy = replica("a", prefill_queued_tokens=queued(factor * 0.1))
        assert mesh().choose(asked(1), [busy, peer(rtt_s=0.1)], 0.0).name == name


def test_a_call_about_a_response_waits_for_no_queue():
    busy = replica("a", prefill_queued_tokens=queued(3.0))
    assert mesh().choose(asked(1), [busy], 0.0).target is None
    call = asked(2, model=kept_name("us", "a"))
    assert mesh().choose(call, [busy], 0.0).name == "a"


def test_what_others_pay_counts_and_is_not_promised_to_the_client():
    busy = replica("a", running=10)
    choice = mesh().choose(asked(1, blocks=10), [busy], 0.0)
    prefill_s = 10 * BLOCK * S_PER_TOKEN
    assert choice.scores[0].seconds == pytest.approx(
        BASE_S + prefill_s + 10 * STALL_WEIGHT * prefill_s
    )
    assert choice.reason.startswith(f"first token in {BASE_S + prefill_s:.3f} s")


def test_what_a_held_request_waits_for_is_told():
    fleet = [
        replica("a", prefill_queued_tokens=queued(2.001 * QUEUE_S)),
        replica("b", prefill_queued_tokens=queued(2.0 * QUEUE_S)),
    ]
    waited = set()
    for seed in range(20):  # they are as good
        choice = mesh(seed).choose(asked(1), fleet, 0.0)
        assert choice.target is None
        assert choice.reason.startswith(f"cheapest is {choice.waits_for.name}, ")
        waited.add(choice.waits_for.name)
    assert waited == {"a", "b"}


def test_it_holds_for_the_best_while_that_one_is_not_open():
    policy, text = mesh(), "A" * 200  # two seconds of prefill saved
    policy.placed(asked(1, text), spot("a"), 0.0)
    for factor, name in ((0.9, "a"), (1.1, None)):
        holder = replica("a", prefill_queued_tokens=queued(factor * QUEUE_S))
        choice = policy.choose(asked(2, text), [holder, replica("b")], 0.0)
        assert choice.name == name
    assert choice.reason.startswith("cheapest is a, but: ")
    assert choice.reason.endswith(f" s of prefill queue there, over {QUEUE_S:g} s")
    assert [score.target.name for score in choice.scores] == ["a", "b"]


def test_a_slot_in_the_batch_is_worth_more_than_a_short_queue():
    """Requests that wait in an engine for a slot can't go where one is free."""
    full = replica("full", running=4, outstanding=4, batch_max=4, kv_capacity_tokens=None)
    policy, free = mesh(), replica("free", running=3, outstanding=3, batch_max=4)
    assert place(policy, asked(1), full, free).target is free
    assert mesh().choose(asked(1), [full], 0.0).target is None
    unknown = replica("full", running=4, outstanding=4, kv_capacity_tokens=None)
    assert place(mesh(), asked(1), unknown).target is unknown


def test_what_is_on_its_way_takes_slots_too():
    almost = replica("almost", running=2, outstanding=2, batch_max=4)
    policy = mesh()
    for key in range(2):
        assert place(policy, asked(key), almost).target is almost
        almost.replica.on_the_way.add(key, 10, 10, 0.0)
        almost = almost._replace(load=almost.replica.load)
    assert policy.choose(asked(3), [almost], 0.0).target is None


def test_it_holds_where_memory_is_full_and_no_other_replica_is_there():
    full = replica("a", kv_used_ratio=0.99, running=1)
    assert mesh().choose(asked(1, blocks=20), [full], 0.0).target is None
    assert mesh().choose(asked(1, blocks=20), [full, replica("b")], 0.0).name == "b"


def test_it_holds_no_longer_than_what_it_waits_for_takes():
    policy = mesh()
    busy = replica("a", prefill_queued_tokens=queued(2 * QUEUE_S))
    for waited_s, name in ((1.9 * QUEUE_S, None), (2.1 * QUEUE_S, "a")):
        choice = policy.choose(asked(1, arrived_at=-waited_s), [busy], 0.0)
        assert choice.name == name
        assert ("longer than expected" in choice.reason) == (name is not None)


def test_near_ties_are_broken_at_random_and_no_others():
    policy = mesh()
    near = max(TIE_S, TIE_RATIO * BASE_S)
    targets = [
        replica(name, rtt_s) for name, rtt_s in (("a", 0.0), ("b", near * 0.9), ("c", near * 1.5))
    ]
    names = Counter(policy.choose(asked(1), targets, 0.0).name for _ in range(60))
    assert set(names) == {"a", "b"}


def test_the_same_dice_choose_the_same():
    targets = [replica(name) for name in "abc"]
    runs = [
        [policy.choose(asked(key), targets, 0.0).name for key in range(20)]
        for policy in (mesh(7), mesh(7))
    ]
    assert runs[0] == runs[1]


def test_the_receipt_has_the_cheapest_whichever_was_chosen():
    targets = [replica(f"r{number}", 0.01 * (number % 7)) for number in range(40)]
    scores = mesh().choose(asked(1), targets, 0.0).scores
    assert len(scores) == SCORES_MAX
    seconds = [score.seconds for score in scores]
    assert seconds == sorted(seconds)
    assert max(seconds) == pytest.approx(BASE_S + BLOCK * S_PER_TOKEN + 0.01)


def test_a_replica_and_a_region_of_one_name_are_distinguished():
    """A region may be called like a replica, at the very same price."""
    here, there = replica("eu", 0.1), peer("eu", 0.1)
    policy = mesh()
    kinds = {policy.choose(asked(1), [here, there], 0.0).target.kind for _ in range(40)}
    assert kinds == set(CandidateKind)


def taught(policy, name="a"):
    """What a first token is expected to take there, base and all."""
    return policy.choose(asked(99, "ZZZZ"), [replica(name)], 0.0).scores[0].seconds


def test_it_learns_from_first_tokens_of_what_it_chose():
    policy = mesh()
    before = taught(policy)
    for key in range(30):
        place(policy, asked(key, "ZZZZ"), replica("a"), now=0.0)
        policy.began(asked(key, "ZZZZ"), spot("a"), 3.0)
        policy.left(asked(key, "ZZZZ"), spot("a"), 3.0)
        policy.forget(spot("b"))
    assert taught(policy) > 10 * before


def test_the_distance_is_no_lesson():
    policy = mesh()
    for key in range(30):
        one = asked(key, "ABCD")
        place(policy, one, peer(rtt_s=0.4), now=0.0)
        policy.began(one, EU, 0.4 + BASE_S + 400 * S_PER_TOKEN)
        policy.left(one, EU, 1.0)
        policy.forget(EU)  # what it holds would shorten the next
    choice = policy.choose(asked(99, "ZZZZ"), [peer(rtt_s=0.4)], 0.0)
    assert choice.scores[0].seconds == pytest.approx(0.4 + BASE_S + 400 * S_PER_TOKEN, rel=0.01)


def test_a_second_first_token_is_none():
    policy = mesh()
    one = asked(1, "ZZZZ")
    place(policy, one, replica("a"))
    policy.began(one, spot("a"), 0.1)
    once = taught(policy)
    policy.began(one, spot("a"), 50.0)
    assert taught(policy) == once


@pytest.mark.parametrize("follower", [asked(2, "ZZZZ"), foreign(2)])
def test_a_choice_that_was_not_followed_is_not_the_next_ones(follower):
    policy = mesh()
    before = taught(policy)
    policy.choose(asked(1, "ZZZZ"), [replica("a")], 0.0)
    policy.placed(follower, spot("a"), 0.0)  # another policy's choice
    policy.began(follower, spot("a"), 40.0)
    policy.forget(spot("a"))
    assert taught(policy) == before


def test_a_foreign_choice_is_not_taken_for_the_next_clients():
    policy = mesh()
    before = taught(policy)
    policy.choose(foreign(1), [replica("a")], 0.0)  # and refused
    policy.placed(asked(2, "ZZZZ"), spot("a"), 0.0)
    policy.began(asked(2, "ZZZZ"), spot("a"), 40.0)
    policy.forget(spot("a"))
    assert taught(policy) == before


def test_a_peers_request_leaves_its_prompt_and_nothing_to_follow():
    policy = mesh()
    one = foreign(1, prompt=Prompt(400, prompt("ABCD").hashes, float(BLOCK)))
    place(policy, one, replica("a"))
    assert policy.hit_ratio(asked(2, "ABCD")) == 1.0
    assert not policy._expected and not policy._estimates


def test_models_in_one_router_learn_apart():
    policy, other = mesh(), ModelId("other")
    before = taught(policy)
    for key in range(30):
        one = asked(key, "A" * 30, model=other)
        place(policy, one, replica("a", models=(other,)))
        policy.began(one, spot("a"), 9.0)
        policy.left(one, spot("a"), 9.0)
    assert taught(policy, "b") == before


def test_a_refused_prompt_is_not_there():
    policy = mesh()
    one = asked(1, "ABCD")
    place(policy, one, replica("a"))
    policy.left(one, spot("a"), 0.1)
    assert policy.hit_ratio(one) == 0.0


def test_a_prompt_whose_answer_was_cut_off_is_there():
    policy = mesh()
    one = asked(1, "ABCD")
    place(policy, one, replica("a"))
    policy.began(one, spot("a"), 0.1)
    policy.left(one, spot("a"), 0.2)
    assert policy.hit_ratio(one) == 1.0


def test_an_owner_is_estimated_to_hold_no_more_than_its_memory():
    policy = mesh()
    for key, text in enumerate("ABCDEF"):
        place(policy, asked(key, text), replica("a", kv_capacity_tokens=4 * BLOCK))
    assert [policy.hit_ratio(asked(9, text)) for text in "ABCDEF"] == [0, 0, 1, 1, 1, 1]


def test_an_answer_is_held_with_its_prompt():
    policy = mesh()
    one = asked(1, "AB")
    place(policy, one, replica("a"))
    policy.began(one, spot("a"), 0.1)
    policy.served(one, spot("a"), Served(output_tokens=150), 1.0)
    policy.left(one, spot("a"), 1.0)
    choice = policy.choose(asked(2, "ABCDE"), [replica("a")], 2.0)
    assert (choice.matched_blocks, choice.held_tokens) == (2, 350)


def test_generating_routes_of_a_model_share_what_is_learned_and_embeddings_do_not():
    policy = mesh()
    chat, message, vector = (
        asked(key, model=served_name(MODEL, path), answer_tokens=0 if path == EMBEDDINGS else None)
        for key, path in enumerate((CHAT, MESSAGES, EMBEDDINGS))
    )
    assert policy._speeds(chat) is policy._speeds(message)
    assert policy._speeds(chat).output_tokens > 0.0
    assert policy._speeds(vector) is not policy._speeds(chat)
    assert policy._speeds(vector).output_tokens == 0.0


def test_what_is_followed_is_limited(monkeypatch):
    monkeypatch.setattr(module, "EXPECTED_MAX", 3)
    policy = mesh()
    for key in range(10):
        place(policy, asked(key), replica("a"))
    assert list(policy._expected) == list(policy._estimates) == [7, 8, 9]
    for key in range(10):
        policy.left(asked(key), spot("a"), 1.0)
    assert not policy._expected and not policy._estimates


def plain_price(target, tokens):
    """A fresh policy's price of one replica, as the module's text says it."""
    beat, sent = target.replica.heartbeat, target.replica.on_the_way
    free = beat.kv_capacity_tokens * (1.0 - beat.kv_used_ratio)
    free -= beat.prefill_queued_tokens + sent.tokens
    lacking = max(0.0, tokens + OUTPUT_TOKENS_START - free)
    whole_tokens = PREFILL_TOKENS_START + OUTPUT_TOKENS_START
    lacking *= target.replica.load > 0
    memory_s = lacking * RESIDENCE_START_S / (max(1, beat.running) * whole_tokens)
    if beat.batch_max is not None:
        over = max(0, target.replica.load + 1 - beat.batch_max)
        memory_s = max(memory_s, over * SLOT_START_S)
    queue_s = (beat.prefill_queued_tokens + sent.prefill_tokens) * S_PER_TOKEN
    prefill_s = tokens * S_PER_TOKEN
    others_s = beat.running * STALL_WEIGHT * prefill_s
    return target.rtt_s + queue_s + prefill_s + BASE_S + memory_s + others_s, queue_s, memory_s


REPLICAS = st.lists(
    st.tuples(
        st.integers(0, 20_000),  # queued tokens
        st.integers(0, 60),  # running
        st.floats(0, 1),  # memory in use
        st.floats(0, 0.3),  # round trip
        st.lists(st.integers(1, 30_000), max_size=3),  # hand-offs
        st.none() | st.integers(1, 60),  # size of the batch
    ),
    min_size=1,
    max_size=30,
)


@given(REPLICAS, st.integers(1, 50_000))
def test_it_decides_by_the_plain_arithmetic(fleet, tokens):
    targets = []
    for number, (waiting, running, used, rtt_s, handoffs, batch_max) in enumerate(fleet):
        said = {"prefill_queued_tokens": waiting, "running": running, "kv_used_ratio": used}
        target = replica(f"r{number}", rtt_s, batch_max=batch_max, **said)
        for handoff, sent in enumerate(handoffs):
            target.replica.on_the_way.add(handoff, sent, sent, 0.0)
        targets.append(target._replace(load=target.replica.load))
    choice = mesh().choose(request(1, prompt=Prompt(tokens, ())), targets, 0.0)
    plain = {target.name: plain_price(target, tokens) for target in targets}
    cheapest = sorted(seconds for seconds, _, _ in plain.values())[:SCORES_MAX]
    assert [score.seconds for score in choice.scores] == pytest.approx(cheapest)
    good_s = cheapest[0] + max(TIE_S, TIE_RATIO * cheapest[0]) + 1e-9
    good = {name: price for name, price in plain.items() if price[0] <= good_s}
    is_open = {n: wait <= QUEUE_S and memory <= 0 for n, (_, wait, memory) in good.items()}
    if choice.name is None:
        assert not all(is_open.values())
    else:
        assert is_open[choice.name]


def test_the_pick_has_its_price_in_the_receipt_however_many_are_as_good():
    speed = {"prefill_s_per_token": S_PER_TOKEN, "prefill_base_s": BASE_S}
    equals = [replica(f"r{number}", **speed) for number in range(5 * SCORES_MAX)]
    for seed in range(20):
        choice = mesh(seed).choose(asked(1), equals, 0.0)
        assert choice.target in [score.target for score in choice.scores]
        assert len(choice.scores) == SCORES_MAX
        assert choice.first_token.seconds == pytest.approx(BASE_S + BLOCK * S_PER_TOKEN)


def test_it_names_the_deepest_holders_first_and_any_of_equals():
    policy = mesh()
    for number in range(50):
        policy.placed(asked(number, "AAAA"), spot(f"all-{number}"), 0.0)
    for name in ("deep-1", "deep-2"):
        policy.placed(asked(99, "AAAABBBB"), spot(name), 0.0)
    named = policy.holders(asked(100, "AAAABBBBCC"), 16)
    assert set(named[:2]) == {"deep-1", "deep-2"} and len(set(named)) == 16
    assert len({tuple(policy.holders(asked(100, "AAAA"), 16)) for _ in range(5)}) == 5
    assert policy.holders(asked(101, "Z"), 16) == []
