"""Consistent hashing: one conversation, one target, with no state but the targets' names.

What is hashed names the conversation: the session that the client gave, or else the first blocks
of the prompt, which the turns of a conversation share. Too few blocks, and all who share a system
prompt are one conversation; too many, and a first turn is shorter than them and its second one
goes elsewhere. 256 tokens is what SGLang's gateway takes for its `prefix_hash`.

`load_factor` c bounds the load (Mirrokni, Thorup and Zadimoghaddam, 2018): a target with c times
its fair share, the new request counted, is passed over, so that one hot key can't drown it. 0 is
the plain ring.

A consistent-hash ring with virtual nodes (Karger and others, 1997; as Envoy's ring hash).

Every name has many points of a circle; a key belongs to the first name at or after its own
point. A name that comes or goes moves only the keys at its points. The ring keeps names that are
not available at the moment, and a walk passes over them: a replica that is full for a second
must not move others' keys (SkyWalker 3.2, its second extension).

A fixed number of points per name, instead of a fixed size of the whole ring divided by the names:
then a new name moves no other points. The points come from the names alone, so all routers that
know the same names have the same ring.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass
from random import Random

import xxhash

from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Destination, Layered, Target

POINTS = 128  # per name: shares of the keys differ by some 9 % (1 / sqrt(POINTS))
NAMES_MAX = 4096  # beyond it, names of absent targets are dropped


def key_of(text: str) -> int:
    """A text's place on the circle."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


class HashRing:
    """Names on a circle."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self._points = array("Q")  # ascending; the name at each is at the same place in _names
        self._names: list[str] = []

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, names: Sequence[str]) -> None:
        new = dict.fromkeys(name for name in names if name not in self._known)
        if not new:
            return
        if len(self._known) + len(new) > NAMES_MAX:
            present = set(names)
            self._keep([name for name in self._known if name in present])
        points = list(zip(self._points, self._names, strict=True))
        points += [(key_of(f"{name}#{copy}"), name) for name in new for copy in range(POINTS)]
        self._known |= new
        self._set(sorted(points))

    def forget(self, name: str) -> None:
        if name in self._known:
            self._keep([other for other in self._known if other != name])

    def next(self, key: int, candidates: Container[str]) -> str | None:
        """The first candidate at or after `key`; None if the ring knows none of them."""
        names = self._names
        start = bisect_left(self._points, key)
        for place in range(start, len(names)):
            if names[place] in candidates:
                return names[place]
        for place in range(start):
            if names[place] in candidates:
                return names[place]
        return None

    def _keep(self, names: list[str]) -> None:
        self._known = dict.fromkeys(names)
        points = zip(self._points, self._names, strict=True)
        self._set([point for point in points if point[1] in self._known])

    def _set(self, points: list[tuple[int, str]]) -> None:
        self._points = array("Q", [point for point, _ in points])
        self._names = [name for _, name in points]


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

    def forget(self, spot: Destination) -> None:
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
