"""SkyWalker: 3.2 and Algorithm 1 (MAXPREFIXMATCH), over chained block hashes.

The available target with the longest matching prefix; among several that hold it equally far,
the least loaded. A match shorter than `explore_below` of the prompt does not bind (the paper
explores "when the prefix hit ratio is low, e.g. < 50 %"): then the least loaded target is
chosen, and the prompt is entered for it all the same, or affinity would never start.

Availability, replicas before peers, and holding, the rest of the paper, are in `placement.py`. The
authors' balancer (skypilot, branch serve-multi-region-lb, `_probe_lb_status_one_lb`) forwards to a
peer only if that holds at most 10 requests, as the paper has it, and at most as many as itself,
which is not in the paper. A request that looks for a place counts as held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Destination, Layered, Target, least_loaded
from mesh.core.policies.consistent_hash import BLOCKS, HashRing, choose_on_ring
from mesh.core.policies.indexed import Indexed, part
from schemas.decision import CandidateKind


@dataclass(frozen=True, slots=True)
class SkyWalkerOptions:
    """`explore_below`: part of the prompt; a shorter match does not bind (SkyWalker 3.2).

    `own_queue` 1: a peer that holds more requests than this router is not available; 0: it is.
    """

    explore_below: float = 0.5
    own_queue: int = 1

    def __post_init__(self) -> None:
        if not 0.0 < self.explore_below <= 1.0:
            raise ValueError(
                f"explore_below is a part of one, more than 0, not {self.explore_below}"
            )
        if self.own_queue not in (0, 1):
            raise ValueError(f"own_queue is 0 or 1, not {self.own_queue}")


class SkyWalker(Indexed):
    """Longest prefix among the available, least load when that is too short to matter."""

    def __init__(self, dice: Random, blocks_max: int, options: SkyWalkerOptions) -> None:
        super().__init__(dice, blocks_max)
        self._explore_below = options.explore_below
        self.compares_queues = bool(options.own_queue)

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The target that holds most of the prompt, if that is enough to matter."""
        holders, blocks = self._holders(request, targets)
        ratio = part(blocks, request)
        if holders and ratio >= self._explore_below:
            target = least_loaded(holders, self._dice)
            return Choice(target, f"holds {ratio:.0%} of the prompt", blocks)
        target = least_loaded(targets, self._dice)
        reason = f"explore: best match {ratio:.0%}, least load {target.load}"
        return Choice(target, reason, self._held_by(request, target))


# SkyWalker-CH: consistent hashing in both layers (SkyWalker 3.2; Algorithm 1, lines 23-26).
#
# Each region has a ring of its replicas and one of its peers (LBRing): the placer makes an instance
# of this policy for either. A place on the ring that is not available, by selective pushing, is
# passed over to the next. It follows prefixes by the key alone; it misses what different users'
# prompts share. The paper's key is a user or session id; a request without one is identified by the
# beginning of its prompt, as in `consistent_hash.py`.


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

    def forget(self, spot: Destination) -> None:
        self._ring.forget(spot.name)


# Region-local: what SkyWalker is measured against (its Figure 10). Every region serves its own
# clients with its own replicas; if none is free the request waits, however idle the peers are.


class RegionLocal(SkyWalker):
    """Never forwards. Joint, to get the peers and refuse them."""

    joint: ClassVar[bool] = True

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """A replica of this region, or none."""
        local = [target for target in targets if target.kind is CandidateKind.REPLICA]
        if not local:
            return Choice(None, "no replica of this region is free, and nothing leaves it")
        return super().choose(request, local, now)
