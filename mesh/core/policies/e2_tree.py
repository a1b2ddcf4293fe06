"""E2's radix tree over prompts: which target holds which part, and how many requests shared it.

A node is a run of blocks that no known prompt leaves in the middle; nodes split where prompts part.
Preble prices whole nodes (its "key portion" is one), which the flat `PrefixIndex` can't. Block
hashes are chained: equal hashes at a node's end mean equal prompts up to there, so passing a node
takes one comparison, and the place where two runs part is found by bisection.

Each holder has its nodes in order of last use, children before their parents: its least
recently used node is always a leaf of what it holds, and taking nodes from that end never
leaves a gap. A node stays while a target holds it or a request within the window shares it
(Preble 3.2, "Global scheduler").
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from mesh.core.model.request import Served
from mesh.core.policies.base import TYPICAL, Speed

HolderT = TypeVar("HolderT", bound="Holder")


class Holder:
    """What one target holds: at most `capacity_blocks` blocks. Compared by identity."""

    __slots__ = ("blocks", "capacity_blocks", "nodes")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.blocks = 0
        self.nodes: OrderedDict[RadixNode[Any], None] = OrderedDict()  # least recently used first


class RadixNode(Generic[HolderT]):
    """One run of blocks, from block `start` of a prompt. The root has none."""

    __slots__ = ("children", "hashes", "hits", "owners", "parent", "start")

    def __init__(
        self, start: int, hashes: Sequence[int], parent: "RadixNode[HolderT] | None"
    ) -> None:
        self.start = start
        self.hashes = hashes
        self.parent = parent
        self.children: dict[int, RadixNode[HolderT]] = {}  # by their first block
        self.owners: dict[HolderT, None] = {}
        self.hits: dict[HolderT, int] = {}  # requests within the window that went there


class RadixMatch(NamedTuple, Generic[HolderT]):
    """Of one prompt, among some holders. `node`: the longest on its way that one of them has."""

    blocks: int
    node: RadixNode[HolderT] | None
    holders: Sequence[HolderT]  # of that node
    blocks_of: dict[HolderT, int]  # how far each one holds the prompt
    path: Sequence[RadixNode[HolderT]]  # all known nodes on its way


class Inserted(NamedTuple, Generic[HolderT]):
    """`leaf`: where the prompt ends; `held`: blocks the holder had; `shared`: longest old node."""

    leaf: RadixNode[HolderT]
    held: int
    shared: RadixNode[HolderT] | None


class RadixTree(Generic[HolderT]):
    """Prompts, as their block hashes, and who holds them."""

    def __init__(self) -> None:
        self._root: RadixNode[HolderT] = RadixNode(0, (), None)

    def match(self, hashes: Sequence[int], among: Collection[HolderT]) -> RadixMatch[HolderT]:
        """How far some of `among` (with quick `in`) hold the prompt."""
        blocks, longest = 0, 0
        key: RadixNode[HolderT] | None = None
        key_holders: list[HolderT] = []
        blocks_of: dict[HolderT, int] = {}
        walk = self._walk(hashes)
        for node, end in walk:
            holders = [owner for owner in node.owners if owner in among]
            if not holders:
                break
            blocks = end
            blocks_of.update(dict.fromkeys(holders, end))
            if end - node.start > longest:
                longest, key, key_holders = end - node.start, node, holders
        return RadixMatch(blocks, key, key_holders, blocks_of, [node for node, _ in walk])

    def held_blocks(self, hashes: Sequence[int]) -> int:
        """How many leading blocks some target holds."""
        held = 0
        for node, end in self._walk(hashes):
            if not node.owners:
                break
            held = end
        return held

    def insert(self, owner: HolderT, hashes: Sequence[int]) -> Inserted[HolderT]:
        """`owner` is about to hold this prompt, as far as its capacity goes."""
        hashes = hashes[: owner.capacity_blocks]
        path = self._walk(hashes)
        if path and (end := path[-1][1]) < _end(path[-1][0]):
            path[-1] = (self._split(path[-1][0], end), end)
        held, shared = 0, None
        for node, end in path:
            if owner in node.owners:
                held = end
            if shared is None or len(node.hashes) > len(shared.hashes):
                shared = node
        leaf, at = path[-1] if path else (self._root, 0)
        if at < len(hashes):
            leaf = RadixNode(at, hashes[at:], leaf)
            assert leaf.parent is not None
            leaf.parent.children[hashes[at]] = leaf
        self._own(owner, leaf)
        return Inserted(leaf, held, shared)

    def count(self, owner: HolderT, leaf: RadixNode[HolderT], by: int) -> None:
        """A request within the window (1), or one that has left it (-1), went to `owner`."""
        node: RadixNode[HolderT] | None = leaf
        while node is not None:
            hits = node.hits.get(owner, 0) + by
            if hits:
                node.hits[owner] = hits
            else:
                node.hits.pop(owner, None)
            node = node.parent
        if by < 0:
            self._prune(leaf)

    def eviction_cost(
        self, owner: HolderT, blocks: int, kept: Collection[RadixNode[HolderT]]
    ) -> float:
        """Blocks to evict for so many new ones, each times the requests that share it.

        Of the last node only the part that is needed. `kept`: not to be evicted.
        """
        needed = owner.blocks + blocks - owner.capacity_blocks
        cost = 0
        for node in owner.nodes:
            if needed <= 0:
                break
            if node not in kept:
                cost += min(needed, len(node.hashes)) * node.hits.get(owner, 0)
                needed -= len(node.hashes)
        return cost

    def forget(self, owner: HolderT) -> None:
        while owner.nodes:
            self._evict(owner)

    def _walk(self, hashes: Sequence[int]) -> list[tuple[RadixNode[HolderT], int]]:
        """The nodes on the prompt's way, each with the block to which it agrees."""
        node, at, path = self._root, 0, []
        length = len(hashes)
        while at < length:
            child = node.children.get(hashes[at])
            if child is None:
                break
            end = at + len(child.hashes)
            if end > length or hashes[end - 1] != child.hashes[-1]:
                path.append((child, _parting(child, hashes)))
                break
            path.append((child, end))
            node, at = child, end
        return path

    def _split(self, node: RadixNode[HolderT], at: int) -> RadixNode[HolderT]:
        """A new node for what lies before block `at`; `node` keeps the rest and its events."""
        assert node.parent is not None
        length = at - node.start
        upper = RadixNode(node.start, node.hashes[:length], node.parent)
        upper.owners, upper.hits = node.owners.copy(), node.hits.copy()
        node.parent.children[node.hashes[0]] = upper
        node.start, node.hashes, node.parent = at, node.hashes[length:], upper
        upper.children[node.hashes[0]] = node
        for owner in upper.owners:
            _touch(owner, upper)
        return upper

    def _own(self, owner: HolderT, leaf: RadixNode[HolderT]) -> None:
        node = leaf
        while node.parent is not None:
            if owner not in node.owners:
                node.owners[owner] = None
                owner.blocks += len(node.hashes)
            node = node.parent
        _touch(owner, leaf)
        while owner.blocks > owner.capacity_blocks:
            self._evict(owner)

    def _evict(self, owner: HolderT) -> None:
        node, _ = owner.nodes.popitem(last=False)
        del node.owners[owner]
        owner.blocks -= len(node.hashes)
        self._prune(node)

    def _prune(self, node: RadixNode[HolderT]) -> None:
        while node.parent is not None and not (node.owners or node.hits or node.children):
            del node.parent.children[node.hashes[0]]
            node = node.parent


