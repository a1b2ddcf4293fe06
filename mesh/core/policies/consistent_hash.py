"""Consistent hashing: one conversation, one target, with nothing to remember but who exists.

What is hashed names the conversation: the session that the client gave, or else the first blocks
of the prompt, which the turns of a conversation share. Too few blocks, and all who share a system
prompt are one conversation; too many, and a first turn is shorter than them and its second one
goes elsewhere. 256 tokens is what SGLang's gateway takes for its `prefix_hash`.

`load_factor` c bounds the load (Mirrokni, Thorup and Zadimoghaddam, 2018): a target with c times
its fair share, the new request counted, is passed over, so that one hot key can't drown it. 0 is
the plain ring.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from mesh.core.policies.base import Choice, Layered, Spot, Target
from mesh.core.policies.hash_ring import HashRing, key_of
from mesh.core.requests.request import Request

BLOCKS = 4  # 256 tokens, at 64 a block


@dataclass(frozen=True, slots=True)
class ConsistentHashOptions:
    """`blocks`: of a prompt's beginning that name its conversation. `load_factor`: 0 or 1 up."""

    blocks: int = BLOCKS
    load_factor: float = 0.0

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"blocks must be 1 or more, not {self.blocks}")
        if self.load_factor != 0.0 and not 1.0 <= self.load_factor < math.inf:
            raise ValueError(
                f"load_factor must be 0 (no bound) or 1 and more, not {self.load_factor}"
            )


class ConsistentHash(Layered):
    """The next available target on the ring, after the conversation's place."""

    def __init__(self, dice: Random, options: ConsistentHashOptions) -> None:
        self._dice = dice
        self._options = options
        self._ring = HashRing()

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The conversation's own target, or the next one that may be."""
        allowed = self._allowed(targets)
        return choose_on_ring(
            self._ring, request, self._options.blocks, targets, allowed, self._dice
        )

    def forget(self, spot: Spot) -> None:
        """It leaves the ring; if it comes back, it comes back to its old place."""
        self._ring.forget(spot.name)

    def _allowed(self, targets: Sequence[Target]) -> Sequence[Target]:
        if not self._options.load_factor:
            return targets
        fair = (sum(target.load for target in targets) + 1) / len(targets)
        most = math.ceil(self._options.load_factor * fair)
        return [target for target in targets if target.load < most]


def choose_on_ring(
    ring: HashRing,
    request: Request,
    blocks: int,
    targets: Sequence[Target],
    allowed: Sequence[Target],
    dice: Random,
) -> Choice:
    """The first of `allowed` after the request's place on a ring of all `targets`."""
    ring.learn([target.name for target in targets])
    by_name = {target.name: target for target in allowed}
    key, why = conversation(request, blocks)
    name = None if key is None else ring.next(key, by_name)
    return Choice(dice.choice(allowed) if name is None else by_name[name], why)


def conversation(request: Request, blocks: int) -> tuple[int | None, str]:
    """What names the request's conversation, hashed, and in words."""
    if request.session is not None:
        return key_of(request.session), "ring: by its session"
    hashes = request.prompt.hashes
    if hashes:
        last = min(blocks, len(hashes))
        return key_of(str(hashes[last - 1])), f"ring: by its prompt's first {last} blocks"
    return None, "at random: no session, and a prompt shorter than a block"
