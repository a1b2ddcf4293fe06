"""Figures of one policy in one cell, with what they would have been on resampled requests.

A figure is an array of rows: the value itself, then `DRAWS` values of a block bootstrap, then one
value for each seed alone. The bootstrap draws blocks of consecutive requests within each seed,
because requests that follow each other share a queue. All policies of a cell have the same requests
in the same order, and are given the same draws: rows are paired, so their ratio is taken row by
row. Cells have draws of their own, so that their errors don't add up in a mean over cells. The
interval of a ratio holds 95% of the draws, and every seed's own value: two seeds that disagree
widen it.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tests.programs.studies.tables.client_view import IN_TIME, LOST
from tests.programs.studies.tables.result_files import Result

DRAWS, BLOCK = 400, 25
BLOCK_SATURATED = 100  # requests: queues are longer, so requests further apart share one
COUNTED, ROUNDING = 0.9, 1e-9  # of the tokens
SECONDS_LEAST, TOKENS_LEAST = 1e-3, 1e-6  # none at all would make ratios infinite
INTERVAL = (2.5, 97.5)  # percent

Rows = NDArray[np.float64]
Figure = Callable[["Sample"], Rows]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value, and the range in which a difference means nothing."""

    value: float
    low: float
    high: float


def interval(rows: Rows) -> Interval:
    """Of a figure's rows, or of a ratio's."""
    low, high = np.percentile(rows[1 : 1 + DRAWS], INTERVAL)
    seeds = rows[1 + DRAWS :]
    return Interval(float(rows[0]), float(min(low, *seeds)), float(max(high, *seeds)))


def geomean(ratios: Sequence[Rows]) -> Rows:
    """Row by row; of the seeds those that all have."""
    rows = min(len(one) for one in ratios)
    return np.exp(np.mean([np.log(one[:rows]) for one in ratios], axis=0))


