"""Policies with parts taken away: E2, in the order of its ablation (Preble, Figure 5), and `mesh`,
one term of its price or one thing that it knows at a time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import ClassVar

from mesh.core.model.request import Request, Served
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import PolicyMaker, PolicyMakers
from mesh.core.policies.base import CacheEstimate, Choice, Target
from mesh.core.policies.e2 import E2, E2Options
from mesh.core.policies.mesh import MeshPolicy
from mesh.core.policies.mesh_caches import CacheView
from mesh.core.policies.mesh_peers import PeerDelays
from mesh.core.policies.mesh_price import Price, PriceRow, PromptHolders
from mesh.core.policies.mesh_prices import ALL, Prices
from mesh.core.policies.mesh_speeds import SpeedModel
from mesh.sim.world import World

NEVER_WARM = 10**12  # requests per target before loads are compared: rebalancing never applies
OWN_TERMS = ("rtt", "queue", "prefill", "base", "memory", "others")  # of a price, less their `_s`


class PricesWithout(Prices):
    """Without one term. `whole`: the prices with it, by target, for what is learned from them."""

    term: ClassVar[str]
    whole: Mapping[str, Price]

    def rows(
        self, targets: Sequence[Target], holders: PromptHolders, most: int = ALL
    ) -> list[PriceRow]:
        """All rows: the sum is less by the term, which is 0 for all rules that read it."""
        prices = [Price._make(row) for row in super().rows(targets, holders)]
        self.whole = {one.target.name: one for one in prices}
        return [self._less(one) for one in prices]

    def _less(self, whole: Price) -> Price:
        place = Price._fields.index(self.term)
        values = [*whole]
        values[0], values[place] = whole.seconds - getattr(whole, self.term), 0.0
        return Price._make(values)


class PricesWithoutLine(Prices):
    """Requests held there neither go first nor wait behind ours."""

    def rows(
        self, targets: Sequence[Target], holders: PromptHolders, most: int = ALL
    ) -> list[PriceRow]:
        """As if none were held anywhere."""
        return super().rows([one._replace(ahead=0) for one in targets], holders, most)


class PricesWithoutWork(Prices):
    """Our prefill delays nobody who comes later."""

    def _weight_of_work(self, among: int) -> float:
        return 0.0


class PricesWithoutReturns(Prices):
    """The next turns of a conversation pay no round trip."""

    def rows(
        self, targets: Sequence[Target], holders: PromptHolders, most: int = ALL
    ) -> list[PriceRow]:
        """All rows: in other regions others pay less by the round trips."""
        prices = map(Price._make, super().rows(targets, holders))
        return [self._less(one, self._returns_s(one)) for one in prices]

    def _returns_s(self, one: Price) -> float:
        return self._speeds.returns * one.rtt_s

    def _less(self, one: Price, seconds: float) -> Price:
        return one._replace(seconds=one.seconds - seconds, others_s=one.others_s - seconds)


class CachesUnchecked(CacheView):
    """Estimates are not corrected by what was cached."""

    def check(self, request: Request, name: str, served: Served, estimate: CacheEstimate) -> None:
        """Learn nothing."""


class CachesWithoutNames(CacheView):
    """Which replica of a peer holds a prompt is not known."""

    def of(self, request: Request, targets: Sequence[Target]) -> PromptHolders:
        """Of peers, what the region holds."""
        return super().of(request, targets)._replace(named={})


class DelaysUnseen(PeerDelays):
    """What peers report is believed, however late their first tokens come."""

    def of(self, peer: str, now: float) -> float:
        """None."""
        return 0.0


def _without(term: str) -> type[Prices]:
    return type(f"PricesWithout_{term}", (PricesWithout,), {"term": f"{term}_s"})


PRICES: Mapping[str, type[Prices]] = {
    **{term: _without(term) for term in OWN_TERMS},
    "line": PricesWithoutLine,
    "work": PricesWithoutWork,
    "returns": PricesWithoutReturns,
}


class MeshWithout(MeshPolicy):
    """`mesh` without one of `PARTS`."""

    def __init__(self, settings: RouterSettings, dice: Random, part: str) -> None:
        super().__init__(settings, dice)
        self._kind = PRICES.get(part, Prices)
        if part == "misses":
            self._caches = CachesUnchecked(settings.index_blocks_max)
        elif part == "names":
            self._caches = CachesWithoutNames(settings.index_blocks_max)
        elif part == "delays":
            self._delays = DelaysUnseen()

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """By prices without the part. What is learned later is compared with the whole price, or
        speeds and delays would learn what was taken out."""
        choice = super().choose(request, targets, now)
        if isinstance(self._last, PricesWithout) and self._chosen is not None:
            key, price = self._chosen
            self._chosen = key, self._last.whole.get(price.target.name, price)
        return choice

    def _prices(self, speeds: SpeedModel, request: Request, now: float) -> Prices:
        self._last = self._kind(speeds, request, now, self._forwards, self._delays)
        return self._last


PARTS = (*PRICES, "misses", "names", "delays")


def _mesh_without(part: str) -> PolicyMaker:
    return lambda settings, dice: MeshWithout(settings, dice, part)


def with_ablations(makers: Callable[[World], PolicyMakers]) -> Callable[[World], PolicyMakers]:
    """The same policies and `e2-alone`, `e2-balanced`, and `mesh-without-` each of `PARTS`."""
    return lambda world: {
        **makers(world),
        **{f"mesh-without-{part}": _mesh_without(part) for part in PARTS},
        "e2-alone": lambda settings, dice: E2(
            dice,
            blocks_max=settings.index_blocks_max,
            window_s=E2Options().window_s,
            warm=NEVER_WARM,
        ),
        "e2-balanced": lambda settings, dice: E2(
            dice,
            blocks_max=settings.index_blocks_max,
            window_s=E2Options().window_s,
            imbalr=math.inf,
        ),
    }
