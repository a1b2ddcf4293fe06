"""The base of policies that follow prefixes: their indexes, and how they are fed.

An index follows what was placed, not what engines have: an approximation, bounded to about what an
engine's memory holds. Replicas and peers have one each (SkyWalker 3.2: a tree for the replicas, one
for the other balancers), because a region may have a replica's name. What peers announce counts
where it goes deeper.
"""

from collections.abc import Mapping, Sequence
from random import Random

from mesh.core.model.request import Request
from mesh.core.policies.base import Destination, Layered, Target
from mesh.core.prefixes.prefix_index import PrefixIndex
from schemas.decision import CandidateKind


class Indexed(Layered):
    """Enters every placement into the index of its layer."""

    def __init__(self, dice: Random, blocks_max: int) -> None:
        self._dice = dice
        self._index_of: dict[CandidateKind, PrefixIndex[str]] = {
            kind: PrefixIndex(blocks_max) for kind in CandidateKind
        }

    @property
    def indexes(self) -> Mapping[CandidateKind, PrefixIndex[str]]:
        return self._index_of

    def hit_ratio(self, request: Request) -> float:
        hashes = request.prompt.hashes
        return max(index.hit_ratio(hashes) for index in self._index_of.values())

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        self._index_of[spot.kind].insert(spot.name, request.prompt.hashes, now)

    def forget(self, spot: Destination) -> None:
        self._index_of[spot.kind].forget(spot.name)

    def expire(self, now: float) -> None:
        for index in self._index_of.values():
            index.expire(now)

    def _depths(self, request: Request, targets: Sequence[Target]) -> dict[str, int]:
        """How many leading blocks each of these, all of one layer, is estimated to hold."""
        kind, hashes = targets[0].kind, request.prompt.hashes
        names = [target.name for target in targets]
        index = self._index_of[kind]
        return index.deepen(index.depths(hashes, names), hashes, names)

    def _holders(self, request: Request, targets: Sequence[Target]) -> tuple[list[Target], int]:
        """Those of one layer that hold the most of the prompt, and how many blocks that is."""
        depths = self._depths(request, targets)
        most = max(depths.values(), default=0)
        if not most:
            return [], 0
        return [target for target in targets if depths.get(target.name) == most], most

    def _held_by(self, request: Request, target: Target) -> int:
        return self._depths(request, [target]).get(target.name, 0)


def part(blocks: int, request: Request) -> float:
    """That many blocks as a part of the prompt's, 0 to 1."""
    hashes = request.prompt.hashes
    return blocks / len(hashes) if hashes else 0.0
