"""Is the router that asked still there? Its sign of life says so, every 500 ms.

A router that is silent for 3 s, or comes back with a new epoch, will never read its old answers:
the engine must not go on generating them. Only routers with answers here are judged. Signs of
the others are remembered (a bounded table), so that a router's restart between its first sign
and its first answer here is noticed as well; a router never heard of gets its 3 s from its
first work.
"""

from dataclasses import dataclass
from typing import NamedTuple

from schemas.ids import RegionId, RouterId

SILENCE_S = 3.0
ROUTERS_MAX = 1024


class RouterName(NamedTuple):
    """Router names are unique inside a region only."""

    region: RegionId
    router: RouterId


@dataclass(slots=True)
class _Sign:
    seen_at: float
    epoch: int | None
    answers: int


class RouterWatch:
    """Fed with signs of life and with the begin and end of answers."""

    __slots__ = ("_signs",)

    def __init__(self) -> None:
        self._signs: dict[RouterName, _Sign] = {}

    def join(self, name: RouterName, now: float) -> None:
        """One more answer for this router. Pair with `leave`."""
        sign = self._signs.get(name)
        if sign is None:
            sign = self._enter(name, now, None)
        elif sign.answers == 0:
            sign.seen_at = now
        sign.answers += 1

    def leave(self, name: RouterName) -> None:
        self._signs[name].answers -= 1

    def seen(self, name: RouterName, epoch: int, now: float) -> bool:
        """Note a sign of life. True when the router restarted since its last one."""
        sign = self._signs.get(name)
        if sign is None:
            self._enter(name, now, epoch)
            return False
        restarted = sign.epoch is not None and sign.epoch != epoch
        sign.seen_at, sign.epoch = now, epoch
        return restarted

    def silent(self, now: float) -> list[RouterName]:
        """Routers with answers here whose last sign is too old."""
        return [
            name
            for name, sign in self._signs.items()
            if sign.answers and now - sign.seen_at >= SILENCE_S
        ]

    def _enter(self, name: RouterName, now: float, epoch: int | None) -> _Sign:
        if len(self._signs) >= ROUTERS_MAX:
            self._forget_one()
        sign = self._signs[name] = _Sign(now, epoch, 0)
        return sign

    def _forget_one(self) -> None:
        idle = [(sign.seen_at, name) for name, sign in self._signs.items() if not sign.answers]
        if idle:
            del self._signs[min(idle)[1]]
