"""The KV cache: conservation under any use, hits only after publishing, LRU eviction."""

import random

from hypothesis import given
from hypothesis import strategies as st

from agents.sim.kv_cache import KvCache


def total(cache: KvCache) -> int:
    return cache.free + cache.used + cache.idle


class Holder:
    """A sequence as far as the cache cares."""

    def __init__(self, keys: list[int], held: list[int], blocks: int) -> None:
        self.keys, self.held, self.blocks, self.filled = keys, held, blocks, len(held)

    def publish_next(self, cache: KvCache) -> None:
        if self.filled < min(self.blocks, len(self.keys)):
            if cache.publish(self.keys[self.filled : self.filled + 1]):
                self.held.append(self.keys[self.filled])
            self.filled += 1


def chain(family: int, length: int) -> list[int]:
    return [family * 1000 + depth for depth in range(length)]


@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 24))
def test_blocks_are_conserved_and_never_overcommitted(seed, capacity):
    rng = random.Random(seed)
    cache = KvCache(capacity)
    holders: list[Holder] = []
    for _ in range(120):
        action = rng.choice(("reserve", "publish", "grow", "release"))
        if action == "reserve":
            keys = chain(rng.randrange(3), rng.randrange(1, 10))
            held = cache.reserve(keys, len(keys), spare=rng.randrange(3))
            if held is not None:
                holders.append(Holder(keys, held, len(keys)))
        elif holders and action == "publish":
            rng.choice(holders).publish_next(cache)
        elif holders and action == "grow" and cache.available:
            cache.take(1)
            rng.choice(holders).blocks += 1
        elif holders and action == "release":
            holder = holders.pop(rng.randrange(len(holders)))
            cache.release(holder.held, holder.blocks - len(holder.held))
        assert total(cache) == capacity
        assert min(cache.free, cache.private, cache.idle) >= 0
        assert cache.private == sum(holder.blocks - len(holder.held) for holder in holders)
        assert cache.used - cache.private == len({key for h in holders for key in h.held})
    for holder in holders:
        cache.release(holder.held, holder.blocks - len(holder.held))
    assert cache.used == 0
    assert cache.available == capacity


def held_then_released(cache: KvCache, keys: list[int]) -> None:
    holder = Holder(keys, cache.reserve(keys, len(keys), spare=0) or [], len(keys))
    for _ in keys:
        holder.publish_next(cache)
    cache.release(holder.held, holder.blocks - len(holder.held))


def test_a_prefix_can_be_found_only_after_it_was_published():
    cache = KvCache(10)
    first = Holder([1, 2, 3], cache.reserve([1, 2, 3], 3, spare=0), 3)
    assert cache.matched([1, 2, 3]) == 0
    second = Holder([1, 2, 3], cache.reserve([1, 2, 3], 3, spare=0), 3)
    assert (first.held, second.held, cache.private) == ([], [], 6)
    first.publish_next(cache)
    assert cache.matched([1, 2, 3]) == 1
    second.publish_next(cache)
    assert second.held == [], "the second copy of a block stays private"
    assert cache.used == 6


def test_shared_blocks_are_counted_once_and_outlive_their_first_holder():
    cache = KvCache(10)
    held_then_released(cache, [1, 2, 3])
    assert (cache.used, cache.idle) == (0, 3)
    one = cache.reserve([1, 2, 3], 4, spare=0)
    two = cache.reserve([1, 2, 9], 3, spare=0)
    assert (one, two) == ([1, 2, 3], [1, 2])
    assert cache.used == 5
    cache.release(one, 1)
    assert cache.matched([1, 2, 3]) == 3
    assert (cache.used, cache.idle) == (3, 1)
    cache.release(two, 1)
    assert (cache.used, cache.idle, cache.free) == (0, 3, 7)


def test_eviction_takes_the_least_recently_used_and_the_deepest_first():
    cache = KvCache(6)
    held_then_released(cache, [1, 2, 3])
    held_then_released(cache, [7, 8, 9])
    held_then_released(cache, [1, 2, 3])
    cache.take(2)
    assert cache.matched([7, 8, 9]) == 1
    assert cache.matched([1, 2, 3]) == 3
    cache.take(2)
    assert cache.matched([7, 8, 9]) == 0
    assert cache.matched([1, 2, 3]) == 2


def test_a_refused_reservation_takes_nothing():
    cache = KvCache(6)
    held_then_released(cache, [1, 2, 3])
    assert cache.reserve([1, 2, 3], 6, spare=1) is None
    assert (cache.free, cache.idle, cache.used) == (3, 3, 0)
    assert cache.reserve([1, 2, 3], 6, spare=0) == [1, 2, 3]
    assert cache.available == 0
