"""What the engine holds of prompts: against a plain model of an engine's cache."""

import random
from hashlib import blake2b

import pytest

from agents.core import held_blocks
from agents.core.held_blocks import NOT_HELD, EnginePrompt, HeldBlocks
from agents.core.held_log import BLOCKS_PER_S, BURST_S, WHOLE_S, HeldLog
from agents.core.kv_events import AllCleared, BlocksRemoved, BlocksStored, Tier
from schemas.held import HASHES_MAX, HeldDelta, HeldPart
from schemas.wire import decode, encode

BLOCK = 4  # tokens
A, B = tuple(range(16)), (*range(8), *range(50, 58))


def stored(hashes, tokens, parent=None, tier=Tier.GPU, lora=""):
    return BlocksStored(tuple(hashes), parent, tuple(tokens), BLOCK, tier, lora, is_plain=True)


def removed(*hashes, tier=Tier.GPU):
    return BlocksRemoved(hashes, tier)


def attach(held, texts, tokens, **more):
    held.attach(texts, len(texts), EnginePrompt(tokens, **more))


@pytest.fixture
def held():
    """Two prompts with two blocks in common, of four each; each has eight text blocks."""
    blocks = HeldBlocks()
    blocks.apply([stored([1, 2, 3, 4], A), stored([5, 6], B[8:], parent=2)])
    attach(blocks, [101, 102, 103, 104, 105, 106, 107, 108], A)
    attach(blocks, [101, 102, 103, 104, 205, 206, 207, 208], B)
    blocks.changes.clear()
    return blocks


def texts(held):
    return {text for text, _ in held.held()}


def test_blocks_of_computed_prompts_are_held(held):
    assert texts(held) == {*range(101, 109), *range(205, 209)}


def test_an_evicted_end_is_lost_at_once_and_the_rest_stays(held):
    held.apply([removed(4)])
    assert held.changes == {107: NOT_HELD, 108: NOT_HELD}
    assert texts(held) == {*range(101, 107), *range(205, 209)}


def test_what_follows_an_evicted_block_is_lost_until_that_is_computed_anew(held):
    held.apply([removed(1)])
    assert texts(held) == set()
    held.apply([stored([9], A[:4])])
    assert texts(held) == {*range(101, 109), *range(205, 209)}


def test_a_prompt_that_was_not_kept_is_reported_as_lost(held):
    held.is_whole = True
    attach(held, [301, 302], (7, 7, 7, 7))
    assert held.changes == {301: NOT_HELD, 302: NOT_HELD}


def test_tiers_are_told_apart_and_the_fastest_counts(held):
    held.apply([stored([4], (), tier=Tier.CPU)])
    assert held.changes == {107: Tier.GPU, 108: Tier.GPU}
    held.apply([removed(4)])
    assert held.changes == {107: Tier.CPU, 108: Tier.CPU}
    held.apply([removed(4, tier=Tier.CPU)])
    assert held.changes == {107: NOT_HELD, 108: NOT_HELD}


def test_adapters_and_the_model_share_nothing(held):
    held.apply([stored([11, 12, 13, 14], A, lora="Ann"), removed(1, 2, 3, 4)])
    attach(held, [401, 402], A[:4], model="Ann")
    attach(held, [501, 502], A[:4], model="the model itself")
    assert {401, 402} <= texts(held) and not {501, 502} & texts(held)


def test_all_is_cleared(held):
    held.apply([AllCleared()])
    assert held.cleared and texts(held) == set() and len(held) == held.blocks == 0


def test_blocks_without_a_known_parent_are_counted_and_not_followed(held):
    held.apply([stored([20, 21], range(8), parent=99)])
    assert held.unfollowed == 2


def test_both_limits_hold():
    held = HeldBlocks(nodes_max=3, texts_max=4)
    held.apply([stored([1, 2, 3, 4], A)])
    assert (held.blocks, held.unfollowed) == (3, 1)
    attach(held, [1, 2, 3, 4, 5, 6], A[:12])
    assert len(held) == 4
    assert {text: tier for text, tier in held.changes.items() if tier == NOT_HELD} == {
        1: NOT_HELD, 2: NOT_HELD,
    }  # fmt: skip


@pytest.fixture
def hashed(monkeypatch):
    """How many bytes were hashed, each time."""
    sizes = []

    def counting(data, **more):
        sizes.append(len(data))
        return blake2b(data, **more)

    monkeypatch.setattr(held_blocks, "blake2b", counting)
    return sizes


def test_a_prompts_blocks_are_named_once_however_often_it_is_looked_up(held, hashed):
    unknown = EnginePrompt([7] * 16)
    assert not any(held.has_stored(unknown) for _ in range(100))
    held.attach([301], 1, unknown)
    assert len(hashed) == 4


