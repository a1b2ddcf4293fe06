"""The links of a mesh on which what travels one way can be held, and delayed by chance."""

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from mesh.demo.wan_proxy import DelayLine, Item, WanProxy, _End

LATE_S = 0.1  # the mean, as in `tests.seeds`


class FaultyWan(WanProxy):
    """Way 0 leads to the target, way 1 back. How many faults hold or delay each now."""

    def __init__(self, *args: Any, dice: random.Random, **options: Any) -> None:
        """`dice`: for how late what travels is."""
        super().__init__(*args, **options)
        self.dice = dice
        self.held: Counter[int] = Counter()
        self.late: Counter[int] = Counter()
        self._flaps = 0

    @asynccontextmanager
    async def flapping(self) -> AsyncIterator[None]:
        """Its connections are lost, and both sides know at once; new ones are refused."""
        self._flaps += 1
        self.cut()
        try:
            yield
        finally:
            self._flaps -= 1
            if not self._flaps:
                await self.heal()

    @asynccontextmanager
    async def faulty(self, what: str, ways: Iterable[int]) -> AsyncIterator[None]:
        """Late: by chance. Stalled: what is held arrives afterwards. Cut: it is lost then, with its
        connections; until then neither side is told."""
        faults = self.late if what == "late" else self.held
        faults.update(ways)
        try:
            yield
        finally:
            faults.subtract(ways)
            for end in list(self._ends):
                end.abort() if what.startswith("cut") else end._arm()

    def _accept(self) -> _End:
        near = super()._accept()
        near._line, near.other._line = FaultyLine(self, 0), FaultyLine(self, 1)
        return near


class FaultyLine(DelayLine):
    """One way of one connection."""

    def __init__(self, wan: FaultyWan, way: int) -> None:
        super().__init__(wan.one_way_s)
        self._wan, self._way = wan, way

    def push(self, item: Item, now: float) -> None:
        """Let it enter."""
        late_s = self._wan.dice.expovariate(1.0 / LATE_S) if self._wan.late[self._way] else 0.0
        super().push(item, now + late_s)

    @property
    def next_due(self) -> float | None:
        """None while it is held."""
        return None if self._wan.held[self._way] else super().next_due

    def pop_due(self, now: float) -> list[Item]:
        """What has arrived: nothing while it is held."""
        return [] if self._wan.held[self._way] else super().pop_due(now)
