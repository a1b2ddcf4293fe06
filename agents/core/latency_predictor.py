"""How long an engine's next iteration will take, from what is in its batch.

HyGen's predictor (Sun et al., 2025, §4.2, equation 1): a linear function of (1, Sp, Sd, Sp², Sd²,
Np, Nd), fitted by least squares to a profiling run. Sp are the prefill tokens of the iteration, Np
and Nd the numbers of requests in prefill and in decode. Two of these can be read in several ways.

"Decode tokens", Sd: one per decoding request (then Sd = Nd, and contexts don't count), the contexts
of the decoding requests, or the context that the whole iteration attends to, chunks of prefill
included. We take the last: attention reads that many tokens of KV in prefill and in decode.

Sp² stands for prefill's attention, of each token to each before it: of a prompt computed at once
that many pairs. A chunk's square would be the same at the prompt's beginning and at its end, so we
take the pairs: a chunk's tokens times its context. `make study-hygen` measures every reading.

Three things are ours. There are two functions, and an iteration takes the larger: one of its
contexts and decodes, fitted to iterations that only decode, when the GPU waits for memory; one of
everything, fitted to iterations with prefill that take longer than that, when it computes (the
roofline of Williams et al., 2009). One line through both kinds is wrong for both. Coefficients are
0 or more, so more work never takes less time, and the longest chunk that fits a budget has a closed
form. Errors are relative: a sample weighs 1 / seconds², since a batch of 10 ms matters as much as
one of 100.

On line, samples enter normal equations that forget at a constant rate; those of the profiling run
stay, with a small weight, so that a quiet day with equal batches doesn't leave the fit undefined.
"""

import math
from collections.abc import Iterable, Sequence
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Flags = NDArray[np.bool_]