def _touch(owner: Holder, node: RadixNode[Any]) -> None:
    """Used just now: a parent after its children, so that it is evicted after them."""
    while node.parent is not None:
        owner.nodes[node] = None
        owner.nodes.move_to_end(node)
        node = node.parent


def _end(node: RadixNode[Any]) -> int:
    return node.start + len(node.hashes)


def _parting(node: RadixNode[Any], hashes: Sequence[int]) -> int:
    """The first block that differs: chained hashes are equal up to it and nowhere after."""
    length = min(len(node.hashes), len(hashes) - node.start)
    differs = range(length)
    return node.start + bisect_left(
        differs, True, key=lambda i: bool(hashes[node.start + i] != node.hashes[i])
    )


# What each target was given within the window H (Preble 3.2), as counts of tokens.
OUTPUT_TOKENS = 45.0  # of an answer while none has ended: Preble's workloads have 4 to 190
ASSIGNMENTS_MAX = 262_144  # within the window, over all targets; then the oldest leave early


class LoadAccount(Holder):
    """One target: what it holds, and what it was given within the window."""

    __slots__ = (
        "answers",
        "generating",
        "given",
        "load_s",
        "missed_tokens",
        "output_tokens",
        "prefill_s",
        "report",
        "requests",
        "speed",
    )

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.speed: Speed = TYPICAL
        self.report: object = None  # that `speed` was read from
        self.given = 0  # requests, ever
        self.requests = 0
        self.generating = 0  # of them, those that are not prompts alone
        self.missed_tokens = 0
        self.answers = 0
        self.output_tokens = 0
        self.prefill_s = 0.0  # to compute what its requests missed in its cache
        self.load_s = 0.0  # Preble's L: that, and to generate its answers

    @property
    def decode_s(self) -> float:
        """Time to generate its answers, by their average length."""
        average = self.output_tokens / self.answers if self.answers else OUTPUT_TOKENS
        return self.generating * average * self.speed.decode_s_per_token

    def reprice(self) -> None:
        """Its counts or its speed have changed."""
        base_s, s_per_token = self.speed.prefill_base_s, self.speed.prefill_s_per_token
        self.prefill_s = self.requests * base_s + self.missed_tokens * s_per_token
        self.load_s = self.prefill_s + self.decode_s


