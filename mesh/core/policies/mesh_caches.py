"""What candidates hold of a prompt, for the `mesh` policy: estimates, and their correction.

`CacheView` estimates from three sources: the prompts placed there (held from placement on: until
it is computed, a prompt is in the queue that is priced as well); what peers announce; and answers,
which engines keep too. The next turn of a chat begins with the last prompt *and its answer*, whose
text a router doesn't read; so a prompt that continues exactly where a served one ended counts as
held as far as that prompt and its answer were long. What was forwarded to a peer counts as held
until it is answered; if the peer announces it by then, the peer alone says how long it holds it.

Estimates are checked against what engines report, unless their KV events say more. An engine evicts
by age: if it no longer had a block last used at time t, everything last used before t is gone as
well, and it keeps less than estimated. So both are reduced: the blocks, and the room that the owner
is credited with. Each confirmed hit gives a little room back. What no eviction explains, answer
after answer, is the engine's way: such estimates count no more (`mesh_trust.py`).
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import TypeVar

from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Request, Served
from mesh.core.policies.base import CacheEstimate, Destination, Target
from mesh.core.policies.mesh_price import HELD_NOTHING, HeldPrefix, PromptHolders
from mesh.core.policies.mesh_trust import CacheTrust
from mesh.core.prefixes.prefix_index import PrefixIndex
from schemas.decision import CandidateKind

ENDS_MAX = 131_072  # of served prompts, the oldest out first
MISS_BELOW = 0.75  # of the tokens estimated to be held: the router's count of them is a guess
# A younger block may still be computed: two prompts computed side by side both pay, and that is no
# eviction.
SETTLED_S = 5.0
SCALE_MIN = 0.1  # of an owner's room
SCALE_LOST = 0.25  # how far one miss goes from the room credited to what is left
SCALE_GAINED = 1.01  # by each confirmed hit
# A contradiction (`mesh_trust.py`): of an estimate of so many tokens, of fewer than which engines
# with large blocks keep nothing, less than this part was cached (an eviction takes the end of a
# prompt first), though what was placed since fills at most this part of the replica's room: the
# rest is for answers and running requests, which the index doesn't count.
CONTRADICTED_TOKENS_MIN = 256
CACHED_BELOW = 0.25
DISPLACED_MOST = 0.25
# Loading a block from a slower tier takes a share of the time that computing it would: a token of
# an 8B model has 128 KiB of KV, which PCIe moves in some 5 us and a local disk in some 30, where a
# prefill computes it in about 100. These are in round numbers; nothing measures a fleet's own.
LOADING_COSTS = (0.0, 0.1, 0.3)  # of computing a token: GPU, CPU, disk
NOT_ENDED: Mapping[str, int] = {}

K = TypeVar("K")
T = TypeVar("T")


class LayerCache:
    """Of replicas, or of peers: the index, and where its served prompts ended."""

    def __init__(self, blocks_max: int) -> None:
        self.index: PrefixIndex[str] = PrefixIndex(blocks_max)
        # Tokens of prompt and answer by owner, by the prompt's last block.
        self.ends: dict[int, dict[str, int]] = {}

    def of(self, request: Request, among: Sequence[Target]) -> dict[str, HeldPrefix]:
        """What each of these holds of the prompt, and perhaps what others do."""
        prompt = request.prompt
        held: dict[str, HeldPrefix] = {}
        most = max(0, prompt.tokens - 1)  # the last token is always computed
        # Of many owners only these are looked up; of few, a filter costs more than it saves.
        few = len(among) < self.index.owner_count
        only = [target.name for target in among] if few else None
        for depth, names in self.index.holders(prompt.hashes, only):
            plain = HeldPrefix(depth, min(prompt.held_tokens(depth), most))
            held.update(dict.fromkeys(names, plain))
            ends = self.ends.get(prompt.hashes[depth - 1])
            if ends is None:
                continue
            for name in ends.keys() & held.keys():
                if held[name] is plain and ends[name] > plain.tokens:
                    held[name] = HeldPrefix(depth, min(ends[name], most))
        if self.index.reporting:
            self._without_leaving(held, prompt)
        return with_loading(held, self.index, prompt)

    def _without_leaving(self, held: dict[str, HeldPrefix], prompt: Prompt) -> None:
        """Replicas that report will evict blocks for what is on its way to them."""
        for name in held.keys() & self.index.reporting:
            leaving, blocks = self.index.leaving(name), held[name].blocks
            stay = next((at for at in range(blocks) if prompt.hashes[at] in leaving), blocks)
            if stay < blocks:
                held[name] = HeldPrefix(stay, prompt.held_tokens(stay))

    def has_ended(self, blocks: Sequence[int]) -> bool:
        return not self.ends.keys().isdisjoint(blocks)

    def has_ended_on(self, name: str, blocks: Sequence[int]) -> bool:
        """Whether a prompt that ends with one of these was answered there."""
        return any(name in self.ends.get(block, NOT_ENDED) for block in reversed(blocks))

    def ended(self, name: str, last_block: int, tokens: int) -> None:
        """A prompt and its answer are held together."""
        ends = self.ends.pop(last_block, {})
        ends[name] = tokens
        keep(self.ends, last_block, ends, ENDS_MAX)


class CacheView:
    """What replicas and peers hold, and how much of their room replicas turned out to keep."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._replicas, self._peers = LayerCache(blocks_max), LayerCache(blocks_max)
        # Part of a replica's memory that keeps prompts; 1.0 where nothing is known.
        self.room_ratio: dict[str, float] = {}
        self._trust = CacheTrust()

    @property
    def indexes(self) -> Mapping[CandidateKind, PrefixIndex[str]]:
        return {CandidateKind.REPLICA: self._replicas.index, CandidateKind.PEER: self._peers.index}

    def of(self, request: Request, targets: Sequence[Target]) -> PromptHolders:
        """What each target holds of the prompt. `targets`: replicas before peers."""
        here = self._replicas.of(request, targets)
        if self._trust.mistrusted and here:
            self._trust.keep_believed(here, request.prompt.hashes[0])
        if targets[-1].peer is None:
            return PromptHolders(here, {})
        there = self._peers.of(request, targets)
        names = [one.name for one in targets if one.peer is not None]
        return PromptHolders(here, there, self._deepen(there, request, names))

    def deepest(self, request: Request, most: int, dice: Random) -> list[str]:
        """Up to `most` replicas, those that hold the most first; of equals, any."""
        found: list[str] = []
        for names in self._replicas.index.deepest(request.prompt.hashes):
            room = most - len(found)
            found += names if len(names) <= room else dice.sample(names, room)
            if len(found) >= most:
                break
        return found

    def goes_on(self, request: Request) -> bool:
        """Whether it begins with an earlier prompt and continues from its answer."""
        earlier = request.prompt.hashes[:-1]
        return self._replicas.has_ended(earlier) or self._peers.has_ended(earlier)

    def _deepen(
        self, there: dict[str, HeldPrefix], request: Request, names: Sequence[str]
    ) -> dict[str, dict[str, HeldPrefix]]:
        """Peers may announce more than was placed on them from here. Returns what they say that
        replicas of theirs hold."""
        prompt, announced = request.prompt, self._peers.index.announced
        if announced is None:
            return {}
        named: dict[str, dict[str, HeldPrefix]] = {}
        most = max(0, prompt.tokens - 1)
        for name, depths in announced.holders(prompt.hashes, names).items():
            known, depth = there.get(name, HELD_NOTHING), depths.pop("")
            if depth > known.blocks:
                ended = self._peers.ends.get(prompt.hashes[depth - 1], NOT_ENDED).get(name, 0)
                tokens = min(max(prompt.held_tokens(depth), ended), most)
                known = there[name] = HeldPrefix(depth, max(tokens, known.tokens))
            for replica, depth in depths.items():
                # Of an answer that followed the prompt only the region is known.
                tokens = min(prompt.held_tokens(depth), most)
                tokens = known.tokens if depth == known.blocks else tokens
                named.setdefault(name, {})[replica] = HeldPrefix(depth, tokens, replica)
        return named

    def hit_ratio(self, request: Request) -> float:
        return self._replicas.index.hit_ratio(request.prompt.hashes)

    def placed(self, request: Request, spot: Destination, now: float) -> CacheEstimate:
        """Its prompt is held there from now on. Returns what is relied on."""
        blocks, at = self._layer(spot).index.insert(spot.name, request.prompt.hashes, now)
        return CacheEstimate(blocks, at, now)

    def left(self, request: Request, spot: Destination, estimate: CacheEstimate) -> None:
        """It ended. If it was not computed, what it alone brought is not held."""
        if estimate.is_computed:
            return
        new = request.prompt.hashes[estimate.blocks :]
        self._layer(spot).index.retract(spot.name, new, estimate.placed_at)

    def served(
        self,
        request: Request,
        spot: Destination,
        served: Served,
        estimate: CacheEstimate | None = None,
    ) -> None:
        """Its answer is held too. Check the estimate against what was cached."""
        hashes = request.prompt.hashes
        if served.output_tokens is not None and hashes:
            tokens = request.prompt.tokens + served.output_tokens
            self._layer(spot).ended(spot.name, hashes[-1], tokens)
        # A region chooses among its replicas itself: a miss of one says nothing about the others.
        if estimate is None:
            return
        if spot.kind is CandidateKind.PEER:
            self._leave_to_peer(spot.name, hashes, estimate)
        else:
            self.check(request, spot.name, served, estimate)

    def _leave_to_peer(self, name: str, hashes: Sequence[int], estimate: CacheEstimate) -> None:
        """Of a prompt that a peer announces rely on that alone: it tells when it evicts it. What
        was forwarded there since may need the blocks that it shares."""
        index = self._peers.index
        if index.announced is None:
            return
        if index.announced.depths(hashes, (name,)).get(name) == len(hashes):
            index.retract(name, hashes, estimate.placed_at)

    def check(self, request: Request, name: str, served: Served, estimate: CacheEstimate) -> None:
        """Correct what a replica is taken to hold by what it turned out to have cached."""
        if served.cached_tokens is None or not estimate.blocks:
            return
        is_reported = name in self._replicas.index.reporting
        settled = not is_reported and estimate.placed_at - estimate.at >= SETTLED_S
        # Most answers teach nothing: what was placed lately may not have been computed then.
        low = served.cached_tokens < CACHED_BELOW * (served.prompt_tokens or request.prompt.tokens)
        if not (settled or low or self._trust.times):
            return
        scale = self.room_ratio.get(name, 1.0)
        if _is_confirmed(request, served, estimate):
            if self._trust.times:
                self._trust.confirmed(name, request.prompt.hashes[0])
            if settled:
                self.room_ratio[name] = min(1.0, scale * SCALE_GAINED)
            return
        if (low or self._trust.times) and self._is_unlearned(request, name, served, estimate):
            return
        if not settled:
            return
        index = self._replicas.index
        index.forget_until(name, estimate.at)
        left = min(1.0, index.blocks(name) / index.bound_of(name))
        self.room_ratio[name] = max(SCALE_MIN, scale - SCALE_LOST * scale * (1.0 - left))

    def _is_unlearned(
        self, request: Request, name: str, served: Served, estimate: CacheEstimate
    ) -> bool:
        """Note a contradiction. Returns whether such estimates count no more: then the miss says
        nothing about the replica's room, and nor did those before it."""
        first = request.prompt.hashes[0]
        contradicted = self._is_contradicted(request, name, served, estimate)
        if contradicted and self._trust.contradicted(name, first):
            self.room_ratio.pop(name, None)
        return not self._trust.believes(name, first)

    def _is_contradicted(
        self, request: Request, name: str, served: Served, estimate: CacheEstimate
    ) -> bool:
        """Whether next to nothing of what was estimated was cached, and no eviction explains it."""
        prompt, index = request.prompt, self._replicas.index
        tokens = prompt.held_tokens(estimate.blocks)
        least = tokens if served.prompt_tokens is None else min(tokens, served.prompt_tokens)
        if least < CONTRADICTED_TOKENS_MIN or _cached(request, served) >= CACHED_BELOW * tokens:
            return False
        before = prompt.hashes[: min(estimate.blocks, len(prompt.hashes) - 1)]
        was_computed = estimate.placed_at - estimate.at >= SETTLED_S
        if not was_computed and not self._replicas.has_ended_on(name, before):
            return False
        since = index.placed_since(name, estimate.at) - len(prompt.hashes)
        room = index.bound_of(name) / self.room_ratio.get(name, 1.0)
        return since <= DISPLACED_MOST * room

    def go_on_from(self, earlier: "CacheView") -> None:
        """Know the rest of what another one knows, whose indexes were taken over."""
        self.room_ratio = {**earlier.room_ratio}
        self._trust.go_on_from(earlier._trust)
        for layer, before in (self._replicas, earlier._replicas), (self._peers, earlier._peers):
            layer.ends = {block: {**tokens} for block, tokens in before.ends.items()}

    def fit(self, name: str, blocks: int) -> None:
        """A replica has memory for so many blocks, of which it keeps the part that misses left."""
        room = min(blocks, self._blocks_max)
        self._replicas.index.bound(name, int(room * self.room_ratio.get(name, 1.0)))

    def expire(self, now: float) -> None:
        self._replicas.index.expire(now)
        self._peers.index.expire(now)

    def forget(self, spot: Destination) -> None:
        # Where prompts ended counts only where their blocks are, so those stay.
        self._layer(spot).index.forget(spot.name)
        if spot.kind is CandidateKind.REPLICA:
            self.room_ratio.pop(spot.name, None)
            self._trust.forget(spot.name)

    def _layer(self, spot: Destination) -> LayerCache:
        return self._replicas if spot.kind is CandidateKind.REPLICA else self._peers


