"""A replica's KV events in the twin: its engine's cache, the agent's own core, its deltas.

The twin's engines and routers share block keys (`mesh.sim.workload`), so a block's key stands for
its tokens here, and no tokenizer is played: the relation of text to tokens is exact. Events reach
the agent at once, deltas cross the network like heartbeats. A crashed engine comes back empty.
"""

from collections.abc import Callable, Sequence

from agents.core.held_blocks import EnginePrompt, HeldBlocks
from agents.core.held_log import HeldLog
from agents.core.kv_events import BlocksRemoved, BlocksStored, Tier
from agents.sim.kv_cache import BLOCK_TOKENS, KvCache
from mesh.core.model import events as ev
from mesh.sim.event_queue import EventQueue
from mesh.sim.workload import HASH_TOKENS, SentRequest
from schemas.held import HeldAsk, HeldDelta
from schemas.ids import ReplicaId

PUBLISH_S = 0.02  # as live agents do
KEY_TOKENS = 2  # a key is written as two token ids
LOW = 2**32 - 1
EVERY = HASH_TOKENS // BLOCK_TOKENS

Publish = Callable[[ev.HeldDeltaSeen | ev.HeldPartSeen], None]


def key_tokens(keys: Sequence[int]) -> tuple[int, ...]:
    return tuple(part for key in keys for part in (key & LOW, key >> 32))


class ReplicaKvEvents:
    """One replica's, from one start of its agent to the next."""

    def __init__(
        self, name: ReplicaId, epoch: int, cache: KvCache, queue: EventQueue, publish: Publish
    ) -> None:
        self._name, self._queue, self._publish = name, queue, publish
        self._held = HeldBlocks()
        self._log = HeldLog(self._held, epoch)
        self._parents: dict[int, int | None] = {}  # of keys that were submitted
        self._ended = False
        self._cache: KvCache | None = None
        self.follow(cache)
        queue.after(PUBLISH_S, self._publish_due)

    @property
    def seq(self) -> int:
        return self._log.seq

    @property
    def published(self) -> int:
        """Blocks in all deltas."""
        return self._log.published

    def follow(self, cache: KvCache) -> None:
        """The engine has started with this cache, which is empty."""
        self._unfollow()
        self._cache = cache
        cache.watchers.append(self)
        self._held.clear()

    def _unfollow(self) -> None:
        if self._cache is not None:
            self._cache.watchers.remove(self)
            self._cache = None

    def end(self) -> None:
        self._ended = True
        self._unfollow()

    def submitted(self, request: SentRequest) -> None:
        """The engine is given this request."""
        parent = None
        for key in request.keys.blocks:
            self._parents.setdefault(key, parent)
            parent = key

    def answered(self, request: SentRequest) -> None:
        """Its answer is over: relate its prompt to what the engine holds."""
        prompt = request.keys.blocks[: request.node.prompt_tokens // BLOCK_TOKENS]
        texts = request.prompt.hashes
        length = max(len(texts), len(prompt) / EVERY)
        self._held.attach(texts, length, EnginePrompt(key_tokens(prompt)))

    def asked(self, ask: HeldAsk) -> None:
        self._log.asked(ask.epoch)

    def stored(self, keys: Sequence[int]) -> None:
        stored = (
            BlocksStored(
                (key,), self._parents[key], key_tokens((key,)), KEY_TOKENS, Tier.GPU, "", True
            )
            for key in keys
        )
        self._held.apply(stored)

    def evicted(self, key: int) -> None:
        self._held.apply((BlocksRemoved((key,), Tier.GPU),))

    def _publish_due(self) -> None:
        if self._ended:
            return
        for message in self._log.due(self._queue.now):
            if isinstance(message, HeldDelta):
                self._publish(ev.HeldDeltaSeen(self._name, message))
            else:
                self._publish(ev.HeldPartSeen(self._name, message))
        self._queue.after(PUBLISH_S, self._publish_due)
