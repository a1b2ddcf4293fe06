"""A simulated engine's profile from an engine's measured curves.

Decoding gives the seconds of an iteration: a floor, more for each request, more for each token of
context (what the linear layers take for as many tokens is no request's). Prompts that were alone
then give the rest of their times, all at once: what passes before the scheduler sees a prompt
(`arrival_s`), for each of its tokens too (`arrival_token_s`); the linear layers, which take no less
for more tokens; and a computed token's attention to its context. A time to first token is a sum of
these, so they are least squares of relative errors, none below 0. Only prompts that were cached in
part tell a token's arrival from its computation: without them that counts as computation, and what
the shortest prompt takes beyond an iteration as arrival.
"""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from agents.core.engine_curves import CalibratedEngine, DecodePoint, EngineCurves
from agents.core.latency_predictor import Matrix, non_negative_least_squares
from agents.sim.profiles import LongPrefill, Profile, Publishing

TOKEN_S_MIN = 1e-9
RIDGE = 1e-10  # of the largest, where several sums fit as well


def measured_profile(measured: CalibratedEngine, name: str) -> Profile:
    """The profile of that name."""
    curves = measured.curves
    floor_s, context_s = _iteration(curves.decode)
    prompts = _prompts(curves, floor_s, context_s)
    profile = Profile(
        name=name,
        model=measured.model,
        knots=prompts.knots,
        token_s=_token_s(prompts.knots),
        sequence_s=0.0,
        context_s=context_s,
        arrival_s=prompts.arrival_s,
        arrival_token_s=prompts.arrival_token_s,
        batch_tokens=curves.chunk_tokens,
        kv_tokens=curves.kv_tokens,
        max_seqs=curves.batch_max,
        long_prefill=LongPrefill(0, 0.0, 0.0, prompts.pair_s) if prompts.pair_s else None,
        publishing=Publishing.COMPUTED if measured.engine == "sglang" else Publishing.SCHEDULED,
    )
    return replace(profile, sequence_s=_sequence_s(profile, curves.decode))


class _Prompts(NamedTuple):
    """What a profile says of prompts. `pair_s`: of a computed token and one of its context."""

    arrival_s: float
    arrival_token_s: float
    pair_s: float
    knots: tuple[tuple[int, float], ...]


def _prompts(curves: EngineCurves, floor_s: float, context_s: float) -> _Prompts:
    """The parts of all measured times to first token."""
    chunk_tokens = curves.chunk_tokens
    points = [(point.tokens, 0, point.ttft_s) for point in curves.prefill]
    points += [(point.tokens, point.cached_tokens, point.ttft_s) for point in curves.cached]
    ends = [1, *(point.tokens for point in curves.prefill if 1 < point.tokens <= chunk_tokens)]
    rows, left_s = [], []
    for tokens, cached, ttft_s in points:
        row, known_s = np.zeros(2 + len(ends)), 0.0
        row[0], row[1] = 1.0, tokens
        for start in range(cached, tokens, chunk_tokens):
            end = min(start + chunk_tokens, tokens)
            known_s += floor_s + context_s * end
            row[2] += (end - start) * end
            row[3:] += _rises(ends, end - start)
        rows.append(row / ttft_s)
        left_s.append((ttft_s - known_s) / ttft_s)
    table = np.array(rows)
    if not curves.cached:
        table[:, 1] = 0.0
        table[:, 3] = 0.0
    if not curves.cached and curves.prefill[-1].tokens <= chunk_tokens:
        table[:, 2] = 0.0
    solved = _least_squares(table, np.array(left_s))
    rises = np.cumsum([0.0, *solved[3:]])
    knots = [(end, floor_s + float(rise)) for end, rise in zip(ends, rises, strict=True)]
    arrival_s, arrival_token_s, pair_s = (float(part) for part in solved[:3])
    return _Prompts(arrival_s, arrival_token_s, pair_s, tuple(knots))


def _rises(ends: list[int], tokens: int) -> list[float]:
    """The share of each rise of the linear layers, from one knot to the next, that so many tokens
    have; of the last one perhaps more than all."""
    shares = [(tokens - low) / (high - low) for low, high in pairwise(ends)]
    return [max(0.0, min(share, 1.0)) for share in shares[:-1]] + [max(0.0, s) for s in shares[-1:]]


def _least_squares(table: Matrix, right: Matrix) -> Matrix:
    """The parts, none below 0, with which the table's rows come closest to these."""
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0.0] = np.inf
    scaled = table / scale
    ridge = RIDGE * np.eye(len(scale))
    solved = non_negative_least_squares(scaled.T @ scaled + ridge, scaled.T @ right)
    parts: Matrix = solved / scale
    return parts


def _iteration(points: tuple[DecodePoint, ...]) -> tuple[float, float]:
    """Seconds of an iteration: whatever is in it, and for each token of context."""
    rows = np.array([(1.0, point.requests, point.context_tokens) for point in points])
    weighted = rows / np.array([[point.tbt_s] for point in points])
    floor_s, _, context_s = (float(part) for part in _least_squares(weighted, np.ones(len(rows))))
    least_s = min(point.tbt_s for point in points)
    return max(floor_s, 0.01 * least_s), context_s


def _sequence_s(profile: Profile, points: tuple[DecodePoint, ...]) -> float:
    """What each decoding request takes beyond a token of the linear layers."""
    above = below = 0.0
    for point in points:
        without_s = profile.decode_s(point.requests, point.context_tokens)
        above += point.requests * (point.tbt_s - without_s) / point.tbt_s**2
        below += (point.requests / point.tbt_s) ** 2
    return max(0.0, above / below)


def _token_s(knots: tuple[tuple[int, float], ...]) -> float:
    """Of a token above the last knot: the slope from the knot of at most half its tokens."""
    tokens, seconds = knots[-1]
    before = [knot for knot in knots if knot[0] <= tokens / 2] or [(0, 0.0)]
    return max(TOKEN_S_MIN, (seconds - before[-1][1]) / (tokens - before[-1][0]))