@dataclass(slots=True, eq=False)
class Assignment:
    """One request given to one target. `leaf`: its prompt's end; `shared`: its key portion."""

    account: LoadAccount
    leaf: RadixNode[LoadAccount]
    shared: RadixNode[LoadAccount] | None
    missed_tokens: int
    at: float
    generates: bool = True  # else it is a prompt alone
    output_tokens: int | None = None  # once it is answered
    began: bool = False
    counted: bool = True  # its numbers are in its account


class LoadWindow:
    """Assignments of the last `window_s` seconds, the oldest first."""

    def __init__(self, window_s: float, assignments_max: int = ASSIGNMENTS_MAX) -> None:
        self.window_s = window_s
        self._assignments_max = assignments_max
        self._line: deque[Assignment] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def add(self, assignment: Assignment) -> None:
        """A request went to its account, which holds the load from now on."""
        self._line.append(assignment)
        account = assignment.account
        account.given += 1
        account.requests += 1
        account.generating += assignment.generates
        account.missed_tokens += assignment.missed_tokens
        account.reprice()

    def answered(self, assignment: Assignment, served: Served) -> None:
        """Its answer is known: how long it was, and what the engine really had to compute."""
        if not assignment.counted:
            return
        account = assignment.account
        is_first = assignment.generates and assignment.output_tokens is None
        if served.output_tokens is not None and is_first:
            assignment.output_tokens = served.output_tokens
            account.answers += 1
            account.output_tokens += served.output_tokens
        if served.prompt_tokens is not None and served.cached_tokens is not None:
            missed_tokens = max(0, served.prompt_tokens - served.cached_tokens)
            account.missed_tokens += missed_tokens - assignment.missed_tokens
            assignment.missed_tokens = missed_tokens
        account.reprice()

    def take_back(self, assignment: Assignment) -> bool:
        """It counts no longer; False if it did not before."""
        if not assignment.counted:
            return False
        assignment.counted = False
        account = assignment.account
        account.requests -= 1
        account.generating -= assignment.generates
        account.missed_tokens -= assignment.missed_tokens
        if assignment.output_tokens is not None:
            account.answers -= 1
            account.output_tokens -= assignment.output_tokens
        account.reprice()
        return True

    def expire(self, now: float) -> list[Assignment]:
        """Take back what has left the window; returns those that counted until now."""
        line, left = self._line, []
        while line and (line[0].at <= now - self.window_s or len(line) > self._assignments_max):
            assignment = line.popleft()
            if self.take_back(assignment):
                left.append(assignment)
        return left
