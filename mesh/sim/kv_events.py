"""What a router knows of engines' caches by KV events, as vLLM and SGLang publish them.

An engine publishes the blocks that it stored and evicted at the end of a step; the router applies
them when they arrive. So a router's copy is exact, but older than the engine's cache by one step
and the way there. A router that starts copies the whole cache first, as routers of these projects
recover from a gap. No event is lost or needs bytes on a link: rivals get the best case.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agents.sim.kv_cache import BLOCK_TOKENS, KvCache
from agents.sim.profiles import Profile
from mesh.core.model.request import Request
from mesh.core.policies.base import Target
from schemas.ids import ReplicaId

if TYPE_CHECKING:
    from mesh.sim.world import World


class CacheCopy:
    """One engine's cached blocks, as of some time ago. A `CacheWatcher`."""

    def __init__(self, cache: KvCache, clock: Callable[[], float]) -> None:
        self.cache = cache
        self._clock = clock
        self._known = cache.keys()
        # When it happened, the block's key, and whether it was stored; the oldest first.
        self._events: deque[tuple[float, int, bool]] = deque()
        cache.watchers.append(self)

    def stored(self, keys: Sequence[int]) -> None:
        now = self._clock()
        self._events.extend((now, key, True) for key in keys)

    def evicted(self, key: int) -> None:
        self._events.append((self._clock(), key, False))

    def matched(self, keys: Sequence[int], until: float) -> int:
        """How many leading blocks of `keys` were cached at `until`, which never runs backwards."""
        events, known = self._events, self._known
        while events and events[0][0] <= until:
            _, key, is_stored = events.popleft()
            if is_stored:
                known.add(key)
            else:
                known.discard(key)
        for count, key in enumerate(keys):
            if key not in known:
                return count
        return len(keys)


class CacheCopies:
    """The copies of one router's replicas, made when first read."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._copies: dict[str, CacheCopy] = {}

    def matched(self, target: Target, keys: Sequence[int], now: float) -> int:
        """Leading blocks of `keys` that this replica holds, by the events that have arrived."""
        engine = self._world.replicas[ReplicaId(target.name)].engine
        copy = self._copies.get(target.name)
        if copy is None or copy.cache is not engine.sim.cache:  # another one after a crash
            copy = CacheCopy(engine.sim.cache, lambda: self._world.queue.now)
            self._copies[target.name] = copy
        return copy.matched(keys, now - _step_s(engine.profile) - (target.rtt_s or 0.0) / 2)

    def prompt(self, request: Request) -> tuple[int, Sequence[int]]:
        """Its tokens, and the keys of its full blocks of BLOCK_TOKENS tokens."""
        sent = self._world.clients.sent(request)
        tokens = sent.node.prompt_tokens
        return tokens, sent.keys.blocks[: tokens // BLOCK_TOKENS]


def _step_s(profile: Profile) -> float:
    """The shortest step: events leave with its result. Prefill steps are longer."""
    return profile.decode_s(1, 0)
