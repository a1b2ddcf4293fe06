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

A model with several groups of layers (sliding windows, Mamba) resumes a prompt only where all its
groups can: full attention needs all blocks from the start, a window the last ones up to there, a
state that very block (vLLM's `single_type_kv_cache_manager`). The tree is made of the first
group of full attention; of the others it is known which hashes they hold, which are the same for
all groups. A text block counts as held if the prompt can be resumed at its engine block or at a
later one of the same path: what goes on from there finds the window's blocks that are left. Where
there is no group of full attention, or one of a kind or size that can't be followed, and where an
engine says nothing of prompts that it has computed, what it holds is not known here.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import ge

from agents.core.kv_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    GroupKind,
    KvEvent,
    Tier,
)

NODES_MAX = 500_000  # 8 million tokens in blocks of 16
TEXTS_MAX = 131_072  # blocks of 256 bytes: about as many tokens
NAME_BYTES = 8
NOT_HELD = -1
TOLD_TIMES = 16  # prompts in a row that a silent engine told of, until it counts as telling all
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
    # Of a model with further groups: by group, how many blocks up to here it holds without a gap,
    # at most as many as it needs; whether a prompt can be resumed here or further on; and of how
    # many of the blocks that follow that is so.
    runs: tuple[int, ...] = ()
    resumable: bool = True
    leads: int = 0

    @property
    def tiers(self) -> int:
        bits = 0
        for copy in self.copies.values():
            bits |= copy
        return bits

    @property
    def tier(self) -> int:
        return _FASTEST[self.tiers] if self.reachable and self.resumable else NOT_HELD


@dataclass(slots=True)
class _Group:
    """One beside the first of full attention. `held`: tiers by hash."""

    kind: GroupKind
    block_tokens: int
    needs: int  # blocks without a gap up to where a prompt is resumed
    held: dict[EngineHash, int] = field(default_factory=dict)

    def run(self, block: _Block, before: int) -> int:
        """`before`: of the block before it."""
        if self.held.keys().isdisjoint(block.copies):
            return 0
        return before if self.kind is GroupKind.FULL else min(before + 1, self.needs)


