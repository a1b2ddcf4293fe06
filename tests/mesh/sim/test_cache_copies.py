"""A router's copy of a cache: exact, and as late as its events."""

from hypothesis import given
from hypothesis import strategies as st

from agents.sim.kv_cache import KvCache
from mesh.core.policies.base import Target
from mesh.sim.cache_copies import CacheCopies, CacheCopy, SentPrompts
from mesh.sim.world import World
from tests.mesh.sim.build import EU, PLAIN, US, arrivals, config, node


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def filled(cache, keys):
    """Compute and publish blocks, and let them be evictable."""
    cache.take(len(keys))
    held = cache.publish(keys)
    cache.release(held, len(keys) - len(held))


def test_a_copy_is_as_old_as_it_is_asked_to_be():
    clock, cache = Clock(), KvCache(4)
    filled(cache, [1])
    copy = CacheCopy(cache, clock)  # begins with what is there
    clock.now = 1.0
    filled(cache, [1, 2])
    clock.now = 2.0
    filled(cache, [7, 8, 9])  # evicts 1, without which 2 is not found
    ages = {until: copy.matched([1, 2, 3], until) for until in (0.5, 1.0, 1.9, 2.0)}
    assert ages == {0.5: 1, 1.0: 2, 1.9: 2, 2.0: 0}


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True), max_size=20))
def test_without_delay_it_equals_the_cache(prompts):
    clock, cache = Clock(), KvCache(8)
    copy = CacheCopy(cache, clock)
    for keys in prompts:
        filled(cache, keys)
        for asked in prompts:
            assert copy.matched(asked, clock.now) == cache.matched(asked)


def test_a_far_engine_is_known_later_and_a_new_one_is_empty():
    world = World(arrivals((0.0, US, node(320, 2))), config({US: 1, EU: 1}))
    copies, cache = CacheCopies(world), world.replicas["us-1"].engine.sim.cache
    keys, step_s = [1, 2, 3], PLAIN.decode_s(1, 0)
    near, far = Target("us-1", 0, rtt_s=0.0), Target("us-1", 0, rtt_s=0.2)
    assert copies.matched(near, keys, 0.0) == 0
    filled(cache, keys)  # at 0.0
    assert copies.matched(far, keys, step_s + 0.09) == 0
    assert copies.matched(far, keys, step_s + 0.11) == 3
    world.replicas["us-1"].engine.crash()
    assert copies.matched(near, keys, 9.0) == 0


def test_what_was_sent_counts_for_some_seconds():
    sent = SentPrompts(2.0)
    sent.add("a", [1, 2, 3], 0.0)
    sent.add("a", [1, 2, 4], 1.0)
    found = {now: sent.matched("a", [1, 2, 3, 9], now) for now in (1.0, 2.0, 2.1, 3.1)}
    assert found == {1.0: 3, 2.0: 3, 2.1: 2, 3.1: 0}
    assert sent.matched("b", [1], 3.1) == 0
    never = SentPrompts(0.0)
    never.add("a", [1], 0.0)
    assert never.matched("a", [1], 0.0) == 0


def test_a_cache_lists_its_keys():
    cache = KvCache(4)
    cache.take(2)
    cache.publish([5, 6])
    filled(cache, [7])
    assert cache.keys() == {5, 6, 7}
