"""Which beginnings of prompts are shared, how often, and which of them are kept as text.

A prompt that leaves the known paths after n blocks leaves them at a *fork*. Where several did so, a
common part ends: a system prompt, a document, a tool's manual. The turns of one conversation follow
each other and fork once each, so long conversations don't count as shared text (the key portions of
Preble, section 3.1, without a tree). Only prompts of this router's own clients count, because only
what is kept as text can be computed again. Uses fade with a time constant.

`DemandTrend` compares the region's recent arrivals with those of a longer time. A rise shows within
minutes, and an hour's rise leaves most of it to come. Rejected: a table of the day's hours (a week
of learning, and wrong on the first unusual day) and peaks that an operator writes down. A router
that has just started sees a rise for about three times `trend_s`.
"""

from dataclasses import dataclass
from math import exp

from mesh.core.model.prompt import Prompt
from mesh.core.model.rates import EventRate
from mesh.core.model.request import Request
from schemas.ids import ModelId
from schemas.residency import Labels, narrowed

SHORT = 0.25  # of the longer time
RISE = 1.05  # chance alone reaches this ratio with some hundred requests in the shorter time


class DemandTrend:
    """Of one router's own clients."""

    def __init__(self, trend_s: float) -> None:
        """`trend_s`: the longer time, in seconds."""
        self._short, self._long = EventRate(SHORT * trend_s), EventRate(trend_s)

    def arrived(self, now: float) -> None:
        self._short.count(now)
        self._long.count(now)

    def rises(self, now: float) -> bool:
        short = self._short.per_s(now)
        return short > 0.0 and short >= RISE * self._long.per_s(now)


SEEN_MAX = 131_072  # blocks remembered, the longest unused out first: 32 MiB of text
FORKS_MAX = 8192
WANTED_MAX = 64  # requested of the edge, without an answer yet
TOKENS_MIN = 512  # shorter ones are not worth it
FORKED_MIN = 2  # then three prompts continued differently from here
USES_MIN = 3.0


@dataclass(slots=True)
class Uses:
    """A count that fades."""

    count: float = 0.0
    at: float = 0.0

    def add(self, now: float, recent_s: float) -> None:
        self.count = self.faded(now, recent_s) + 1.0
        self.at = now

    def faded(self, now: float, recent_s: float) -> float:
        return self.count * exp((self.at - now) / recent_s)


@dataclass(slots=True)
class Fork:
    """A place where prompts part: how many did, and recent uses."""

    uses: Uses
    forked: int = 0
    is_barred: bool = False  # it can't be kept, or no replica may or can compute it


@dataclass(slots=True)
class HotPrefix:
    """A prefix whose text the edge keeps.

    `residency`: the labels common to the request that the text is from and all that began with it
    since.
    """

    model: ModelId
    prompt: Prompt
    residency: Labels
    fork: Fork
    body_bytes: int = 0

    @property
    def name(self) -> int:
        """Its last block's hash, which covers model, salt and all of the text."""
        return self.prompt.hashes[-1]


