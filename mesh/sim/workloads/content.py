"""Content of synthetic prompts: ids and random seeds made from names, lengths, popularity.

A maker names what it makes ("doc", 17) and gets the id that this content has in every run and
process: 63 bits of a hash, so among a hundred million segments two different ones have equal ids
once in two thousand runs. Random numbers are seeded by names too, so a client's don't shift when
another client asks more.

Papers give lengths as mean and standard deviation. Token counts are positive and skewed, so they
are read as a log-normal with those two moments, cut at both ends. Popularity is Zipf's: the k-th of
n is requested k^-s as often as the first. Lengths of shared content are taken at quantiles that go
around the distribution evenly by rank (the golden-ratio sequence): under Zipf a few documents make
up half the traffic, and random lengths of the first three would decide the mean prompt.
"""

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist

import xxhash

from mesh.sim.workload import Segment

ID_MAX = 2**63 - 1
_GOLDEN = (math.sqrt(5) - 1) / 2
_STANDARD = NormalDist()


def segment_id(*names: str | int) -> int:
    """The id of the content with these names, 0 to ID_MAX."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, names)).encode()) & ID_MAX


def segment(tokens: int, *names: str | int) -> Segment:
    """The content with these names, at least a token long. The caller gives a name one length."""
    return Segment(segment_id(*names), max(1, tokens))


def seeded(*names: str | int) -> random.Random:
    """A random generator seeded by these names, the same under any PYTHONHASHSEED."""
    return random.Random(segment_id("chance", *names))


@dataclass(frozen=True, slots=True)
class Lengths:
    """A length in tokens with this mean and standard deviation, within `least` and `most`."""

    mean: float
    spread: float
    least: int = 1
    most: int = 1_000_000

    def draw(self, rng: random.Random) -> int:
        return self.at(rng.uniform(1e-9, 1 - 1e-9))

    def of_rank(self, rank: int) -> int:
        """The length of the `rank`-th most popular content, from 0."""
        return self.at((0.5 + rank * _GOLDEN) % 1.0 or 0.5)

    def at(self, quantile: float) -> int:
        """The length that a share `quantile` (above 0, below 1) of all lengths don't exceed."""
        variance = math.log1p((self.spread / self.mean) ** 2)
        middle = math.log(self.mean) - variance / 2
        length = math.exp(middle + math.sqrt(variance) * _STANDARD.inv_cdf(quantile))
        return min(max(round(length), self.least), self.most)


class Zipf:
    """Ranks 0 to n-1 with probabilities in proportion to (rank + 1)^-exponent."""

    def __init__(self, ranks: int, exponent: float) -> None:
        self._bounds = list(accumulate(math.pow(rank + 1, -exponent) for rank in range(ranks)))

    def share(self, rank: int) -> float:
        below = self._bounds[rank - 1] if rank else 0.0
        return (self._bounds[rank] - below) / self._bounds[-1]

    def draw(self, rng: random.Random) -> int:
        point = rng.random() * self._bounds[-1]
        return min(bisect_right(self._bounds, point), len(self._bounds) - 1)


def geometric(rng: random.Random, mean: float) -> int:
    """1, 2, 3, … with this mean (1 or more), each as likely relative to the one before."""
    if mean <= 1:
        return 1
    return 1 + int(math.log(1.0 - rng.random()) / math.log(1 - 1 / mean))
