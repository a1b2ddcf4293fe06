"""Estimates that answers contradict time after time, and those that they confirm."""

from random import Random

import pytest

from agents.sim.kv_cache import KvCache
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Served
from mesh.core.policies import mesh_trust
from mesh.core.policies.mesh_caches import SETTLED_S, CacheView
from mesh.core.policies.mesh_price import HELD_NOTHING
from mesh.core.policies.mesh_trust import ALIKE_TIMES, KINDS_TIMES, CacheTrust
from tests.mesh.core.build import request, spot
from tests.mesh.core.policies.test_mesh_caches import BLOCK, held

TURNS = 20
NONCE_TOKENS = 16  # what is cached of a prompt whose second block is always another


class Conversation:
    """Turns that begin with a shared text of some blocks and go on from each other."""

    def __init__(self, number, shared=4):
        self.number, self.blocks = number, list(range(1, shared + 1))
        self.blocks.append(1000 * (number + 1))

    def turn(self, key):
        self.blocks += [self.blocks[-1] + 1, self.blocks[-1] + 2]
        tokens = BLOCK * len(self.blocks)
        return request(key, prompt=Prompt(tokens, tuple(self.blocks), float(BLOCK)))


def estimated(caches, one, name="a"):
    return held(caches, one, name)[0].blocks


def answer(caches, one, now, cached_tokens, name="a", answer_tokens=20):
    """Place it, let it be computed and answered."""
    estimate = caches.placed(one, spot(name), now)
    caches.fit(name, 10_000)
    said = Served(one.prompt.tokens, cached_tokens, answer_tokens)
    caches.served(one, spot(name), said, estimate._replace(is_computed=True))


@pytest.fixture
def caches():
    return CacheView(10_000)


def wrong(caches, conversation, cached, gap_s=1.0, name="a"):
    """Of its turns, how many were estimated to hold at least twice what was cached."""
    count = 0
    for turn in range(TURNS):
        one = conversation.turn(turn)
        blocks = estimated(caches, one, name)
        count += blocks * BLOCK > 2 * max(cached(one), BLOCK)
        answer(caches, one, conversation.number * 1e4 + turn * gap_s, cached(one), name)
    return count


@pytest.mark.parametrize("gap_s", [1.0, SETTLED_S + 1.0, 300.0])
def test_an_engine_that_keeps_a_changing_line_is_believed_no_more(caches, gap_s):
    """Claude Code's turns where its billing line is kept: 19 of 20 were wrong."""
    assert wrong(caches, Conversation(1), lambda one: NONCE_TOKENS, gap_s) <= ALIKE_TIMES + 1
    assert caches.room_ratio.get("a", 1.0) == 1.0  # none of it was an eviction


def test_another_conversation_that_begins_alike_is_not_believed_from_its_start(caches):
    wrong(caches, Conversation(1), lambda one: NONCE_TOKENS)
    assert wrong(caches, Conversation(2), lambda one: NONCE_TOKENS) == 0


def test_prompts_of_another_kind_and_other_replicas_are_believed(caches):
    wrong(caches, Conversation(1), lambda one: NONCE_TOKENS)
    chat = Conversation(2, shared=0)
    answer(caches, chat.turn(100), 0.0, 0)
    answer(caches, Conversation(1).turn(101), 0.0, 0, "b")
    assert estimated(caches, chat.turn(102)) == 3
    assert estimated(caches, Conversation(1).turn(103), "b") == 7


def test_an_engine_without_a_prefix_cache_is_found_out_over_conversations(caches):
    count = sum(wrong(caches, Conversation(n, shared=0), lambda one: 0) for n in range(12))
    assert count <= ALIKE_TIMES * KINDS_TIMES
    assert wrong(caches, Conversation(50, shared=0), lambda one: 0) == 0


def test_a_hit_ends_the_doubt(caches):
    conversation = Conversation(1)
    wrong(caches, conversation, lambda one: NONCE_TOKENS)
    one = conversation.turn(50)
    assert estimated(caches, one) == 0
    answer(caches, one, 1e5, one.prompt.tokens - 2 * BLOCK)
    assert estimated(caches, conversation.turn(51)) == len(one.prompt.hashes)


