"""What each candidate holds of a prompt, as the `mesh` policy believes it.

Three sources. The prefix index has the prompts that were placed. Peers tell what others had
computed there. And an engine keeps its answers too: the next turn of a chat, the next step of an
agent, the branches of a tree all begin with the last prompt *and its answer*, whose text a router
doesn't read. So a prompt that goes on exactly where a served one ended is believed to be held as
far as that one's prompt and answer were long.

Beliefs are checked against what engines report. An engine evicts what was used longest ago: if
it did not have a block any more that was last used at time t, everything last used before t has
gone as well, and it keeps less than we thought. So both are taken back: the blocks, and a part
of the room that the owner is believed to have. Each hit that came true gives a little room back.

Rejected: taking out the missed prompt alone. It is there again, just computed; it is its
neighbours of the same age that would each cost another miss.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from mesh.core.model.request import Request, Served
from mesh.core.policies.base import Destination, Target
from mesh.core.prefixes.prefix_index import PrefixIndex
from schemas.decision import CandidateKind

ENDS_MAX = 131_072  # of served prompts, the oldest out first
MISS_BELOW = 0.75  # of the tokens that were believed to be held: our count of them is a guess
# A block younger than this may be on its way still: two prompts that are computed side by side
# both pay, and that is nobody's eviction.
SETTLED_S = 5.0
SCALE_MIN = 0.1  # of an owner's room that is always believed in
SCALE_LOST = 0.25  # how far one miss goes from what was believed to what is left
SCALE_GAINED = 1.01  # by each hit that came true


class HeldPrefix(NamedTuple):
    """Leading part of a prompt."""

    blocks: int
    tokens: int


class PromptHolders(NamedTuple):
    """Who holds something of a prompt, by name; others hold nothing of it."""

    here: Mapping[str, HeldPrefix]  # replicas
    there: Mapping[str, HeldPrefix]  # peers


class CacheEstimate(NamedTuple):
    """What one placement relied on: blocks, and when the deepest of them was placed there."""

    blocks: int
    at: float
    placed_at: float
    is_computed: bool = False  # its first token has come


HELD_NOTHING = HeldPrefix(0, 0)


class LayerCache:
    """The holdings of one layer: its index, and where its served prompts ended."""

    def __init__(self, blocks_max: int) -> None:
        self.index: PrefixIndex[str] = PrefixIndex(blocks_max)
        # Tokens of prompt and answer by owner, by the prompt's last block.
        self._completion: dict[int, dict[str, int]] = {}

    def of(self, request: Request, among: Sequence[Target]) -> dict[str, HeldPrefix]:
        """What each of these holds of the prompt, and maybe what others do."""
        prompt = request.prompt
        held: dict[str, HeldPrefix] = {}
        most = max(0, prompt.tokens - 1)  # the last token is always computed
        # Of many owners few are asked about; of few, telling them apart is not worth its time.
        few = len(among) < self.index.owner_count
        only = [target.name for target in among] if few else None
        for depth, names in self.index.holders(prompt.hashes, only):
            plain = HeldPrefix(depth, min(prompt.held_tokens(depth), most))
            held.update(dict.fromkeys(names, plain))
            ends = self._completion.get(prompt.hashes[depth - 1])
            if ends is None:
                continue
            for name in ends.keys() & held.keys():
                if held[name] is plain and ends[name] > plain.tokens:
                    held[name] = HeldPrefix(depth, min(ends[name], most))
        return held

    def has_ended(self, blocks: Sequence[int]) -> bool:
        """Whether a served prompt ended with one of them."""
        return not self._completion.keys().isdisjoint(blocks)

    def ended(self, name: str, last_block: int, tokens: int) -> None:
        """A prompt and its answer are there together."""
        ends = self._completion.pop(last_block, {})
        ends[name] = tokens
        self._completion[last_block] = ends
        if len(self._completion) > ENDS_MAX:
            del self._completion[next(iter(self._completion))]


class CacheView:
    """A shelf for replicas, one for peers; and how much room owners turned out to have."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._replicas, self._peers = LayerCache(blocks_max), LayerCache(blocks_max)
        self._scale: dict[str, float] = {}  # of a replica's room; 1.0 where nothing is known

    @property
    def indexes(self) -> Mapping[CandidateKind, PrefixIndex[str]]:
        """The replicas' prompts, and the peers'."""
        return {CandidateKind.REPLICA: self._replicas.index, CandidateKind.PEER: self._peers.index}

    def of(self, request: Request, targets: Sequence[Target]) -> PromptHolders:
        """What each target holds of the prompt."""
        here = self._replicas.of(request, targets)
        peers = [target.name for target in targets if target.peer is not None]
        if not peers:
            return PromptHolders(here, {})
        there = self._peers.of(request, targets)
        self._deepen(there, request, peers)
        return PromptHolders(here, there)

    def deepest(self, request: Request, most: int, dice: Random) -> list[str]:
        """Up to `most` replicas, those that hold the most first; of equals, any."""
        found: list[str] = []
        for _, names in reversed(self._replicas.index.holders(request.prompt.hashes)):
            room = most - len(found)
            found += names if len(names) <= room else dice.sample(names, room)
            if len(found) >= most:
                break
        return found

    def goes_on(self, request: Request) -> bool:
        """Whether it begins with an earlier prompt and goes on from its answer."""
        earlier = request.prompt.hashes[:-1]
        return self._replicas.has_ended(earlier) or self._peers.has_ended(earlier)

    def _deepen(self, there: dict[str, HeldPrefix], request: Request, names: Sequence[str]) -> None:
        """Peers may know better than we what they hold."""
        prompt = request.prompt
        known = {name: held.blocks for name, held in there.items()}
        for name, depth in self._peers.index.deepen(known, prompt.hashes, names).items():
            if depth > there.get(name, HELD_NOTHING).blocks:
                tokens = min(prompt.held_tokens(depth), max(0, prompt.tokens - 1))
                there[name] = HeldPrefix(depth, max(tokens, there.get(name, HELD_NOTHING).tokens))

    def hit_ratio(self, request: Request) -> float:
        """Of the longest match that any replica here has."""
        return self._replicas.index.hit_ratio(request.prompt.hashes)

    def estimate(self, request: Request, spot: Destination, now: float) -> CacheEstimate:
        """What is relied on if the prompt goes there now; ask before it is `computed`."""
        blocks, at = self._shelf(spot).index.depth(spot.name, request.prompt.hashes)
        return CacheEstimate(blocks, at, now)

    def computed(self, request: Request, spot: Destination, now: float) -> None:
        """Its prompt is there from now on."""
        self._shelf(spot).index.insert(spot.name, request.prompt.hashes, now)

    def left(self, request: Request, spot: Destination, estimate: CacheEstimate) -> None:
        """It ended. If it was not computed, its prompt isn't there, but for what others brought."""
        if estimate.is_computed:
            return
        new = request.prompt.hashes[estimate.blocks :]
        self._shelf(spot).index.retract(spot.name, new, estimate.placed_at)

    def served(
        self,
        request: Request,
        spot: Destination,
        served: Served,
        estimate: CacheEstimate | None = None,
    ) -> None:
        """Its answer is there too; and was its beginning, as it was believed?"""
        hashes = request.prompt.hashes
        if served.output_tokens is not None and hashes:
            tokens = request.prompt.tokens + served.output_tokens
            self._shelf(spot).ended(spot.name, hashes[-1], tokens)
        # A region chooses among its replicas itself: what one of them lacks says nothing.
        if estimate is not None and spot.kind is CandidateKind.REPLICA:
            self._check(request, spot.name, served, estimate)

    def _check(self, request: Request, name: str, served: Served, estimate: CacheEstimate) -> None:
        settled = estimate.placed_at - estimate.at >= SETTLED_S
        if served.cached_tokens is None or not estimate.blocks or not settled:
            return
        scale = self._scale.get(name, 1.0)
        if _came_true(request, served, estimate):
            self._scale[name] = min(1.0, scale * SCALE_GAINED)
            return
        index = self._replicas.index
        index.forget_until(name, estimate.at)
        left = min(1.0, index.blocks(name) / index.bound_of(name))
        self._scale[name] = max(SCALE_MIN, scale - SCALE_LOST * scale * (1.0 - left))

    def fit(self, name: str, blocks: int) -> None:
        """A replica has memory for no more than so many blocks, and did not keep all of them."""
        room = min(blocks, self._blocks_max)
        self._replicas.index.bound(name, int(room * self._scale.get(name, 1.0)))

    def room_ratio(self, name: str) -> float:
        """Part of a replica's memory that is believed to keep prompts."""
        return self._scale.get(name, 1.0)

    def expire(self, now: float) -> None:
        """Let go of some of what is too old."""
        self._replicas.index.expire(now)
        self._peers.index.expire(now)

    def forget(self, spot: Destination) -> None:
        """All it held is gone. Where prompts ended counts only where their blocks are."""
        self._shelf(spot).index.forget(spot.name)
        if spot.kind is CandidateKind.REPLICA:
            self._scale.pop(spot.name, None)

    def _shelf(self, spot: Destination) -> LayerCache:
        return self._replicas if spot.kind is CandidateKind.REPLICA else self._peers


def _came_true(request: Request, served: Served, estimate: CacheEstimate) -> bool:
    """Whether about as much was cached as was believed; engines round down to their blocks."""
    assert served.cached_tokens is not None
    prompt, cached = request.prompt, float(served.cached_tokens)
    if served.prompt_tokens:
        cached *= prompt.tokens / served.prompt_tokens  # in our count of tokens
    return cached >= MISS_BELOW * prompt.held_tokens(estimate.blocks - 1)
