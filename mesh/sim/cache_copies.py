"""What a router knows of engines' caches by KV events, as vLLM and SGLang publish them.

An engine publishes the blocks that it stored and evicted at the end of a step; the router applies
them when they arrive. So a router's copy is exact, but older than the engine's cache by one step
and the way there. A router that starts copies the whole cache first, as routers of these projects
recover from a gap. No event is lost or needs bytes on a link: rivals get the best case.

Until its events arrive, a prompt that was just sent somewhere is not known to be there. Routers may
assume it for some seconds, so that equal prompts at one moment go to one engine: Dynamo's
`--router-predicted-ttl-secs` (its advice for bursts: 5), llm-d's speculative indexing (2 s).
"""

from collections import Counter, deque
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


class SentPrompts:
    """The blocks of prompts that were sent to each replica within the last `keep_s` seconds."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._sent: deque[tuple[float, str, Sequence[int]]] = deque()
        self._count: dict[str, Counter[int]] = {}  # prompts by block, by replica

    def add(self, name: str, keys: Sequence[int], now: float) -> None:
        """A prompt goes there."""
        self._expire(now)
        if self._keep_s > 0.0:
            self._sent.append((now, name, keys))
            self._count.setdefault(name, Counter()).update(keys)

    def matched(self, name: str, keys: Sequence[int], now: float) -> int:
        """How many leading blocks of `keys` were sent there."""
        self._expire(now)
        count = self._count.get(name)
        if count is None:
            return 0
        return next((place for place, key in enumerate(keys) if key not in count), len(keys))

    def _expire(self, now: float) -> None:
        while self._sent and self._sent[0][0] < now - self._keep_s:
            _, name, keys = self._sent.popleft()
            count = self._count[name]
            for key in keys:
                count[key] -= 1
                if not count[key]:
                    del count[key]


class CacheCopies:
    """The copies of one router's replicas, made when first read."""

    def __init__(self, world: "World", assumed_s: float = 0.0) -> None:
        """`assumed_s`: for so long a sent prompt is assumed to be cached."""
        self._world = world
        self._copies: dict[str, CacheCopy] = {}
        self._sent = SentPrompts(assumed_s)

    def sent(self, name: str, keys: Sequence[int], now: float) -> None:
        """A prompt goes to that replica."""
        self._sent.add(name, keys, now)

    def matched(self, target: Target, keys: Sequence[int], now: float) -> int:
        """Leading blocks of `keys` that this replica holds, as far as is known or assumed."""
        engine = self._world.replicas[ReplicaId(target.name)].engine
        copy = self._copies.get(target.name)
        if copy is None or copy.cache is not engine.sim.cache:  # another one after a crash
            copy = CacheCopy(engine.sim.cache, lambda: self._world.queue.now)
            self._copies[target.name] = copy
        known = copy.matched(keys, now - _step_s(engine.profile) - (target.rtt_s or 0.0) / 2)
        return max(known, self._sent.matched(target.name, keys, now))

    def prompt(self, request: Request) -> tuple[int, Sequence[int]]:
        """Its tokens, and the keys of its full blocks of BLOCK_TOKENS tokens."""
        sent = self._world.clients.sent(request)
        tokens = sent.node.prompt_tokens
        return tokens, sent.keys.blocks[: tokens // BLOCK_TOKENS]


def _step_s(profile: Profile) -> float:
    """The shortest step: events leave with its result. Prefill steps are longer."""
    return profile.decode_s(1, 0)