def test_two_contradictions_and_a_hit_are_no_pattern(caches):
    conversation = Conversation(1)
    for turn in range(30):
        one = conversation.turn(turn)
        if turn > 1:
            assert estimated(caches, one) > 0
        hit = turn % ALIKE_TIMES == 0
        answer(caches, one, float(turn), one.prompt.tokens - 2 * BLOCK if hit else 0)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (200, Served(200, 0, 1)),  # below a large block
        (5000, Served(16, 0, 1)),  # by its engine it is short
        (5000, Served(5000, None, 1)),
        (5000, Served()),
        (5000, Served(5000, 2500, 1)),  # its end was evicted
    ],
)
def test_what_says_nothing_of_the_engines_way_changes_nothing(caches, tokens, said):
    hashes = tuple(range(1, tokens // BLOCK + 1))
    one = request(1, prompt=Prompt(tokens + 10, hashes, float(BLOCK)))
    for turn in range(30):
        estimate = caches.placed(one, spot("a"), turn * 60.0)
        caches.fit("a", 10_000)
        caches.served(one, spot("a"), said, estimate._replace(is_computed=True))
    assert held(caches, one, "a") != [HELD_NOTHING]


def test_misses_that_others_prompts_explain_are_evictions(caches):
    """A room of 100 blocks, of which 60 were placed between two turns."""
    for turn in range(30):
        caches.fit("a", 100)
        one = Conversation(1).turn(turn)
        estimate = caches.placed(one, spot("a"), turn * 60.0)
        assert turn == 0 or estimate.blocks == 0 or estimated(caches, one) > 0
        caches.served(one, spot("a"), Served(one.prompt.tokens, 0, 1), estimate)
        other = tuple(range(10**6 * (turn + 1), 10**6 * (turn + 1) + 60))
        caches.placed(
            request(turn + 100, prompt=Prompt(6000, other, float(BLOCK))),
            spot("a"),
            turn * 60.0 + 1,
        )
    assert caches._trust.mistrusted == set()


def test_prompts_computed_side_by_side_contradict_nothing(caches):
    for key in range(30):  # none has ended before the next one comes
        one = Conversation(1).turn(key)
        estimate = caches.placed(one, spot("a"), key * 0.1)
        said = Served(one.prompt.tokens, 0, None)
        caches.served(one, spot("a"), said, estimate._replace(is_computed=True))
    assert estimated(caches, Conversation(1).turn(99)) > 0


@pytest.mark.parametrize("room", [150, 400, 2000])
@pytest.mark.parametrize("seed", range(4))
def test_a_plain_engine_is_believed_whatever_it_evicts(seed, room):
    """A cache of that many blocks that evicts by age, beside what is estimated of it."""
    dice, engine, caches = Random(seed), KvCache(room), CacheView(10_000)
    talks = [Conversation(n, shared=dice.choice((0, 4))) for n in range(40)]
    for key in range(500):
        n = min(int(dice.paretovariate(0.8)), len(talks)) - 1
        one = talks[n].turn(key)
        if len(one.prompt.hashes) > 60:
            talks[n] = Conversation(100 + key, shared=dice.choice((0, 4)))
        caches.fit("a", room)
        estimate = caches.placed(one, spot("a"), key * SETTLED_S / 4)
        keys = list(one.prompt.hashes)
        hits = engine.reserve(keys, len(keys), spare=0)
        assert hits is not None
        shared = [*hits, *engine.publish(keys[len(hits) :])]
        engine.release(shared, len(keys) - len(shared))
        said = Served(one.prompt.tokens, len(hits) * BLOCK, 20)
        caches.served(one, spot("a"), said, estimate._replace(is_computed=True))
        assert not caches._trust.mistrusted, f"seed {seed}, request {key}"


def test_the_table_is_bounded_and_the_oldest_kind_goes_first(monkeypatch):
    monkeypatch.setattr(mesh_trust, "KINDS_MAX", 8)
    trust = CacheTrust()
    for number in range(50):
        for _ in range(ALIKE_TIMES):
            trust.contradicted(f"r{number}", number)
    assert len(trust.times) == 8 and len(trust._kinds) == 8
    assert trust.mistrusted == {f"r{number}" for number in range(42, 50)}


def test_a_replica_that_is_gone_leaves_nothing_behind_and_settings_keep_the_rest():
    trust, after = CacheTrust(), CacheTrust()
    for name in "ab":
        for _ in range(ALIKE_TIMES):
            trust.contradicted(name, 1)
    trust.forget("a")
    after.go_on_from(trust)
    assert (after.believes("a", 1), after.believes("b", 1), after.believes("b", 2)) == (
        True, False, True,
    )  # fmt: skip
    after.confirmed("b", 2)
    assert not after.believes("b", 1)
    after.confirmed("b", 1)
    assert not after.times and not after.mistrusted and trust.mistrusted == {"b"}
