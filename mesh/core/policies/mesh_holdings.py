"""What each candidate holds of a prompt, as the `mesh` policy believes it.

Three sources. The prefix index has the prompts whose first token has come: while a prompt is being
computed it is nobody's to share. Peers tell what others had computed there. And an engine keeps
its answers too: the next turn of a chat, the next step of an agent, the branches of a tree all
begin with the last prompt *and its answer*, whose text a router doesn't read. So a prompt that
goes on exactly where a served one ended is believed to be held as far as that one's prompt and
answer were long.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mesh.core.gossip.news import News
from mesh.core.gossip.told import ToldPrefixes
from mesh.core.policies.base import Spot, Target
from mesh.core.prefix_index import PrefixIndex
from mesh.core.request import Request
from schemas.decision import CandidateKind

ENDS_MAX = 131_072  # of served prompts, the oldest out first


class Held(NamedTuple):
    """Leading part of a prompt."""

    blocks: int
    tokens: int


NOTHING = Held(0, 0)


class Holdings:
    """One index for replicas, one for peers; and where served prompts ended."""

    def __init__(self, blocks_max: int) -> None:
        self._index: dict[CandidateKind, PrefixIndex[str]] = {
            kind: PrefixIndex(blocks_max) for kind in CandidateKind
        }
        # Tokens of prompt and answer, by place and the prompt's last block.
        self._ends: dict[tuple[Spot, int], int] = {}
        self._told = ToldPrefixes()

    def tell(self, news: News) -> None:
        """Say there what replicas come to hold and lose."""
        self._index[CandidateKind.REPLICA].news = news

    def hear(self, told: ToldPrefixes) -> None:
        """Look there for what peers say."""
        self._told = told

    def of(self, request: Request, targets: Sequence[Target]) -> dict[Spot, Held]:
        """What each target holds of the prompt; those that hold nothing are left out."""
        prompt = request.prompt
        held: dict[Spot, Held] = {}
        for kind, index in self._index.items():
            names = [target.name for target in targets if target.kind is kind]
            depths = index.depths(prompt.hashes, names)
            if kind is CandidateKind.PEER:
                depths = self._told.deepen(depths, prompt.hashes, names)
            for name, depth in depths.items():
                spot = Spot(kind, name)
                tokens = max(
                    round(depth * prompt.block_tokens),
                    self._ends.get((spot, prompt.hashes[depth - 1]), 0),
                )
                held[spot] = Held(depth, min(tokens, prompt.tokens - 1))
        return held

    def hit_ratio(self, request: Request) -> float:
        """Of the longest match that any replica here has."""
        return self._index[CandidateKind.REPLICA].hit_ratio(request.prompt.hashes)

    def computed(self, request: Request, spot: Spot, now: float) -> None:
        """Its prompt is there from now on."""
        self._index[spot.kind].insert(spot.name, request.prompt.hashes, now)

    def answered(self, request: Request, spot: Spot, output_tokens: int) -> None:
        """And its answer."""
        if not request.prompt.hashes:
            return
        key = spot, request.prompt.hashes[-1]
        self._ends.pop(key, None)
        self._ends[key] = request.prompt.tokens + output_tokens
        if len(self._ends) > ENDS_MAX:
            del self._ends[next(iter(self._ends))]

    def fit(self, name: str, blocks: int) -> None:
        """A replica has memory for no more than so many blocks."""
        self._index[CandidateKind.REPLICA].bound(name, blocks)

    def forget(self, spot: Spot) -> None:
        """All it held is gone. Where prompts ended counts only where their blocks are."""
        self._index[spot.kind].forget(spot.name)
