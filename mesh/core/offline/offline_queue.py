"""The order of offline requests: those that share a prefix together, and nobody waits for ever.

HyGen's prefix sharing maximization (Sun et al., 2025, §4.3, appendix A.2 and A.3). Offline requests
form a trie over the chained hashes of their prompts' blocks and are taken in its depth-first order,
so that a prefix is computed once and used while it is still cached. New requests under a prefix
that is being worked on come before everything behind it, for as long as they keep coming. So each
choice is made by a throw of dice: with `utility_ratio` the first of the depth-first order, else the
one that has waited longest (algorithm 4). At 1 this is algorithm 3, at 0 plain order of arrival.

The trie is not built of nodes. A chained hash names a block and everything before it, hence a node;
a node's rank is when it was first seen; and a request's place is the tuple of ranks on its path.
Those tuples in ascending order are the trie's depth-first order, with children by age, a prompt
before the longer ones that continue it, and equal prompts by arrival. A sorted list of them gives
the first request at once, and takes an insertion or removal in time of the prompt's blocks (times
the logarithm of the queue's length, in tuple comparisons).

A request that was taken keeps its ranks until it is forgotten: preempted, it goes back to the place
that it had. What was drawn counts until a request is taken: if the chosen one doesn't fit the
engine now, a new throw would let small requests pass large ones again and again.

Whoever gives requests to several engines gives each a range of the depth-first order, and cuts a
range where the trie branches (`cut`), so that few prefixes are computed on two engines.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sortedcontainers import SortedDict, SortedList

REQUESTS_MAX = 100_000  # far beyond what one engine or one batch runner holds at once
BLOCKS_MAX = 10_000_000  # of all prompts together, 8 bytes each and a node for each distinct one


Place = tuple[tuple[int, ...], int, int]
"""Of a request in the depth-first order: its ranks, its number by arrival, its key."""


def shared_blocks(one: Place, other: Place) -> int:
    """How many leading blocks two requests have in common."""
    shared = 0
    for mine, its in zip(one[0], other[0], strict=False):
        if mine != its:
            break
        shared += 1
    return shared


class OfflineQueueFull(Exception):
    """The queue is at its limit: the message says which. Ask again when requests have ended."""


class DuplicateOffline(ValueError):
    """A request with this key is in the queue, or was taken and not forgotten."""


class UnknownOffline(KeyError):
    """No request with this key is where the caller believes it to be."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a request is in the depth-first order, and when it came."""

    ranks: tuple[int, ...]
    arrival: int
    key: int
    blocks: tuple[int, ...]

    @property
    def in_trie(self) -> Place:
        return self.ranks, self.arrival, self.key