def test_a_prompts_blocks_are_named_anew_for_another_length_or_adapter(held, hashed):
    prompt = EnginePrompt(A, "Ann")
    assert held.has_stored(prompt)  # as the model's own: no event has shown that adapter
    held.apply([stored([11, 12, 13], A[:12], lora="Ann")])
    hashed.clear()
    assert not held.has_stored(prompt)
    assert len(hashed) == 4
    held.apply([stored([14], A[12:], parent=13, lora="Ann")])
    assert held.has_stored(prompt)
    held.apply([BlocksStored((21, 22), None, A, 8, Tier.GPU, "Ann", is_plain=True)])
    assert held.has_stored(prompt)


class Engine:
    """A cache as engines keep it: blocks by their path, each in some tiers; any may go."""

    def __init__(self, dice):
        self.dice = dice
        self.paths = {}  # hash -> tokens from the root
        self.tiers = {}  # hash -> set of tiers
        self.by_path = {}
        self.runs = 0

    def compute(self, tokens):
        """Store what is missing of this prompt."""
        events, parent = [], None
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            path = tokens[:end]
            known = self.by_path.get(path)
            if known is None:
                self.runs += 1
                known = self.by_path[path] = self.runs
                self.paths[known], self.tiers[known] = path, set()
            if Tier.GPU not in self.tiers[known]:
                self.tiers[known].add(Tier.GPU)
                events.append(stored([known], tokens[end - BLOCK : end], parent))
            parent = known
        return events

    def change(self):
        """Offload or evict some block."""
        known = [block for block, tiers in self.tiers.items() if tiers]
        if not known:
            return []
        block = self.dice.choice(known)
        if self.dice.random() < 0.3:
            self.tiers[block].add(Tier.CPU)
            return [stored([block], (), tier=Tier.CPU)]
        tier = self.dice.choice(sorted(self.tiers[block]))
        self.tiers[block].discard(tier)
        if not self.tiers[block]:
            del self.by_path[self.paths[block]], self.tiers[block], self.paths[block]
        return [removed(block, tier=tier)]

    def holds(self, path):
        ends = range(BLOCK, len(path) + 1, BLOCK)
        return all(path[:end] in self.by_path for end in ends)


@pytest.mark.parametrize("seed", range(20))
def test_the_held_set_is_the_engines_after_any_events(seed):
    dice = random.Random(seed)
    engine, held = Engine(dice), HeldBlocks()
    prompts, published = {}, {}
    for _ in range(300):
        chance = dice.random()
        if chance < 0.01:
            held.apply([AllCleared()])
            engine = Engine(dice)
        elif chance < 0.4:
            tokens = tuple(dice.choices((1, 2), k=BLOCK * dice.randint(1, 4)))
            held.apply(engine.compute(tokens))
            path = [tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)]
            held.attach([hash(one) for one in path], len(path), EnginePrompt(tokens))
            prompts |= {hash(one): one for one in path}
        else:
            held.apply(engine.change())
        if held.cleared:
            published, held.cleared = {}, False
        published |= held.changes
        held.changes.clear()
        expected = {text for text, path in prompts.items() if engine.holds(path)}
        # A block that was evicted is followed again when a prompt with it is placed here.
        assert texts(held) <= expected
        assert {text for text, tier in published.items() if tier != NOT_HELD} == texts(held)
    for path in list(prompts.values()):
        held.apply(engine.compute(path))
        held.attach([hash(path[:end]) for end in range(BLOCK, len(path) + 1, BLOCK)],
                    len(path) // BLOCK, EnginePrompt(path))  # fmt: skip
    assert texts(held) == set(prompts)


def messages(log, now):
    return [decode(encode(message)) for message in log.due(now)]


def test_changes_are_numbered_and_one_that_came_and_went_costs_once(held):
    log = HeldLog(held, epoch=5)
    held.apply([removed(3), stored([3], A[8:12], parent=2), removed(6)])
    [delta] = messages(log, 0.0)
    assert (delta.epoch, delta.seq, sorted(delta.gpu)) == (5, 1, [106, 107, 108])
    assert sorted(delta.lost) == [207, 208]
    assert messages(log, 0.1) == []
    held.apply([AllCleared()])
    assert messages(log, 0.2) == [HeldDelta(5, 2, cleared=1)]


def test_the_whole_set_is_published_when_asked_and_seldom(held):
    log = HeldLog(held, epoch=5)
    log.asked(4)
    assert messages(log, 0.0) == []
    log.asked(5)
    [part] = messages(log, 0.0)
    assert part == HeldPart(5, 0, 0, 1, gpu=tuple(text for text, _ in held.held()))
    log.asked(5)
    assert messages(log, WHOLE_S - 0.1) == []
    assert messages(log, WHOLE_S) == [part]


def test_no_more_is_published_than_the_budget():
    held = HeldBlocks()
    log = HeldLog(held, epoch=1)
    most = int(BLOCKS_PER_S * BURST_S) + HASHES_MAX
    held.changes |= dict.fromkeys(range(2 * most), NOT_HELD)
    assert most - HASHES_MAX <= sum(len(delta.lost) for delta in messages(log, 0.0)) <= most
    assert messages(log, 0.1) == []
    assert messages(log, 10.0)
