"""What is estimated to be held, against what was placed, answered, refused and evicted."""

from random import Random

import pytest

from agents.sim.kv_cache import KvCache
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Served
from mesh.core.policies import mesh_caches as module
from mesh.core.policies.base import Destination, Target
from mesh.core.policies.mesh_caches import SCALE_MIN, SETTLED_S, CacheView
from mesh.core.policies.mesh_price import HELD_NOTHING, HeldPrefix
from schemas.decision import CandidateKind
from tests.mesh.core.build import prompt, request, spot

BLOCK = 100  # tokens
OLD = SETTLED_S + 1.0
EU = Destination(CandidateKind.PEER, "eu")


def asked(key, text, more_tokens=0):
    """A block a letter, and a rest that fills none."""
    tokens = BLOCK * len(text) + more_tokens
    return request(key, prompt=Prompt(tokens, prompt(text).hashes, float(BLOCK)))


def held(caches, one, *names):
    here = caches.of(one, [Target(name, 0) for name in names]).replicas
    return [here.get(name, HELD_NOTHING) for name in names]


def serve(caches, one, now, cached_blocks, name="a", **said):
    """Place a prompt, let it be computed, and report what of it was cached."""
    estimate = caches.placed(one, spot(name), now)
    caches.fit(name, said.pop("room", 1000))
    known = {"prompt_tokens": one.prompt.tokens, "cached_tokens": cached_blocks * BLOCK}
    estimate = estimate._replace(is_computed=True)
    caches.served(one, spot(name), Served(**(known | said)), estimate)


@pytest.fixture
def caches():
    return CacheView(1000)


def test_each_one_holds_what_it_was_given_as_far_as_the_prompts_agree(caches):
    caches.placed(asked(1, "ABC"), spot("a"), 0.0)
    caches.placed(asked(2, "AB"), spot("b"), 0.0)
    one = asked(3, "ABCD")
    assert held(caches, one, "a", "b", "c") == [
        HeldPrefix(3, 300),
        HeldPrefix(2, 200),
        HELD_NOTHING,
    ]
    assert caches.hit_ratio(one) == 0.75


def test_the_last_token_is_always_computed(caches):
    caches.placed(asked(1, "AB"), spot("a"), 0.0)
    assert held(caches, asked(2, "AB"), "a") == [HeldPrefix(2, 199)]
    empty = request(3, prompt=Prompt(0, prompt("A").hashes))
    assert held(caches, empty, "a") == [HeldPrefix(1, 0)]


def test_a_region_is_not_the_replica_of_its_name(caches):
    caches.placed(asked(1, "AB"), EU, 0.0)
    here, there = Target("eu", 0), Target("eu", 0, CandidateKind.PEER, peer=object())
    assert caches.of(asked(2, "ABC"), [here, there]) == ({}, {"eu": HeldPrefix(2, 200)}, {})
    assert caches.hit_ratio(asked(2, "ABC")) == 0.0


def test_an_answer_is_held_with_its_prompt_by_its_replica(caches):
    first = asked(1, "AB", 50)
    for name in "ab":
        caches.placed(first, spot(name), 0.0)
    caches.served(first, spot("a"), Served(output_tokens=70))
    assert held(caches, asked(2, "ABC"), "a", "b") == [HeldPrefix(2, 299), HeldPrefix(2, 200)]
    assert held(caches, asked(2, "ABCD"), "a", "b") == [HeldPrefix(2, 320), HeldPrefix(2, 200)]


def test_an_answer_counts_only_where_the_prompt_ended(caches):
    caches.placed(asked(1, "ABC"), spot("a"), 0.0)
    caches.served(asked(1, "ABC"), spot("a"), Served(output_tokens=500))
    assert held(caches, asked(2, "ABX"), "a") == [HeldPrefix(2, 200)]


def test_an_answer_of_unknown_length_is_not_counted(caches):
    caches.placed(asked(1, "AB"), spot("a"), 0.0)
    caches.served(asked(1, "AB"), spot("a"), Served())
    assert held(caches, asked(2, "ABCD"), "a") == [HeldPrefix(2, 200)]


def test_ends_are_limited(caches, monkeypatch):
    monkeypatch.setattr(module, "ENDS_MAX", 2)
    for text in ("A", "B", "C"):
        caches.placed(asked(1, text), spot("a"), 0.0)
        caches.served(asked(1, text), spot("a"), Served(output_tokens=30))
    tokens = [held(caches, asked(2, text + "ZZ"), "a")[0].tokens for text in "ABC"]
    assert tokens == [100, 130, 130]


def test_an_owner_keeps_what_its_memory_holds(caches):
    caches.fit("a", 3)
    for text in ("ABC", "XY"):
        caches.placed(asked(1, text), spot("a"), 0.0)
    assert held(caches, asked(2, "XYZ"), "a") == [HeldPrefix(2, 200)]
    assert held(caches, asked(2, "ABC"), "a") == [HeldPrefix(1, 100)]