class HotPrefixes:
    """Counts every client's prompt. `dropped`: what the edge must drop."""

    def __init__(self, bytes_max: int, recent_s: float) -> None:
        """`bytes_max`: of the bodies that are kept; `recent_s`: how soon uses fade."""
        self._bytes_max = bytes_max
        self._recent_s = recent_s
        self._seen: dict[int, None] = {}
        self._forks: dict[int, Fork] = {}
        self._wanted: dict[int, HotPrefix] = {}
        self._kept: dict[int, HotPrefix] = {}
        self._all = Uses()
        self.kept_bytes = 0
        self.dropped: list[int] = []

    def __len__(self) -> int:
        return len(self._kept)

    def saw(self, request: Request, now: float) -> HotPrefix | None:
        """A client's request. Returns what to keep of its prompt: one prefix at most, as the edge
        reads the whole body for each; deeper ones follow with later requests.
        """
        self._all.add(now, self._recent_s)
        hashes = request.prompt.hashes
        first = int(TOKENS_MIN / request.prompt.block_tokens)
        depth = self._depth(hashes)
        self._remember(hashes)
        passed = [at for at in range(first, depth) if hashes[at] in self._forks]
        for at in passed:
            self._forks[hashes[at]].uses.add(now, self._recent_s)
        if depth > first:
            self._part(hashes[depth - 1], now)
        new = None
        for at in dict.fromkeys([*passed, depth - 1]) if depth > first else {}:
            if not self._narrow(hashes[at], request) and new is None:
                new = self._want(request, at + 1, now)
        return new

    def keep(self, name: int, body_bytes: int | None) -> bool:
        """The edge keeps it in so many bytes; None: it can't. Whether it is kept from now on."""
        if body_bytes is None:
            self.bar(name)  # or every request that begins so would be read in vain
            return False
        kept = self._wanted.pop(name, None)
        if kept is None:
            self.dropped.append(name)
            return False
        kept.body_bytes = body_bytes
        self._kept[name] = kept
        self.kept_bytes += body_bytes
        while self.kept_bytes > self._bytes_max:
            least = min(self._kept.values(), key=lambda one: (one.fork.uses.at, one.name))
            self.drop(least.name)
        return name in self._kept

    def bar(self, name: int) -> None:
        """Don't keep it, now and later."""
        if (fork := self._forks.get(name)) is not None:
            fork.is_barred = True
        self.drop(name)

    def drop(self, name: int) -> None:
        """Keep its text no longer."""
        self._wanted.pop(name, None)
        if (kept := self._kept.pop(name, None)) is not None:
            self.kept_bytes -= kept.body_bytes
            self.dropped.append(name)

    def hottest(self, most: int, now: float) -> list[HotPrefix]:
        """Kept prefixes with enough recent uses, the most used first."""
        uses = {name: self._uses(kept.fork, now) for name, kept in self._kept.items()}
        names = sorted(uses, key=lambda name: (-uses[name], name))[:most]
        return [self._kept[name] for name in names if uses[name] >= USES_MIN]

    def share(self, kept: HotPrefix, now: float) -> float:
        """Part of recent requests that begin with it, 0 to 1."""
        return min(1.0, self._uses(kept.fork, now) / self._all.faded(now, self._recent_s))

    def _uses(self, fork: Fork, now: float) -> float:
        return fork.uses.faded(now, self._recent_s)

    def _depth(self, hashes: tuple[int, ...]) -> int:
        for depth, block in enumerate(hashes):
            if block not in self._seen:
                return depth
        return len(hashes)

    def _remember(self, hashes: tuple[int, ...]) -> None:
        seen = self._seen
        for block in reversed(hashes):  # a path's end is dropped before its beginning
            seen.pop(block, None)
            seen[block] = None
        while len(seen) > SEEN_MAX:
            del seen[next(iter(seen))]

    def _part(self, block: int, now: float) -> None:
        fork = self._forks.pop(block, None)
        if fork is None:
            fork = Fork(Uses(1.0, now))  # the prompt that made the path
            fork.uses.add(now, self._recent_s)
        fork.forked += 1
        self._forks[block] = fork
        while len(self._forks) > FORKS_MAX:
            oldest = next(iter(self._forks))
            del self._forks[oldest]
            self.drop(oldest)

    def _narrow(self, name: int, request: Request) -> bool:
        """Whether it is kept or requested. If so, this request's labels restrict it."""
        known = self._kept.get(name) or self._wanted.get(name)
        if known is None:
            return False
        both = narrowed(known.residency, request.residency)
        if both is not None and not both:
            self.bar(name)
        known.residency = tuple(sorted(both or ()))
        return True

    def _want(self, request: Request, blocks: int, now: float) -> HotPrefix | None:
        """The prefix of so many blocks, to be kept, if it is hot."""
        hashes = request.prompt.hashes[:blocks]
        fork = self._forks.get(hashes[-1])
        if fork is None or fork.is_barred or len(self._wanted) >= WANTED_MAX:
            return None
        if fork.forked < FORKED_MIN or self._uses(fork, now) < USES_MIN:
            return None
        prompt = request.prompt.beginning(blocks)
        kept = HotPrefix(request.model, prompt, request.residency, fork)
        self._wanted[kept.name] = kept
        return kept