class _Node:
    """A block with all before it: its rank among its siblings, and how many requests hold it."""

    __slots__ = ("holders", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.holders = 0


class OfflineQueue:
    """add, first, take, put_back, forget: requests are named by a number of the caller's."""

    def __init__(
        self,
        dice: random.Random,
        *,
        utility_ratio: float,
        requests_max: int = REQUESTS_MAX,
        blocks_max: int = BLOCKS_MAX,
    ) -> None:
        """`utility_ratio`: share of choices made by prefix, the others by age. 0 to 1."""
        if not 0.0 <= utility_ratio <= 1.0:
            raise ValueError(f"utility_ratio is {utility_ratio}: it should be from 0 to 1")
        self._dice = dice
        self._utility_ratio = utility_ratio
        self._requests_max = requests_max
        self._blocks_max = blocks_max
        self._nodes: dict[int, _Node] = {}
        self._places: dict[int, _Place] = {}  # of waiting and of taken ones
        self._in_trie: SortedList[Place] = SortedList()
        self._by_age: SortedDict[int, int] = SortedDict()
        self._arrivals = self._ranks = 0
        self.blocks = 0  # of the prompts that wait and of those that were taken
        self._by_prefix: bool | None = None  # the throw that counts until a request is taken

    def __len__(self) -> int:
        """How many wait."""
        return len(self._by_age)

    def __contains__(self, key: int) -> bool:
        """Whether the request waits."""
        place = self._places.get(key)
        return place is not None and place.arrival in self._by_age

    def add(self, key: int, blocks: Sequence[int]) -> None:
        """Queue a request; `blocks` are the chained hashes of its prompt, in order.

        Raises OfflineQueueFull or DuplicateOffline, and keeps nothing then.
        """
        if key in self._places:
            raise DuplicateOffline(f"offline request {key} is in the queue already")
        if len(self._places) >= self._requests_max:
            raise OfflineQueueFull(f"{self._requests_max} offline requests are queued or running")
        if self.blocks + len(blocks) > self._blocks_max:
            raise OfflineQueueFull(
                f"a prompt of {len(blocks)} blocks doesn't fit beside {self.blocks}: "
                f"the queue's limit is {self._blocks_max}"
            )
        ranks = tuple([self._hold(block) for block in blocks])
        place = self._places[key] = _Place(ranks, self._arrivals, key, tuple(blocks))
        self._arrivals += 1
        self.blocks += len(blocks)
        self._enqueue(place)

    def first(self) -> int | None:
        """Who is next; None if nobody waits. The answer stays until the queue changes."""
        if not self._by_age:
            return None
        return self._in_trie[0][2] if self.chooses_by_prefix() else self.oldest()

    def chooses_by_prefix(self) -> bool:
        """The throw that counts until a request is taken: by prefix, or the oldest."""
        if self._by_prefix is None:
            self._by_prefix = self._dice.random() < self._utility_ratio
        return self._by_prefix

    def oldest(self) -> int | None:
        """Who has waited longest; None if nobody waits."""
        return self._by_age.peekitem(0)[1] if self._by_age else None

    def place(self, key: int) -> Place:
        """Of a request that waits or was taken. Raises UnknownOffline."""
        place = self._places.get(key)
        if place is None:
            raise UnknownOffline(f"offline request {key} is not in the queue")
        return place.in_trie

    def waiting(self, start: Place | None, end: Place | None) -> Iterator[int]:
        """Those that wait from one place to before another, in depth-first order. Don't change
        the queue while iterating."""
        for place in self._in_trie.irange(start, end, inclusive=(True, False)):
            yield place[2]

    def place_at(self, position: int) -> Place:
        """Of the request at that position in depth-first order, from 0, of those that wait."""
        return self._in_trie[position]

    def count(self, start: Place | None, end: Place | None) -> int:
        """How many those are."""
        first, last = self._span(start, end)
        return max(0, last - first)

    def has_between(self, start: Place | None, end: Place | None) -> bool:
        """Whether there are any."""
        first = 0 if start is None else self._in_trie.bisect_left(start)
        return first < len(self._in_trie) and (end is None or self._in_trie[first] < end)

    def cut(self, start: Place | None, end: Place | None) -> Place | None:
        """The place near the middle of those where the fewest blocks are shared across; None if
        nobody waits there. Both parts have somebody, if two wait."""
        first, last = self._span(start, end)
        if last - first < 2:
            return self._in_trie[first] if last > first else None
        shared = shared_blocks(self._in_trie[first], self._in_trie[last - 1])
        middle = self._in_trie[(first + last) // 2]
        branch = middle[0][: shared + 1]
        if len(branch) > shared:
            begin = self._in_trie.bisect_left((branch, -1, -1))
            if begin > first:
                return self._in_trie[begin]
            behind = self._in_trie.bisect_left(((*branch[:-1], branch[-1] + 1), -1, -1))
            if behind < last:
                return self._in_trie[behind]
        return middle

    def _span(self, start: Place | None, end: Place | None) -> tuple[int, int]:
        """Positions in the sorted list."""
        first = 0 if start is None else self._in_trie.bisect_left(start)
        last = len(self._in_trie) if end is None else self._in_trie.bisect_left(end)
        return first, last

    def take(self, key: int) -> None:
        """The request begins to run: it no longer waits, and its place is kept.

        End it with `put_back` or `forget`. Raises UnknownOffline if it doesn't wait.
        """
        self._dequeue(self._one_that_waits(key))
        self._by_prefix = None

    def put_back(self, key: int) -> None:
        """The request was preempted: it waits again where it was. Raises UnknownOffline."""
        place = self._places.get(key)
        if place is None or key in self:
            raise UnknownOffline(f"offline request {key} was not taken")
        self._enqueue(place)

    def forget(self, key: int) -> None:
        """The request has ended or was cancelled, waiting or taken. Raises UnknownOffline."""
        if key in self:
            self._dequeue(self._one_that_waits(key))
        place = self._places.pop(key, None)
        if place is None:
            raise UnknownOffline(f"offline request {key} is not in the queue")
        self.blocks -= len(place.blocks)
        for block in place.blocks:
            node = self._nodes[block]
            node.holders -= 1
            if not node.holders:
                del self._nodes[block]

    def _hold(self, block: int) -> int:
        node = self._nodes.get(block)
        if node is None:
            node = self._nodes[block] = _Node(self._ranks)
            self._ranks += 1
        node.holders += 1
        return node.rank

    def _one_that_waits(self, key: int) -> _Place:
        if key not in self:
            raise UnknownOffline(f"offline request {key} doesn't wait")
        return self._places[key]

    def _enqueue(self, place: _Place) -> None:
        self._in_trie.add(place.in_trie)
        self._by_age[place.arrival] = place.key

    def _dequeue(self, place: _Place) -> None:
        self._in_trie.remove(place.in_trie)
        del self._by_age[place.arrival]
