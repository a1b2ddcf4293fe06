"""What a sibling told the peers: we need not tell it too, unless the sibling is gone."""

from collections.abc import Callable, Collection, Sequence

from mesh.core.gossip.news import News
from mesh.core.gossip.shelf import Put
from mesh.core.gossip.told import Origin, ToldPrefixes, ToldShelf
from schemas.gossip import TrieDelta, TriePart
from schemas.ids import RouterId


class ToldBySibling(ToldShelf):
    """The shelf of one sibling's mirror.

    What a sibling told is told anew by the others when it is forgotten, each a part of it; what is
    used meanwhile, while it is only silent, is told by whoever places it. Nothing else is told for
    it: what it placed and did not tell may be a secret.
    """

    def __init__(
        self,
        told: ToldPrefixes,
        origin: Origin,
        news: News,
        heirs: Callable[[RouterId], tuple[int, int]],
        knows: Callable[[int], bool],
    ) -> None:
        """`heirs`: of one that is gone, how many they are and our place among them.
        `knows`: whether a block is held here."""
        super().__init__(told, origin)
        self._news = news
        self._heirs = heirs
        self._knows = knows
        self._set: Callable[[], Collection[int]] = lambda: told.blocks(origin)

    def take(self, delta: TrieDelta, now: float) -> bool:
        """What it gained and lost."""
        self._news.told_elsewhere(delta.gained)
        return super().take(delta, now)

    def put(self, parts: Sequence[TriePart], asked_at: float, now: float) -> Put:
        """Its whole set."""
        for part in parts:
            self._news.told_elsewhere(part.blocks)
        return super().put(parts, asked_at, now)

    def forget(self) -> None:
        """It is gone, or starts anew with nothing told."""
        left = [*self._set()]
        super().forget()
        if left:
            count, place = self._heirs(self._origin.router)
            self._news.inherit(
                [block for block in left if block % count == place and self._knows(block)]
            )
