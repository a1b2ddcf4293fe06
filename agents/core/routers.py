"""Is the router that asked still there? Its sign of life says so, every 500 ms.

A router that is silent for 3 s, or comes back with a new epoch, will never read its old answers:
the engine must not go on generating them. One of another region has 7 s, in which a link between
regions that broke is mended; it waits as long for an agent that it does not hear. Only routers
with answers here are judged. Signs of the others are remembered (a bounded table), so that a
router's restart between its first sign and its first answer here is noticed as well; a router
never heard of gets its time from its first work.

A sign that comes after others were missed says that the way to the router may have been cut, and
what was sent meanwhile lost. While the agent's own bus is away nobody can be heard, so nobody is
silent, for AWAY_S_MAX; when it is back everybody has their time anew. The same after the agent
itself stood still: signs that came meanwhile wait unread in its socket.
"""

from dataclasses import dataclass
from typing import NamedTuple

from schemas.exchange import ALIVE_S
from schemas.ids import RegionId, RouterId

MISSED_S = ALIVE_S + 0.4
SILENCE_S, SILENCE_ABROAD_S = 3.0, 7.0
AWAY_S_MAX = 30.0  # the engine's time is spent for clients who may have left long ago
ROUTERS_MAX = 1024


class RouterName(NamedTuple):
    """Router names are unique inside a region only."""

    region: RegionId
    router: RouterId


class Heard(NamedTuple):
    """What a sign of life says."""

    restarted: bool  # since its last sign
    again: bool  # what was sent to it lately may be lost


@dataclass(slots=True)
class _Sign:
    seen_at: float
    epoch: int | None
    answers: int
    cut_off: bool = False  # the bus was away since its last sign


class RouterWatch:
    """Fed with signs of life, with the begin and end of answers, and with losses of the bus."""

    __slots__ = ("_away_since", "_region", "_signs")

    def __init__(self, region: RegionId) -> None:
        """Of an agent of that region."""
        self._region = region
        self._signs: dict[RouterName, _Sign] = {}
        self._away_since: float | None = None

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

    def seen(self, name: RouterName, epoch: int, now: float) -> Heard:
        """Note a sign of life."""
        sign = self._signs.get(name)
        if sign is None:
            self._enter(name, now, epoch)
            return Heard(restarted=False, again=False)
        restarted = sign.epoch is not None and sign.epoch != epoch
        again = sign.cut_off or now - sign.seen_at >= MISSED_S
        sign.seen_at, sign.epoch, sign.cut_off = now, epoch, False
        return Heard(restarted, again)

    def bus_lost(self, now: float) -> None:
        """Nobody is heard any more."""
        if self._away_since is None:
            self._away_since = now

    def bus_returned(self, now: float) -> None:
        """Everybody may be heard again."""
        self._away_since = None
        self.wait_anew(now)

    def wait_anew(self, now: float) -> None:
        """Nobody could be heard until now: silence is counted from here on."""
        for sign in self._signs.values():
            sign.seen_at, sign.cut_off = now, True

    def silent(self, now: float) -> list[RouterName]:
        """Routers with answers here whose last sign is too old."""
        if self._away_since is not None:
            lost = now - self._away_since >= AWAY_S_MAX
            return [name for name, sign in self._signs.items() if lost and sign.answers]
        return [
            name
            for name, sign in self._signs.items()
            if sign.answers and now - sign.seen_at >= self._patience_s(name)
        ]

    def _patience_s(self, name: RouterName) -> float:
        return SILENCE_S if name.region == self._region else SILENCE_ABROAD_S

    def _enter(self, name: RouterName, now: float, epoch: int | None) -> _Sign:
        if len(self._signs) >= ROUTERS_MAX:
            self._forget_one()
        sign = self._signs[name] = _Sign(now, epoch, 0)
        return sign

    def _forget_one(self) -> None:
        idle = [(sign.seen_at, name) for name, sign in self._signs.items() if not sign.answers]
        if idle:
            del self._signs[min(idle)[1]]
