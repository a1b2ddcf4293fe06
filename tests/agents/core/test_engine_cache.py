"""An engine's events through gaps, replays and restarts."""

import random

import msgpack
import pytest

from agents.core.engine_cache import REPLAYS_MAX, EngineCache
from agents.core.held_blocks import NOT_HELD, EnginePrompt, HeldBlocks

BLOCK = 4


def batch(*events):
    return msgpack.packb([0.0, list(events), 0])


class Engine:
    """Publishes batches and keeps the last of them; its blocks are single prompts of one block."""

    def __init__(self, kept):
        self.batches, self.kept = [], kept
        self.blocks = set()

    def publish(self, *events):
        self.batches.append(batch(*events))
        return len(self.batches) - 1, self.batches[-1]

    def store(self, block):
        self.blocks.add(block)
        return self.publish(["BlockStored", [block], None, [block] * BLOCK, BLOCK])

    def remove(self, block):
        self.blocks.discard(block)
        return self.publish(["BlockRemoved", [block]])

    def replay(self, start):
        first = max(start, len(self.batches) - self.kept)
        return [(seq, self.batches[seq]) for seq in range(first, len(self.batches))]


class DroppingEngine(Engine):
    """Of a replay, some batches get lost on their way; the first never does."""

    def __init__(self, kept, dice):
        super().__init__(kept)
        self.dice = dice

    def replay(self, start):
        whole = super().replay(start)
        return whole[:1] + [one for one in whole[1:] if self.dice.random() < 0.8]


def replayed(cache, engine, start, *, answers=True):
    """All that the engine repeats, however often the agent asks."""
    while start is not None:
        for seq, payload in engine.replay(start) if answers else ():
            if not cache.repeated(seq, payload):
                break
        start = cache.replay_ended(was_answered=answers)


def followed(cache):
    """The blocks that the agent would report for prompts of one block each."""
    for block in range(20):
        cache.held.attach([block], 1, EnginePrompt([block] * BLOCK))
    return {block for block, _ in cache.held.held()}


def receive(cache, engine, seq, payload, *, answers=True):
    start = cache.live(seq, payload)
    if start is not None:
        replayed(cache, engine, start, answers=answers)


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("kept", [3, 1000])
@pytest.mark.parametrize("drops", [False, True])
def test_the_held_set_is_the_engines_or_part_of_it_after_any_loss(seed, kept, drops):
    dice = random.Random(seed)

    def started():
        return DroppingEngine(kept, dice) if drops else Engine(kept)

    cache, engine = EngineCache(HeldBlocks()), started()
    replayed(cache, engine, cache.connected())
    for _ in range(200):
        chance = dice.random()
        if chance < 0.02:
            engine = started()  # again, and the connection with it
            replayed(cache, engine, cache.connected())
        event = engine.store if dice.random() < 0.6 else engine.remove
        message = event(dice.randrange(20))
        if dice.random() < 0.7:
            receive(cache, engine, *message)
    receive(cache, engine, *engine.store(0))
    if kept == 1000:
        assert followed(cache) == engine.blocks
        assert cache.holes == 0
    else:
        assert followed(cache) <= engine.blocks


def test_nothing_is_known_until_the_replay_has_come_to_now():
    cache, engine = EngineCache(HeldBlocks()), Engine(1000)
    for block in range(4):
        engine.store(block)
    first, second, third, fourth = engine.replay(cache.connected())
    assert cache.repeated(*first) and not cache.is_known
    assert not cache.repeated(*third)  # the second was dropped
    assert cache.replay_ended(was_answered=True) == 1
    assert cache.repeated(*second) and cache.repeated(*third) and not cache.is_known
    assert cache.replay_ended(was_answered=False) == 3  # the engine stopped half way
    assert cache.repeated(*fourth)
    assert cache.replay_ended(was_answered=True) is None and cache.is_known
    assert followed(cache) == engine.blocks and cache.holes == 0


def test_a_replay_that_stopped_half_way_is_known_to_be_behind_until_a_live_batch():
    cache, engine = EngineCache(HeldBlocks()), Engine(1000)
    for block in range(4):
        engine.store(block)
    first, second, *_ = engine.replay(cache.connected())
    assert cache.repeated(*first) and cache.repeated(*second)
    assert cache.replay_ended(was_answered=False) == 2
    assert cache.replay_ended(was_answered=False) is None  # nothing more comes, not asked again
    assert cache.held.is_whole and not cache.is_known
    receive(cache, engine, *engine.store(5))
    assert cache.is_known and followed(cache) == engine.blocks