FEATURES = 7
ROUNDS_MAX = 4 * FEATURES  # two rounds a feature are many
TINY = 1e-300
# Of (1, Sp, Sd, Sp², Sd², Np, Nd): what an iteration that waits for memory is priced by.
MEMORY_BOUND: Matrix = np.array([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
SORTING_ROUNDS = 4
# Weight of the profiling run beside what was observed since, and how much of that counts: a
# change of the hardware's speed is learned to 95 %, within some 2,000 iterations (a minute or two).
PROFILED_WEIGHT = 100.0
OBSERVED_WEIGHT = 2000.0
OBSERVATIONS_PER_FIT = 64
# One stalled iteration (a page fault, a pre-empted process) is no news about the GPU.
SURPRISE_MAX = 4.0
SECONDS_MAX = 3600.0
RIDGE = 1e-9  # of a scaled feature's weight: equations that don't determine it choose the least


Coefficients = tuple[float, ...]


class NoSamples(ValueError):
    """Samples that nothing can be fitted to; the message says why."""


class BadCoefficients(ValueError):
    """Coefficients that no fit gives; the message says why."""


class BatchLoad(NamedTuple):
    """What one iteration computes.

    `context_tokens` are attended to, a chunk's own included; `prefill_pairs` is the sum of each
    chunk's tokens times its context.
    """

    prefill_tokens: int = 0
    context_tokens: int = 0
    prefills: int = 0
    decodes: int = 0
    prefill_pairs: int = 0

    def with_decode(self, context_tokens: int) -> "BatchLoad":
        """One more decoding sequence of that context."""
        tokens, context, prefills, decodes, pairs = self
        return BatchLoad(tokens, context + context_tokens, prefills, decodes + 1, pairs)

    def with_decodes(self, count: int, context_tokens: int) -> "BatchLoad":
        """`count` more decoding sequences of that context each; fewer if it is negative."""
        tokens, context, prefills, decodes, pairs = self
        context = max(0, context + count * context_tokens)
        return BatchLoad(tokens, context, prefills, decodes + count, pairs)

    def with_prefill(self, tokens: int, computed_tokens: int) -> "BatchLoad":
        """One more chunk of `tokens` after `computed_tokens` of the same prompt."""
        own = computed_tokens + tokens
        before, context, prefills, decodes, pairs = self
        return BatchLoad(
            before + tokens, context + own, prefills + 1, decodes, pairs + tokens * own
        )


class Sample(NamedTuple):
    """One iteration that was timed."""

    load: BatchLoad
    seconds: float


class IterationTimes:
    """Seconds of an engine's iterations by two functions: while it computes, while it waits for
    memory. An iteration takes the larger."""

    def __init__(self, computing: Sequence[float], waiting: Sequence[float]) -> None:
        """Coefficients of (1, Sp, Sd, Sp², Sd², Np, Nd). Raises BadCoefficients."""
        self._computing = checked_coefficients(computing)
        self._waiting = checked_coefficients(waiting)

    def predict_s(self, load: BatchLoad) -> float:
        """Seconds of an iteration; 0 for an empty batch."""
        prefill_tokens, context, prefills, decodes, pairs = load
        if not prefills and not decodes:
            return 0.0
        waiting_s = self._waiting_s(context, decodes)
        if not prefills:
            return waiting_s
        c = self._computing
        computing_s = (
            c[0]
            + c[1] * prefill_tokens
            + context * (c[2] + c[4] * context)
            + c[3] * pairs
            + c[5] * prefills
            + c[6] * decodes
        )
        return max(waiting_s, computing_s)

    def longest_prefill(
        self, budget_s: float, tokens_max: int, load: BatchLoad, computed_tokens: int
    ) -> int:
        """The longest chunk beside `load` with which the whole iteration keeps to `budget_s`.

        `computed_tokens` of the prompt are in memory. 0 if not even one token fits: HyGen's
        `get_max_prefill`. The prediction is a quadratic of the chunk's length, which never falls.
        """
        if tokens_max < 1:
            return 0
        m, c = self._waiting, self._computing
        none = load.with_prefill(0, computed_tokens)
        context = none.context_tokens
        waiting_s = self._waiting_s(context, load.decodes)
        computing_s = sum(map(mul, c, _features(none)))
        tokens = min(
            _root(m[4], m[2] + 2 * m[4] * context, budget_s - waiting_s),
            _root(
                c[3] + c[4],
                c[1] + c[2] + c[3] * computed_tokens + 2 * c[4] * context,
                budget_s - computing_s,
            ),
            tokens_max,
        )
        # The last bits of the root and of the prediction may differ: the prediction is right.
        while tokens and self.predict_s(load.with_prefill(tokens, computed_tokens)) > budget_s:
            tokens -= 1
        return tokens

    @property
    def coefficients(self) -> tuple[Coefficients, Coefficients]:
        """Of (1, Sp, Sd, Sp², Sd², Np, Nd): while computing, and while waiting for memory."""
        return self._computing, self._waiting

    def _waiting_s(self, context: int, decodes: int) -> float:
        m = self._waiting
        return m[0] + context * (m[2] + m[4] * context) + m[6] * decodes


def checked_coefficients(values: Sequence[float]) -> Coefficients:
    """The coefficients of one function. Raises BadCoefficients for what no fit gives."""
    if len(values) != FEATURES:
        raise BadCoefficients(f"{len(values)} coefficients where {FEATURES} are needed")
    if not all(0.0 <= value < math.inf for value in values):
        raise BadCoefficients("a coefficient should be 0 or more, and finite")
    return tuple(float(value) for value in values)


class LatencyPredictor(IterationTimes):
    """Predicts iterations after a profiling run, and learns from those that follow."""

    def __init__(self, profiled: Iterable[Sample]) -> None:
        """Fit a profiling run. Raises NoSamples for none, or for one that is no measurement."""
        samples = list(profiled)
        if not samples:
            raise NoSamples("the profiling run has no sample")
        for sample in samples:
            _check(sample)
        rows = np.array([_features(sample.load) for sample in samples])
        seconds = np.array([sample.seconds for sample in samples])
        scale = np.abs(rows).max(axis=0)
        scale[scale == 0] = 1.0
        with_prefill = np.array([sample.load.prefills > 0 for sample in samples])
        # A kind that was not profiled is guessed from the other.
        memory = ~with_prefill if not with_prefill.all() else with_prefill
        computing = with_prefill if with_prefill.any() else memory
        self._memory_bound = _Regression(rows, seconds, scale, memory)
        waiting_s = (rows * MEMORY_BOUND) @ np.array(self._memory_bound.coefficients)
        for _ in range(SORTING_ROUNDS):  # who waits for memory depends on the fit, and it on them
            self._compute_bound = _Regression(rows, seconds, scale, computing)
            slower = rows @ np.array(self._compute_bound.coefficients) >= waiting_s
            if not (with_prefill & slower).any():
                break
            computing = with_prefill & slower
        super().__init__(self._compute_bound.coefficients, self._memory_bound.coefficients)

    def observe(self, sample: Sample) -> None:
        """Learn from one iteration. Raises NoSamples if it is no measurement."""
        _check(sample)
        load, seconds = sample
        expected_s, features = self.predict_s(load), np.array(_features(load))
        if not load.prefills or expected_s <= self._waiting_s(load.context_tokens, load.decodes):
            self._memory_bound.observe(features * MEMORY_BOUND, seconds, expected_s)
        else:
            self._compute_bound.observe(features, seconds, expected_s)
        self._computing = self._compute_bound.coefficients
        self._waiting = self._memory_bound.coefficients


class _Regression:
    """Weighted normal equations of some of the samples: profiled and observed ones."""

    def __init__(self, rows: Matrix, seconds: Matrix, scale: Matrix, chosen: Flags) -> None:
        self._scale = scale
        weights = 1.0 / seconds[chosen]
        scaled = rows[chosen] / scale * weights[:, None]
        share = PROFILED_WEIGHT / len(scaled)
        self._profiled = share * (scaled.T @ scaled), share * scaled.sum(axis=0)
        self._matrix: Matrix = np.zeros((FEATURES, FEATURES))
        self._right: Matrix = np.zeros(FEATURES)
        self._unfitted = 0
        self._fit()

    def observe(self, features: Matrix, seconds: float, expected_s: float) -> None:
        if expected_s > 0:
            seconds = min(max(seconds, expected_s / SURPRISE_MAX), expected_s * SURPRISE_MAX)
        row = features / self._scale / seconds
        keep = 1.0 - 1.0 / OBSERVED_WEIGHT
        self._matrix = keep * self._matrix + np.outer(row, row)
        self._right = keep * self._right + row
        self._unfitted += 1
        if self._unfitted >= OBSERVATIONS_PER_FIT:
            self._fit()

    def _fit(self) -> None:
        self._unfitted = 0
        matrix, right = self._profiled[0] + self._matrix, self._profiled[1] + self._right
        ridge = RIDGE * np.diag(matrix).max() * np.eye(FEATURES)
        solved = non_negative_least_squares(matrix + ridge, right)
        self.coefficients: Coefficients = tuple(float(value) for value in solved / self._scale)


def non_negative_least_squares(matrix: Matrix, right: Matrix) -> Matrix:
    """The x ≥ 0 that is least in x·matrix·x / 2 − right·x, for a positive definite matrix.

    Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23, on normal equations;
    it ends because each round's set of positive coefficients fits better than any before.
    """
    count = len(right)
    x = np.zeros(count)
    positive = np.zeros(count, dtype=np.bool_)
    least = 1e-12 * float(np.abs(right).max())
    for _ in range(ROUNDS_MAX):
        gradient = np.where(positive, -np.inf, right - matrix @ x)
        best = int(gradient.argmax())
        if gradient[best] <= least:
            break
        positive[best] = True
        z = _solved(matrix, right, positive)
        while (z[positive] <= 0).any():  # go from x towards z until the first of them is 0
            low = np.flatnonzero(positive & (z <= 0))
            shares = x[low] / np.maximum(x[low] - z[low], TINY)
            x = x + shares.min() * (z - x)
            x[low[shares.argmin()]] = 0.0
            positive &= x > 0
            z = _solved(matrix, right, positive)
        x = z
    return x


def _solved(matrix: Matrix, right: Matrix, chosen: Flags) -> Matrix:
    z = np.zeros(len(right))
    z[chosen] = np.linalg.solve(matrix[np.ix_(chosen, chosen)], right[chosen])
    return z


def mean_error(predictor: LatencyPredictor, samples: Sequence[Sample]) -> float:
    """Mean absolute error relative to what was measured (MAPE), of 1."""
    errors = [abs(predictor.predict_s(load) - seconds) / seconds for load, seconds in samples]
    return math.fsum(errors) / len(errors)


def _features(load: BatchLoad) -> tuple[float, ...]:
    prefill_tokens, context, prefills, decodes, pairs = load
    return (1.0, prefill_tokens, context, pairs, context**2, prefills, decodes)


def _check(sample: Sample) -> None:
    if not 0.0 < sample.seconds <= SECONDS_MAX:
        raise NoSamples(f"{sample.seconds} seconds are no time of an iteration")
    if min(sample.load) < 0 or sample.load.prefills + sample.load.decodes < 1:
        raise NoSamples(f"{sample.load} is no batch")


def _root(square: float, linear: float, left: float) -> int:
    """The largest whole n ≥ 0 with square·n² + linear·n ≤ left, or so; very large if all do."""
    if left < 0:
        return 0
    unbounded = 2**40
    if square > 0:
        # The form without a difference of nearly equal numbers.
        root = 2 * left / (linear + math.sqrt(linear * linear + 4 * square * left) or math.inf)
    elif linear > 0:
        root = left / linear
    else:
        return unbounded
    return int(min(root * (1 + 1e-12), unbounded))