def weights(lengths: Sequence[int], *, place: str = "", block: int = BLOCK) -> Rows:
    """How often each request counts: a row for each row of a figure, seeds one after the other.

    `place`: the dice are its own. `block`: requests.
    """
    dice = np.random.default_rng(zlib.crc32(place.encode()))
    drawn, alone = [], []
    for seed, length in enumerate(lengths):
        blocks = -(-length // block)
        counts = dice.multinomial(blocks, np.full(blocks, 1 / blocks), size=DRAWS)
        drawn.append(np.repeat(counts, block, axis=1)[:, :length])
        alone.append(np.repeat(np.eye(len(lengths))[:, [seed]], length, axis=1))
    rows = [np.ones((1, sum(lengths))), np.concatenate(drawn, axis=1)]
    return np.concatenate([*rows, np.concatenate(alone, axis=1)])


class Sample:
    """One policy's requests in one cell: those that are measured, or those of the cold start."""

    def __init__(
        self,
        by_seed: Mapping[int, Result],
        *,
        cold: bool = False,
        place: str = "",
        block: int = BLOCK,
    ) -> None:
        """Seeds in the order in which they count. `place`, `block`: of `weights`."""
        self.results = list(by_seed.values())
        self._cold = cold
        self._place, self._block = place, block

    def _of(self, values: Callable[[Result], Sequence[float]]) -> Rows:
        parts = [np.asarray(values(one), float)[self._part(one)] for one in self.results]
        return np.concatenate(parts)

    def _part(self, one: Result) -> slice:
        return slice(0, one["measured_from"]) if self._cold else slice(one["measured_from"], None)

    @cached_property
    def _weights(self) -> Rows:
        lengths = [len(one["end"][self._part(one)]) for one in self.results]
        return weights(lengths, place=self._place, block=self._block)

    def _mean(self, values: Rows) -> Rows:
        found: Rows = self._weights @ values / self._weights.sum(axis=1)
        return found

    @cached_property
    def ttft_s(self) -> Rows:
        """Seconds to the first token, the patience for lost requests."""
        return self._of(lambda one: one["ttft_s"])

    @cached_property
    def mean(self) -> Rows:
        """Mean seconds to the first token."""
        return self._mean(self.ttft_s)

    def percentile(self, share: float) -> Rows:
        """Seconds to the first token that this share of the requests doesn't exceed."""
        order = np.argsort(self.ttft_s, kind="stable")
        reached = np.cumsum(self._weights[:, order], axis=1)
        places = (reached < share * reached[:, -1:]).sum(axis=1)
        return self.ttft_s[order][places]

    @cached_property
    def latency(self) -> Rows:
        """Mean seconds to the last token."""
        return self._mean(self._of(lambda one: one["latency_s"]))

    @cached_property
    def lost(self) -> Rows:
        """Share of the requests that were lost."""
        return self._mean(self._of(lambda one: [end == LOST for end in one["end"]]))

    @cached_property
    def in_time(self) -> Rows:
        """Share of the requests that were answered within their service level."""
        return self._mean(self._of(lambda one: [end == IN_TIME for end in one["end"]]))

    @cached_property
    def goodput(self) -> Rows:
        """Answers within their service level, a second of the offered load."""
        requests = sum(len(one["end"]) - one["measured_from"] for one in self.results)
        share = np.maximum(self.in_time, 0.5 / requests)  # none at all would make ratios infinite
        return share * requests / sum(one["offered_s"] for one in self.results)

    @cached_property
    def throughput(self) -> Rows:
        """Tokens a second: nine tenths of all that were asked for, over the time until they came.

        The last tenth only empties the fleet. Where nine tenths never came, those that did, over at
        least the time in which they were offered and the patience after it: what is lost early must
        not end the clock early.
        """
        tokens_all, seconds_all = np.zeros(len(self._weights)), np.zeros(len(self._weights))
        first = 0
        for one in self.results:
            tokens = np.asarray(one["tokens"], float)[self._part(one)]
            ended = np.array([np.inf if at is None else at for at in one["ended_s"]])
            own = self._weights[:, first : first + len(tokens)] * tokens
            first += len(tokens)
            came, until_s = _until_counted(own, ended[self._part(one)])
            asked = own.sum(axis=1)
            is_short = came < (COUNTED - ROUNDING) * asked
            least_s = np.where(is_short, one["offered_s"] + one["patience_s"], SECONDS_LEAST)
            tokens_all += came
            seconds_all += np.where(asked > 0, np.maximum(until_s, least_s), 0.0)
        return np.maximum(tokens_all, TOKENS_LEAST) / np.maximum(seconds_all, SECONDS_LEAST)

    @cached_property
    def unfairness(self) -> Rows:
        """Mean time to first token of the slowest region over that of the quickest."""
        regions = self._of(lambda one: [int(digit) for digit in one["region"]])
        means = []
        for region in np.unique(regions):
            own = self._weights * (regions == region)
            counted = own.sum(axis=1)
            means.append(
                np.divide(
                    own @ self.ttft_s,
                    counted,
                    out=np.full(len(counted), np.nan),
                    where=counted > 0,
                )
            )
        found: Rows = np.nanmax(means, axis=0) / np.nanmin(means, axis=0)
        return found

    @property
    def follow(self) -> float:
        """Share of the requests that are sent when the answer before them ends."""
        found = [one["follow"] for one in self.results]
        return sum(found) / len(found)

    @property
    def occupancy(self) -> float:
        """How full the engines were while they were busy."""
        found = [one["batch_occupancy"] or 0.0 for one in self.results]
        return sum(found) / len(found)


def _until_counted(own: Rows, ended_s: Rows) -> tuple[Rows, Rows]:
    """Of each row: tokens, COUNTED of all or those that came, and the time until they were there.

    `own`: each request's tokens, a row for each row. `ended_s`: infinite where no answer came.
    """
    order = np.argsort(ended_s, kind="stable")[: int(np.isfinite(ended_s).sum())]
    if not len(order):
        return np.zeros(len(own)), np.zeros(len(own))
    there = np.cumsum(own[:, order], axis=1)
    wanted = np.minimum(COUNTED * own.sum(axis=1), there[:, -1])
    places = np.minimum((there < wanted[:, None]).sum(axis=1), len(order) - 1)
    return wanted, ended_s[order][places]


def percentile(share: float) -> Figure:
    """The figure of that name; beyond the patience in proportion to what is lost.

    Where more than the rest are lost, the percentile is the patience, however many more: of two
    that lose 2% and 40%, both p99 would be 60 s.
    """
    return lambda sample: sample.percentile(share) * np.maximum(1.0, sample.lost / (1.0 - share))
