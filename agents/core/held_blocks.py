"""Which blocks of routers' prompts the engine holds, by its KV events.

The engine's blocks are a tree of tokens: a block is named here by its tokens and those of all
blocks before it, whatever hash the engine gave it. A prompt's tokens thus name its path, and each
of its text blocks is attached to the engine block that its end falls into: end ÷ length of
the text × tokens of the prompt, rounded to whole engine blocks, never beyond the last full one. The
share of the text is what routers' own estimates are made of, so both err alike.

A text block is held while its engine block and all before it are in some tier; its tier is that of
its own engine block. What the engine has evicted is forgotten here too, unless a later block of the
same path is left. Everything is bounded: more engine blocks than NODES_MAX are not followed, and of
more than TEXTS_MAX text blocks the oldest are reported as lost.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from agents.core.kv_events import AllCleared, BlocksRemoved, BlocksStored, EngineHash, KvEvent, Tier

NODES_MAX = 500_000  # 8 million tokens in blocks of 16
TEXTS_MAX = 131_072  # blocks of 256 bytes: about as many tokens
NAME_BYTES = 8
NOT_HELD = -1
# The tier of a set of tiers, as bits: the fastest.
_FASTEST = (NOT_HELD, *(min(t for t in Tier if bits >> t & 1) for bits in range(1, 1 << len(Tier))))


@dataclass(slots=True)
class _Block:
    """One block of the engine's. `copies`: by the engine's own hash, the tiers that it is in."""

    parent: int
    copies: dict[EngineHash, int] = field(default_factory=dict)
    children: set[int] = field(default_factory=set)
    texts: dict[int, None] = field(default_factory=dict)
    reachable: bool = False  # all blocks before it are in some tier

    @property
    def tiers(self) -> int:
        bits = 0
        for copy in self.copies.values():
            bits |= copy
        return bits

    @property
    def tier(self) -> int:
        return _FASTEST[self.tiers] if self.reachable else NOT_HELD


def _root(lora: str) -> int:
    return int.from_bytes(blake2b(lora.encode(), digest_size=NAME_BYTES, person=b"root").digest())


def _name(parent: int, tokens: Sequence[int]) -> int:
    data = parent.to_bytes(NAME_BYTES) + array("I", tokens).tobytes()
    return int.from_bytes(blake2b(data, digest_size=NAME_BYTES).digest())


class EnginePrompt:
    """A prompt's tokens, and the names of its full blocks."""

    __slots__ = ("_named_for", "_names", "model", "tokens")

    def __init__(self, tokens: Sequence[int], model: str = "") -> None:
        """`model`: as it was requested, which may be the name of an adapter."""
        self.tokens, self.model = array("I", tokens), model
        self._named_for = 0, 0
        self._names: list[int] = []

    def names(self, block_tokens: int, root: int) -> list[int]:
        """Of its full blocks. They are computed once, and again when an argument has changed."""
        if self._named_for != (block_tokens, root):
            self._named_for, self._names = (block_tokens, root), []
            for end in range(block_tokens, len(self.tokens) + 1, block_tokens):
                root = _name(root, self.tokens[end - block_tokens : end])
                self._names.append(root)
        return self._names


