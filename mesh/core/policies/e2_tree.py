"""E2's radix tree over prompts: who holds which part, and how many requests of late shared it.

A node is a run of blocks that no known prompt leaves in the middle; nodes split where prompts
part. Preble prices whole nodes (its "key portion" is one), so the flat `PrefixIndex` won't do.
Block hashes are chained, which makes this tree quick: equal hashes at a node's end mean equal
prompts up to there, so a node is passed with one comparison whatever its length, and the place
where two runs part is found by bisection.

Each holder has its nodes in order of last use, children before their parents: its least
recently used node is always a leaf of what it holds, and taking nodes from that end never
leaves a gap. A node stays while anybody holds it or a request within the window shares it
(Preble 3.2, "Global scheduler").
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

Owner = TypeVar("Owner", bound="Holder")


class Holder:
    """What one target holds: at most `capacity_blocks` blocks. Told apart by identity."""

    __slots__ = ("blocks", "capacity_blocks", "nodes")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.blocks = 0
        self.nodes: OrderedDict[Node[Any], None] = OrderedDict()  # least recently used first


class Node(Generic[Owner]):
    """One run of blocks, from block `start` of a prompt. The root has none."""

    __slots__ = ("children", "hashes", "hits", "owners", "parent", "start")

    def __init__(self, start: int, hashes: Sequence[int], parent: "Node[Owner] | None") -> None:
        self.start = start
        self.hashes = hashes
        self.parent = parent
        self.children: dict[int, Node[Owner]] = {}  # by their first block
        self.owners: dict[Owner, None] = {}
        self.hits: dict[Owner, int] = {}  # requests within the window that went there


class Match(NamedTuple, Generic[Owner]):
    """Of one prompt, among some holders. `node`: the longest on its way that one of them has."""

    blocks: int
    node: Node[Owner] | None
    holders: Sequence[Owner]  # of that node
    blocks_of: dict[Owner, int]  # how far each one holds the prompt
    path: Sequence[Node[Owner]]  # the known nodes on its way, whoever holds them


class Inserted(NamedTuple, Generic[Owner]):
    """`leaf`: where the prompt ends; `held`: blocks the holder had; `shared`: longest old node."""

    leaf: Node[Owner]
    held: int
    shared: Node[Owner] | None


class RadixTree(Generic[Owner]):
    """Prompts, as their block hashes, and who holds them."""

    def __init__(self) -> None:
        self._root: Node[Owner] = Node(0, (), None)

    def match(self, hashes: Sequence[int], among: Collection[Owner]) -> Match[Owner]:
        """How far some of `among` (quick to ask) hold the prompt."""
        blocks, longest = 0, 0
        key: Node[Owner] | None = None
        key_holders: list[Owner] = []
        blocks_of: dict[Owner, int] = {}
        walk = self._walk(hashes)
        for node, end in walk:
            holders = [owner for owner in node.owners if owner in among]
            if not holders:
                break
            blocks = end
            blocks_of.update(dict.fromkeys(holders, end))
            if end - node.start > longest:
                longest, key, key_holders = end - node.start, node, holders
        return Match(blocks, key, key_holders, blocks_of, [node for node, _ in walk])

    def held_blocks(self, hashes: Sequence[int]) -> int:
        """How many leading blocks anybody holds."""
        held = 0
        for node, end in self._walk(hashes):
            if not node.owners:
                break
            held = end
        return held

    def insert(self, owner: Owner, hashes: Sequence[int]) -> Inserted[Owner]:
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
            leaf = Node(at, hashes[at:], leaf)
            assert leaf.parent is not None
            leaf.parent.children[hashes[at]] = leaf
        self._own(owner, leaf)
        return Inserted(leaf, held, shared)

    def count(self, owner: Owner, leaf: Node[Owner], by: int) -> None:
        """A request within the window (1), or one that has left it (-1), went to `owner`."""
        node: Node[Owner] | None = leaf
        while node is not None:
            hits = node.hits.get(owner, 0) + by
            if hits:
                node.hits[owner] = hits
            else:
                node.hits.pop(owner, None)
            node = node.parent
        if by < 0:
            self._prune(leaf)

    def eviction_cost(self, owner: Owner, blocks: int, kept: Collection[Node[Owner]]) -> float:
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

    def forget(self, owner: Owner) -> None:
        """It holds nothing any more."""
        while owner.nodes:
            self._evict(owner)

    def _walk(self, hashes: Sequence[int]) -> list[tuple[Node[Owner], int]]:
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

    def _split(self, node: Node[Owner], at: int) -> Node[Owner]:
        """A new node for what lies before block `at`; `node` keeps the rest and its events."""
        assert node.parent is not None
        length = at - node.start
        upper = Node(node.start, node.hashes[:length], node.parent)
        upper.owners, upper.hits = node.owners.copy(), node.hits.copy()
        node.parent.children[node.hashes[0]] = upper
        node.start, node.hashes, node.parent = at, node.hashes[length:], upper
        upper.children[node.hashes[0]] = node
        for owner in upper.owners:
            _touch(owner, upper)
        return upper

    def _own(self, owner: Owner, leaf: Node[Owner]) -> None:
        node = leaf
        while node.parent is not None:
            if owner not in node.owners:
                node.owners[owner] = None
                owner.blocks += len(node.hashes)
            node = node.parent
        _touch(owner, leaf)
        while owner.blocks > owner.capacity_blocks:
            self._evict(owner)

    def _evict(self, owner: Owner) -> None:
        node, _ = owner.nodes.popitem(last=False)
        del node.owners[owner]
        owner.blocks -= len(node.hashes)
        self._prune(node)

    def _prune(self, node: Node[Owner]) -> None:
        while node.parent is not None and not (node.owners or node.hits or node.children):
            del node.parent.children[node.hashes[0]]
            node = node.parent


def _touch(owner: Holder, node: Node[Any]) -> None:
    """Used just now: a parent after its children, so that it is evicted after them."""
    while node.parent is not None:
        owner.nodes[node] = None
        owner.nodes.move_to_end(node)
        node = node.parent


def _end(node: Node[Any]) -> int:
    return node.start + len(node.hashes)


def _parting(node: Node[Any], hashes: Sequence[int]) -> int:
    """The first block that differs: chained hashes are equal up to it and nowhere after."""
    length = min(len(node.hashes), len(hashes) - node.start)
    differs = range(length)
    return node.start + bisect_left(
        differs, True, key=lambda i: bool(hashes[node.start + i] != node.hashes[i])
    )