def test_who_is_forgotten_holds_nothing(caches):
    caches.placed(asked(1, "AB"), spot("a"), 0.0)
    caches.forget(spot("a"))
    caches.forget(spot("nobody"))
    assert held(caches, asked(2, "AB"), "a") == [HELD_NOTHING]


def test_a_prompt_that_was_never_computed_is_not_there(caches):
    caches.placed(asked(1, "AB"), spot("a"), 0.0)
    second = asked(2, "ABCD")
    estimate = caches.placed(second, spot("a"), 1.0)
    caches.placed(asked(3, "ABC"), spot("a"), 2.0)
    caches.left(second, spot("a"), estimate)
    assert held(caches, second, "a") == [HeldPrefix(3, 300)]


def test_a_prompt_whose_client_left_after_the_first_token_is_there(caches):
    one = asked(1, "AB")
    estimate = caches.placed(one, spot("a"), 0.0)
    caches.left(one, spot("a"), estimate._replace(is_computed=True))
    assert held(caches, asked(2, "ABC"), "a") == [HeldPrefix(2, 200)]


def test_a_miss_takes_out_all_that_is_as_old_and_nothing_younger(caches):
    for second, text in enumerate(("OLD", "ABC", "NEW")):
        caches.placed(asked(1, text), spot("a"), float(second))
        caches.placed(asked(1, text), spot("b"), float(second))
    serve(caches, asked(2, "ABCD"), 1.0 + OLD, cached_blocks=0)
    texts = ("OLD", "ABCD", "NEW")
    assert [held(caches, asked(3, text), "a")[0].blocks for text in texts] == [0, 4, 3]
    assert [held(caches, asked(3, text), "b")[0].blocks for text in texts] == [3, 3, 3]


@pytest.mark.parametrize(
    ("cached_blocks", "age_s", "said"),
    [
        (4, OLD, {}),
        (3, OLD, {}),  # engines round down to whole blocks of theirs
        (0, SETTLED_S / 2, {}),  # side by side with the first of its kind
        (0, OLD, {"cached_tokens": None}),
        (8, OLD, {"prompt_tokens": 1200}),  # the engine's tokens are half as long as we think
    ],
)
def test_what_is_no_miss_takes_nothing_out(caches, cached_blocks, age_s, said):
    caches.placed(asked(1, "OLD"), spot("a"), 0.0)
    caches.placed(asked(1, "ABCD"), spot("a"), 1.0)
    serve(caches, asked(2, "ABCDE", 100), 1.0 + age_s, cached_blocks, **said)
    assert held(caches, asked(3, "OLD"), "a") == [HeldPrefix(3, 299)]
    assert caches.room_ratio.get("a", 1.0) == 1.0


def test_a_miss_at_a_region_is_not_its_replicas_eviction(caches):
    caches.placed(asked(1, "OLD"), EU, 0.0)
    caches.placed(asked(1, "ABC"), EU, 1.0)
    one = asked(2, "ABCD")
    estimate = caches.placed(one, EU, 1.0 + OLD)
    caches.served(one, EU, Served(one.prompt.tokens, 0, 1), estimate)
    there = Target("eu", 0, CandidateKind.PEER, peer=object())
    assert caches.of(asked(3, "OLDER"), [there]).peers == {"eu": HeldPrefix(3, 300)}


def test_room_shrinks_by_misses_and_grows_back_by_hits(caches):
    now, ratios = 0.0, [caches.room_ratio.get("a", 1.0)]
    one = asked(2, "AB", 50)  # too short to contradict anything
    for _ in range(40):
        caches.placed(asked(1, "AB"), spot("a"), now)
        now += OLD
        serve(caches, one, now, cached_blocks=0)
        ratios.append(caches.room_ratio.get("a", 1.0))
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == SCALE_MIN
    for _ in range(400):
        now += OLD
        serve(caches, one, now, cached_blocks=2)
    assert caches.room_ratio.get("a", 1.0) == 1.0
    assert held(caches, asked(3, "ABC"), "a")[0].blocks == 2


def test_room_that_shrank_is_forgotten_with_its_owner(caches):
    caches.placed(asked(1, "AB"), spot("a"), 0.0)
    serve(caches, asked(2, "ABC"), OLD, cached_blocks=0)
    assert caches.room_ratio.get("a", 1.0) < 1.0
    caches.forget(spot("a"))
    assert caches.room_ratio.get("a", 1.0) == 1.0


class Engine:
    """A real prefix cache that serves one prompt after the other, answers and all."""

    def __init__(self, blocks):
        self.cache = KvCache(blocks)
        self._next = -1

    def serve(self, hashes, answer_blocks):
        """Blocks that were cached."""
        answer = [self._next - number for number in range(answer_blocks)]
        self._next -= answer_blocks
        keys = [*hashes, *answer]
        hits = self.cache.reserve(keys, len(keys), spare=0)
        assert hits is not None
        shared = [*hits, *self.cache.publish(keys[len(hits) :])]
        self.cache.release(shared, len(keys) - len(shared))
        return len(hits)


