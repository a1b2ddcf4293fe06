"""SkyWalker-CH: consistent hashing in both layers (SkyWalker 3.2; Algorithm 1, lines 23-26).

Each region has a ring of its replicas and one of its peers (LBRing): the placer makes an instance
of this policy for either. A place on the ring that is not available, by selective pushing, is
passed over to the next. That is all the paper's variant needs to follow prefixes, by the key
alone; what it misses is what different users' prompts share.

The paper's key is what the client provides, a user or session id. A request without one is known
by the beginning of its prompt, as in `consistent_hash.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from mesh.core.policies.base import Choice, Layered, Spot, Target
from mesh.core.policies.consistent_hash import BLOCKS, choose_on_ring
from mesh.core.policies.hash_ring import HashRing
from mesh.core.requests.request import Request


@dataclass(frozen=True, slots=True)
class SkyWalkerCHOptions:
    """`blocks`: of a prompt's beginning that name its conversation, if no session does."""

    blocks: int = BLOCKS

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"blocks must be 1 or more, not {self.blocks}")


class SkyWalkerCH(Layered):
    """NEXT on the ring of this layer."""

    def __init__(self, dice: Random, options: SkyWalkerCHOptions) -> None:
        self._dice = dice
        self._blocks = options.blocks
        self._ring = HashRing()

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The first available target after the key's place."""
        return choose_on_ring(self._ring, request, self._blocks, targets, targets, self._dice)

    def forget(self, spot: Spot) -> None:
        """It leaves the ring; if it comes back, it comes back to its old place."""
        self._ring.forget(spot.name)