def _group_of(event: BlocksStored) -> _Group:
    """Its first event tells what it needs. A window's last token is the one computed next."""
    is_window = event.kind is GroupKind.WINDOW
    needs = max(1, -(-(event.window - 1) // event.block_tokens)) if is_window else 1
    return _Group(event.kind, event.block_tokens, needs)


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
        # Whether all that the engine told is known here: else what is not may be held.
        self.is_whole = False
        self._main: int | None = None  # the first group of full attention
        self._groups: dict[int, _Group] = {}  # the others
        self._is_silent, self._told = False, 0  # prompts in a row
        # Text blocks whose state changed, in order: a Tier, or NOT_HELD. The caller empties it.
        self.changes: dict[int, int] = {}
        self.cleared = False  # before these changes, everything was lost. The caller resets it.

    def __len__(self) -> int:
        return len(self._at)

    @property
    def tells_all(self) -> bool:
        """Whether what the engine holds follows from what it tells."""
        if self._is_silent or (self._groups and self._main is None):
            return False
        return all(
            group.kind is GroupKind.STATE
            or (group.kind is not GroupKind.OTHER and group.block_tokens == self.block_tokens)
            for group in self._groups.values()
        )

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
        for group in self._groups.values():
            group.held.clear()
        self.is_whole = False

    def restarted(self) -> None:
        """The engine may be another run, of another model: it holds nothing that is known."""
        self.clear()
        self.is_whole = False  # until its first batch was taken
        self._main, self._is_silent = None, False
        self._groups.clear()

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
        knows_all = self.is_whole and self._listen(prompt, path)
        for number, text in enumerate(texts, 1):
            before = self._detach(text)
            end = number / max(length, number) * len(prompt.tokens)
            place = min(max(round(end / size), 1), len(path)) if path else 0
            block = self._blocks.get(path[place - 1]) if place else None
            if block is None:
                if knows_all or before != NOT_HELD:
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

    def _listen(self, prompt: EnginePrompt, path: Sequence[int]) -> bool:
        """A prompt was computed: whether the engine tells of such ones. Silence about its first
        block, where there are groups that may not tell, is no absence; nor is it from an engine
        that has told nothing at all. Of a prompt shorter than a block there is nothing to tell."""
        if self._groups and self.block_tokens and not path:
            return self.tells_all
        is_told = (
            bool(path and path[0] in self._blocks) if self._groups else bool(self.block_tokens)
        )
        if not is_told and prompt.tokens:
            self._is_silent, self._told = True, 0
        elif self._is_silent:
            self._told += 1
            self._is_silent = bool(self._groups) and self._told < TOLD_TIMES
        return self.tells_all

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
        if not self._is_main(event):
            self._stored_beside(event)
            return
        if not event.is_plain or self._is_part(event):
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
                block = self._blocks[name] = _Block(parent, resumable=not self._groups)
                before = self._blocks.get(parent)
                if before is not None:
                    before.children.add(name)
            if self._named.get(engine_hash, name) != name:  # no two prefixes have one hash
                self._drop(engine_hash)
            block.copies.setdefault(engine_hash, 0)
            self._named[engine_hash] = name
            self._in_tier(engine_hash, event.tier)
            parent = name

    def _is_main(self, event: BlocksStored) -> bool:
        if self._main is None and event.kind is GroupKind.FULL:
            self._main = event.group
        return event.group == self._main and event.kind is GroupKind.FULL

    def _is_part(self, event: BlocksStored) -> bool:
        """Whether it is of parts of blocks, by which vLLM resumes prompts inside of one."""
        return bool(event.tokens and self._blocks) and event.block_tokens < self.block_tokens

    def _stored_beside(self, event: BlocksStored) -> None:
        """In a group beside the first of full attention; all of these are bounded as the tree."""
        group = self._groups.get(event.group)
        if group is None:
            group = self._groups[event.group] = _group_of(event)
            self._settle_all()
        if not event.is_plain:
            return
        beside = sum(len(other.held) for other in self._groups.values())
        for engine_hash in event.hashes:
            if engine_hash not in group.held and (beside := beside + 1) > self._nodes_max:
                self.unfollowed += 1
                self.is_whole = False
                continue
            group.held[engine_hash] = group.held.get(engine_hash, 0) | 1 << event.tier
            self._settle_named(engine_hash)

    def _removed_beside(self, group: _Group, event: BlocksRemoved) -> None:
        for engine_hash in event.hashes:
            if left := group.held.pop(engine_hash, 0) & ~(1 << event.tier):
                group.held[engine_hash] = left
            self._settle_named(engine_hash)

    def _settle_named(self, engine_hash: EngineHash) -> None:
        if (name := self._named.get(engine_hash)) is not None:
            self._settle(name)

    def _settle_all(self) -> None:
        """There is one group more."""
        for block in self._blocks.values():
            block.runs, block.resumable, block.leads = (), False, 0
            self.changes |= dict.fromkeys(block.texts, NOT_HELD)
        for name, block in self._blocks.items():
            if block.parent not in self._blocks:
                self._settle(name)

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
        if (group := self._groups.get(event.group)) is not None:
            self._removed_beside(group, event)
        if event.group != self._main:
            return
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
            block = self._blocks[name := todo.pop()]
            before = self._blocks.get(block.parent)
            was = block.reachable, block.runs
            block.reachable = bool(block.copies) and self._is_reachable(block.parent, before)
            if self._groups:
                block.runs = self._runs(block, before)
            for text in block.texts:
                self.changes[text] = block.tier
            if was != (block.reachable, block.runs):
                todo += block.children
            if self._groups:
                self._settle_resumable(name)

    def _runs(self, block: _Block, before: _Block | None) -> tuple[int, ...]:
        """By group. Before a prompt's first block nothing is missing."""
        groups = self._groups.values()
        if before is None:
            starts = [group.needs for group in groups]
        else:
            starts = [*before.runs, *(0 for _ in range(len(groups) - len(before.runs)))]
        return tuple(group.run(block, run) for group, run in zip(groups, starts, strict=True))

    def _settle_resumable(self, name: int) -> None:
        """Whether a prompt can be resumed at this block, and what follows for those before it."""
        while (block := self._blocks.get(name)) is not None:
            needs = (group.needs for group in self._groups.values())
            resumes = block.leads > 0 or all(map(ge, block.runs, needs))
            resumable = block.reachable and resumes
            if resumable == block.resumable:
                return
            block.resumable = resumable
            for text in block.texts:
                self.changes[text] = block.tier
            if (before := self._blocks.get(block.parent)) is None:
                return
            before.leads += 1 if resumable else -1
            name = block.parent

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