def beliefs(seed, room, *, reported):
    """Blocks estimated to be held that were, and that were not, once all is warm."""
    dice, engine, caches = Random(seed), Engine(400), CacheView(10_000)
    true = false = 0
    for turn in range(3000):
        now = turn * SETTLED_S / 4
        document = min(int(dice.paretovariate(0.6)), 200)
        hashes = tuple(document * 1000 + block for block in range(8))
        one = request(turn, prompt=Prompt(8 * BLOCK, hashes, float(BLOCK)))
        caches.fit("a", room)
        estimate = caches.placed(one, spot("a"), now)
        cached = engine.serve(hashes, answer_blocks=8)
        if turn > 500:
            true += min(estimate.blocks, cached)
            false += max(0, estimate.blocks - cached)
        said = Served(one.prompt.tokens, cached * BLOCK if reported else None, 8 * BLOCK)
        caches.served(one, spot("a"), said, estimate)
    return true, false


@pytest.mark.parametrize("room", [400, 200])
@pytest.mark.parametrize("seed", range(3))
def test_beliefs_follow_a_real_cache(seed, room):
    """Answers take their part of the memory, so an index as large believes in too much.

    What engines report takes most of that away, and hardly anything that is true.
    """
    true_unseen, false_unseen = beliefs(seed, room, reported=False)
    true, false = beliefs(seed, room, reported=True)
    assert false_unseen > 0.1 * true_unseen
    assert false < 0.7 * false_unseen
    assert true > 0.99 * true_unseen


def test_what_a_reporting_replica_will_evict_for_others_is_not_counted_on(caches):
    index = caches.indexes[CandidateKind.REPLICA]
    index.reports("a", reporting=True)
    for key, text in enumerate(("ABCD", "XYZ"), 1):
        one = asked(key, text)
        caches.placed(one, spot("a"), float(key))
        index.report("a", one.prompt.hashes, 0, float(key))
    index.evicted("a", asked(3, "XYZ").prompt.hashes)
    again = asked(4, "ABCDE")
    assert held(caches, again, "a") == [HeldPrefix(4, 400)]
    caches.placed(asked(5, "KL"), spot("a"), 5.0)
    assert held(caches, again, "a") == [HeldPrefix(2, 200)]
    caches.placed(asked(6, "MNOPQ"), spot("a"), 6.0)
    assert held(caches, again, "a") == [HELD_NOTHING]


class Announced:
    """How much of each prompt region eu announces, and that no replica is named."""

    def __init__(self, blocks=0):
        self.blocks = blocks

    def depths(self, hashes, owners):
        return {"eu": min(self.blocks, len(hashes))} if self.blocks else {}

    def holders(self, hashes, owners):
        return {owner: {"": depth} for owner, depth in self.depths(hashes, owners).items()}


def answered_by_peer(caches, announced_blocks, output_tokens=None):
    """A prompt of three blocks is forwarded, and so much of it announced when it is answered."""
    announced = Announced(announced_blocks)
    caches.indexes[CandidateKind.PEER].announced = announced
    one = asked(1, "ABC")
    estimate = caches.placed(one, EU, 0.0)
    caches.served(one, EU, Served(output_tokens=output_tokens), estimate)
    return announced


def held_by_peer(caches, one):
    return caches.of(one, [Target("eu", 0, CandidateKind.PEER, peer=object())]).peers.get("eu")


def test_what_a_peer_announced_is_held_there_until_it_says_otherwise(caches):
    announced = answered_by_peer(caches, 3)
    assert held_by_peer(caches, asked(2, "ABCD")) == HeldPrefix(3, 300)
    announced.blocks = 1
    assert held_by_peer(caches, asked(2, "ABCD")) == HeldPrefix(1, 100)


def test_what_a_later_prompt_to_the_peer_shares_still_counts(caches):
    announced = caches.indexes[CandidateKind.PEER].announced = Announced(3)
    one = asked(1, "ABC")
    estimate = caches.placed(one, EU, 0.0)
    caches.placed(asked(2, "ABX"), EU, 1.0)
    caches.served(one, EU, Served(output_tokens=None), estimate)
    announced.blocks = 0
    assert held_by_peer(caches, asked(3, "ABXY")) == HeldPrefix(3, 300)
    assert held_by_peer(caches, asked(3, "ABCD")) == HeldPrefix(2, 200)


@pytest.mark.parametrize("blocks", [0, 2], ids=["nothing", "a part"])
def test_what_a_peer_did_not_announce_by_then_still_counts(caches, blocks):
    announced = answered_by_peer(caches, blocks)
    announced.blocks = 0
    assert held_by_peer(caches, asked(2, "ABCD")) == HeldPrefix(3, 300)


def test_what_is_on_its_way_to_a_peer_counts_before_it_is_announced(caches):
    caches.indexes[CandidateKind.PEER].announced = Announced()
    caches.placed(asked(1, "ABC"), EU, 0.0)
    assert held_by_peer(caches, asked(2, "ABCD")) == HeldPrefix(3, 300)


def test_the_answer_after_an_announced_prompt_is_held_too(caches):
    answered_by_peer(caches, 3, output_tokens=50)
    assert held_by_peer(caches, asked(2, "ABC", more_tokens=90)) == HeldPrefix(3, 350)
