"""Power of two choices: of two targets taken at random, the less loaded one.

Two probes keep the longest queue almost as short as examining all would, and routers with old
information don't all pick the same emptiest replica (Mitzenmacher, 2001).
"""

from collections.abc import Sequence
from random import Random

from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Layered, Score, Target, least_loaded
from schemas.ids import ModelId


class PowerOfTwo(Layered):
    """The less loaded of two."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """One of two, or the only one."""
        two = sample_two(targets, self._dice)
        target = min(two, key=_load)
        looked_at = [Score(one, terms={"load": float(one.load)}) for one in two]
        loads = " and ".join(str(one.load) for one in two)
        return Choice(target, f"less loaded of two: {loads} requests", scores=looked_at)


def sample_two(targets: Sequence[Target], dice: Random) -> list[Target]:
    """Two different targets in random order, so that a tie is no one's advantage; or the one."""
    return dice.sample(targets, min(2, len(targets)))


def _load(target: Target) -> int:
    return target.load


# Least load: the target with the fewest requests in it or on their way there.


class LeastLoad(Layered):
    """Fewest requests; ties at random."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The least loaded target."""
        target = least_loaded(targets, self._dice)
        return Choice(target, f"least load: {target.load} requests")


# Round robin: each in turn, by name; the baseline without information. The turn is kept as a name,
# not an index, so that targets that become available or full don't favour the first one; and per
# model, so that one model's requests don't skip the turn of another's replicas.


MODELS_MAX = 256  # whose turns are remembered; the longest unused is forgotten


class RoundRobin(Layered):
    """Next in order of name after the last one chosen."""

    def __init__(self) -> None:
        self._last: dict[ModelId, str] = {}

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The next target in turn."""
        ordered = sorted(targets, key=_name)
        last = self._last.pop(request.model, "")
        target = next((target for target in ordered if target.name > last), ordered[0])
        if len(self._last) >= MODELS_MAX:
            del self._last[next(iter(self._last))]
        self._last[request.model] = target.name
        return Choice(target, "next in turn")


def _name(target: Target) -> str:
    return target.name
