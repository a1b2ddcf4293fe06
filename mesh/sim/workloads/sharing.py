"""How much of each prompt somebody asked before: what one endless cache would hit.

This is a property of the workload and no router's merit: one cache, without end, that holds every
prompt and answer from the moment it is asked. Trees are walked in their nominal time (arrival plus
pauses, answers take none).

Rejected: sets of chained hashes. A trie of pairs (node, segment) is exact and as short.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from mesh.sim.workload import Arrival, Node, Segment


class Asked(NamedTuple):
    """A request at its nominal time, with the leading tokens of its prompt asked before."""

    at_s: float
    node: Node
    shared_tokens: int


class EndlessCache:
    """Remembers every sequence of segments."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}

    def ask(self, prompt: tuple[Segment, ...], answer: Segment) -> int:
        """How many leading tokens of the prompt are known; then it and its answer are."""
        place = shared = 0
        known = True
        for part in (*prompt, answer):
            step = (place, part.id)
            following = self._next.get(step)
            if following is None:
                known = False
                following = self._next[step] = len(self._next) + 1
            elif known:
                shared += part.tokens
            place = following
        return min(shared, sum(part.tokens for part in prompt))


def in_order(arrivals: Iterable[Arrival]) -> Iterator[tuple[float, Node]]:
    """Every node of every tree by its nominal time in seconds."""
    heap = [(arrival.at_s, place, arrival.node) for place, arrival in enumerate(arrivals)]
    heapify(heap)
    place = len(heap)
    while heap:
        at_s, _, node = heappop(heap)
        yield at_s, node
        for child in node.children:
            heappush(heap, (at_s + child.pause_s, place, child))
            place += 1


def shared(arrivals: Iterable[Arrival]) -> Iterator[Asked]:
    """Every request with what an endless cache holds of it."""
    cache = EndlessCache()
    for at_s, node in in_order(arrivals):
        yield Asked(at_s, node, cache.ask(node.prompt, node.answer))