class HeldBlocks:
    """The engine's blocks, and the text blocks attached to them. Read `changes` after each call."""

    def __init__(self, nodes_max: int = NODES_MAX, texts_max: int = TEXTS_MAX) -> None:
        self._nodes_max, self._texts_max = nodes_max, texts_max
        self._blocks: dict[int, _Block] = {}
        self._named: dict[EngineHash, int] = {}
        self._at: dict[int, int] = {}  # text block -> engine block
        self._roots = {"": _root("")}  # by the adapter
        self.block_tokens = 0  # 0: no event has shown it
        self.unfollowed = 0  # engine blocks without a known parent, or above the limit
        # Whether all that the engine holds is known here: else what is not may be held.
        self.is_whole = False
        # Text blocks whose state changed, in order: a Tier, or NOT_HELD. The caller empties it.
        self.changes: dict[int, int] = {}
        self.cleared = False  # before these changes, everything was lost. The caller resets it.

    def __len__(self) -> int:
        return len(self._at)

    @property
    def blocks(self) -> int:
        """Engine blocks that are followed."""
        return len(self._blocks)

    def held(self) -> Iterator[tuple[int, int]]:
        """All text blocks that are held, and their tiers."""
        for text, name in self._at.items():
            if (tier := self._blocks[name].tier) != NOT_HELD:
                yield text, tier

    def apply(self, events: Iterable[KvEvent]) -> None:
        """What the engine reports, in order."""
        for event in events:
            if isinstance(event, BlocksStored):
                self._stored(event)
            elif isinstance(event, BlocksRemoved):
                self._removed(event)
            else:
                assert isinstance(event, AllCleared)
                self.clear()

    def clear(self) -> None:
        """The engine holds nothing any more."""
        self.forget()
        self.cleared = self.is_whole = True

    def forget(self) -> None:
        """What the engine holds is not known any more."""
        self._blocks.clear()
        self._named.clear()
        self._at.clear()
        self.changes.clear()
        self.is_whole = False

    def has_stored(self, prompt: EnginePrompt) -> bool:
        """Whether events have shown the last full block of a prompt, and it is still held."""
        if not self.block_tokens:
            return False
        path = self._path(prompt)
        block = self._blocks.get(path[-1]) if path else None
        return not path or (block is not None and bool(block.copies))

    def _path(self, prompt: EnginePrompt) -> list[int]:
        if not self.block_tokens:
            return []
        return prompt.names(self.block_tokens, self._roots.get(prompt.model, self._roots[""]))

    def attach(self, texts: Sequence[int], length: float, prompt: EnginePrompt) -> None:
        """A prompt with these text blocks was computed; report all of them of which something is
        known. `length`: of the prompt, in text blocks.
        """
        size, path = self.block_tokens, self._path(prompt)
        for number, text in enumerate(texts, 1):
            before = self._detach(text)
            end = number / max(length, number) * len(prompt.tokens)
            place = min(max(round(end / size), 1), len(path)) if path else 0
            block = self._blocks.get(path[place - 1]) if place else None
            if block is None:
                if self.is_whole or before != NOT_HELD:
                    self.changes[text] = NOT_HELD
                continue
            self._at[text] = path[place - 1]
            block.texts[text] = None
            if block.tier != before or block.tier == NOT_HELD:
                self.changes[text] = block.tier
        while len(self._at) > self._texts_max:
            oldest = next(iter(self._at))
            self._detach(oldest)
            self.changes[oldest] = NOT_HELD

    def _detach(self, text: int) -> int:
        """Forget where it is. Returns the tier that it was in."""
        name = self._at.pop(text, None)
        if name is None:
            return NOT_HELD
        block = self._blocks[name]
        tier = block.tier
        del block.texts[text]
        self._prune(name)
        return tier

    def _stored(self, event: BlocksStored) -> None:
        if not event.is_plain:
            return
        if not event.tokens:
            for engine_hash in event.hashes:
                self._in_tier(engine_hash, event.tier)
            return
        size = self.block_tokens = event.block_tokens
        root = self._roots.setdefault(event.lora, _root(event.lora))
        parent = root if event.parent is None else self._named.get(event.parent)
        for number, engine_hash in enumerate(event.hashes):
            if parent is None or not self._has_room(engine_hash):
                self.unfollowed += len(event.hashes) - number
                self.is_whole = self.is_whole and parent is None  # without one: after an image
                return
            name = _name(parent, event.tokens[number * size : (number + 1) * size])
            block = self._blocks.get(name)
            if block is None:
                block = self._blocks[name] = _Block(parent)
                before = self._blocks.get(parent)
                if before is not None:
                    before.children.add(name)
            if self._named.get(engine_hash, name) != name:  # no two prefixes have one hash
                self._drop(engine_hash)
            block.copies.setdefault(engine_hash, 0)
            self._named[engine_hash] = name
            self._in_tier(engine_hash, event.tier)
            parent = name

    def _has_room(self, engine_hash: EngineHash) -> bool:
        return engine_hash in self._named or len(self._named) < self._nodes_max

    def _in_tier(self, engine_hash: EngineHash, tier: Tier) -> None:
        name = self._named.get(engine_hash)
        if name is None:
            self.unfollowed += 1
            return
        self._blocks[name].copies[engine_hash] |= 1 << tier
        self._settle(name)

    def _removed(self, event: BlocksRemoved) -> None:
        for engine_hash in event.hashes:
            name = self._named.get(engine_hash)
            if name is None:
                continue
            copies = self._blocks[name].copies
            copies[engine_hash] &= ~(1 << event.tier)
            if copies[engine_hash]:
                self._settle(name)
            else:
                self._drop(engine_hash)

    def _drop(self, engine_hash: EngineHash) -> None:
        """It is in no tier."""
        name = self._named.pop(engine_hash)
        del self._blocks[name].copies[engine_hash]
        self._settle(name)
        self._prune(name)

    def _settle(self, name: int) -> None:
        """Its tiers may have changed: note what follows for its text blocks and those after it."""
        todo = [name]
        while todo:
            block = self._blocks[todo.pop()]
            before = self._blocks.get(block.parent)
            was = block.reachable
            block.reachable = bool(block.copies) and self._is_reachable(block.parent, before)
            for text in block.texts:
                self.changes[text] = block.tier
            if was != block.reachable:
                todo += block.children

    def _is_reachable(self, parent: int, before: _Block | None) -> bool:
        return parent in self._roots.values() if before is None else before.reachable

    def _prune(self, name: int) -> None:
        """Forget blocks in no tier that none follows, with their text blocks."""
        while (block := self._blocks.get(name)) and not block.copies and not block.children:
            for text in block.texts:
                del self._at[text]
                self.changes[text] = NOT_HELD
            del self._blocks[name]
            if (before := self._blocks.get(block.parent)) is not None:
                before.children.discard(name)
            name = block.parent