def _is_confirmed(request: Request, served: Served, estimate: CacheEstimate) -> bool:
    """Whether about as much was cached as estimated; engines round down to their blocks."""
    held = request.prompt.held_tokens(estimate.blocks - 1)
    return _cached(request, served) >= MISS_BELOW * held


def _cached(request: Request, served: Served) -> float:
    """How much of a prompt was cached, in the router's count of tokens."""
    assert served.cached_tokens is not None
    cached = float(served.cached_tokens)
    if served.prompt_tokens:
        cached *= request.prompt.tokens / served.prompt_tokens
    return cached


def keep(table: dict[K, T], key: K, value: T, most: int) -> None:
    """Enter a value; the oldest makes room."""
    if len(table) >= most:
        del table[next(iter(table))]
    table[key] = value


def with_loading(
    held: dict[str, HeldPrefix], index: PrefixIndex[str], prompt: Prompt
) -> dict[str, HeldPrefix]:
    """The same, with fewer tokens where some of them must be loaded."""
    for name in held.keys() & index.slow.keys():
        slow, prefix = index.slow[name], held[name]
        blocks = prompt.hashes[: prefix.blocks]
        cost = sum(LOADING_COSTS[slow[block]] for block in blocks if block in slow)
        tokens = max(0, prefix.tokens - round(cost * prompt.block_tokens))
        held[name] = prefix._replace(tokens=tokens)
    return held