def test_a_gap_between_live_batches_keeps_what_is_known():
    cache, engine = EngineCache(HeldBlocks()), Engine(1000)
    receive(cache, engine, *engine.store(1))
    engine.store(2)
    message = engine.store(3)
    start = cache.live(*message)
    assert start == 1 and cache.is_known
    replayed(cache, engine, start)
    assert cache.is_known and followed(cache) == engine.blocks


def test_a_gap_is_asked_for_a_limited_number_of_times():
    cache, asked = EngineCache(HeldBlocks()), 0
    start = cache.connected()
    while start is not None:  # each replay brings one batch, and not its end
        asked += 1
        assert cache.repeated(start, batch())
        start = cache.replay_ended(was_answered=False)
    assert asked == REPLAYS_MAX


def test_a_gap_without_an_answer_forgets_and_goes_on():
    cache, engine = EngineCache(HeldBlocks()), Engine(1000)
    receive(cache, engine, *engine.store(1))
    engine.remove(1)
    receive(cache, engine, *engine.store(2), answers=False)
    assert followed(cache) == {2} and cache.holes == 1
    assert not cache.held.cleared and not cache.held.is_whole  # routers' estimate goes on
    assert NOT_HELD not in cache.held.changes.values()  # the engine may hold what was missed
    receive(cache, engine, *engine.store(3))
    assert followed(cache) == {2, 3}


@pytest.mark.parametrize("kept", [1, 1000])
def test_an_agent_that_starts_beside_an_engine_knows_all_or_says_nothing(kept):
    cache, engine = EngineCache(HeldBlocks()), Engine(1000)
    for block in range(3):
        engine.store(block)
    engine.remove(1)
    engine.kept = kept
    assert not cache.held.is_whole
    replayed(cache, engine, cache.connected())
    cache.held.changes.clear()
    assert followed(cache) == ({0, 2} if kept > 1 else set())
    assert cache.held.is_whole == (kept > 1)
    lost = {text for text, tier in cache.held.changes.items() if tier == NOT_HELD}
    assert lost == ({1, *range(3, 20)} if kept > 1 else set())


def test_an_engine_that_has_published_nothing_holds_nothing():
    cache = EngineCache(HeldBlocks())
    assert cache.connected() == 0
    cache.replay_ended(was_answered=False)
    assert not cache.held.is_whole
    assert cache.connected() == 0
    cache.replay_ended(was_answered=True)
    assert cache.held.is_whole


def test_a_restart_is_known_by_its_numbers_and_clears_all():
    cache, engine = EngineCache(HeldBlocks()), Engine(1000)
    for block in range(5):
        receive(cache, engine, *engine.store(block))
    followed(cache)
    engine = Engine(1000)
    receive(cache, engine, *engine.store(9))
    assert cache.held.cleared and followed(cache) == {9}


def test_a_lost_connection_loses_all_once_and_a_replay_brings_it_back():
    cache, engine = EngineCache(HeldBlocks()), Engine(1000)
    replayed(cache, engine, cache.connected())
    for block in range(3):
        receive(cache, engine, *engine.store(block))
    assert followed(cache) == {0, 1, 2} and cache.is_known
    cache.held.changes.clear()
    cache.disconnected()
    assert cache.held.cleared and not cache.is_known
    assert followed(cache) == set() and cache.held.changes == {}  # unknown, not lost
    cache.held.cleared = False
    cache.disconnected()
    assert not cache.held.cleared
    replayed(cache, engine, cache.connected())
    assert followed(cache) == {0, 1, 2} and cache.is_known


def test_without_a_replay_what_is_held_stays_unknown_after_a_lost_connection():
    cache, engine = EngineCache(HeldBlocks()), Engine(1000)
    replayed(cache, engine, cache.connected())
    receive(cache, engine, *engine.store(1))
    cache.disconnected()
    replayed(cache, engine, cache.connected(), answers=False)
    receive(cache, engine, *engine.store(2), answers=False)
    assert cache.held.cleared and not cache.is_known
    assert followed(cache) == {2}


def test_an_unreadable_batch_leaves_nothing_believed():
    cache, engine = EngineCache(HeldBlocks()), Engine(1000)
    receive(cache, engine, *engine.store(1))
    receive(cache, engine, *engine.publish(["BlockStored", "?"]))
    assert followed(cache) == set() and not cache.held.is_whole


def test_a_batch_that_was_still_queued_when_the_connection_was_lost_leaves_no_block():
    cache, engine = EngineCache(HeldBlocks()), Engine(1000)
    replayed(cache, engine, cache.connected())
    receive(cache, engine, *engine.store(1))
    queued = engine.store(2)
    cache.disconnected()
    receive(cache, engine, *queued, answers=False)
    assert followed(cache) == {2} and not cache.is_known
    engine = Engine(1000)  # again
    engine.store(3)
    replayed(cache, engine, cache.connected())
    assert cache.is_known and followed(cache) == engine.blocks == {3}
