"""A simulated engine's profile from an engine's measured curves.

Decoding gives the seconds of an iteration: a floor, more for each request, more for each token of
context (least squares of relative errors, none below 0; what the linear layers take for as many
tokens is no request's). A prompt alone then gives the rest: what
the shortest takes beyond an iteration passes before the scheduler sees it (`arrival_s`); what
longer ones take more are the linear layers' knots. Prompts beyond a chunk take several iterations:
what these miss of the measured time is laid on pairs of a token and its context, in every chunk.
"""

from dataclasses import replace

import numpy as np

from agents.core.engine_curves import CalibratedEngine, DecodePoint, EngineCurves
from agents.core.latency_predictor import non_negative_least_squares
from agents.sim.profiles import LongPrefill, Profile, Publishing

TOKEN_S_MIN = 1e-9


def measured_profile(measured: CalibratedEngine, name: str) -> Profile:
    """The profile of that name."""
    curves = measured.curves
    floor_s, context_s = _iteration(curves.decode)
    first = curves.prefill[0]
    arrival_s = max(0.0, first.ttft_s - floor_s - context_s * first.tokens)
    knots = _knots(curves, arrival_s, floor_s, context_s, 0.0)
    profile = Profile(
        name=name,
        model=measured.model,
        knots=knots,
        token_s=_token_s(knots),
        sequence_s=0.0,
        context_s=context_s,
        arrival_s=arrival_s,
        batch_tokens=curves.chunk_tokens,
        kv_tokens=curves.kv_tokens,
        max_seqs=curves.batch_max,
        publishing=Publishing.COMPUTED if measured.engine == "sglang" else Publishing.SCHEDULED,
    )
    if pair_s := _pair_s(profile, curves):
        knots = _knots(curves, arrival_s, floor_s, context_s, pair_s)
        long = LongPrefill(0, 0.0, 0.0, pair_s)
        profile = replace(profile, knots=knots, token_s=_token_s(knots), long_prefill=long)
    return replace(profile, sequence_s=_sequence_s(profile, curves.decode))


def prefill_s(profile: Profile, tokens: int) -> float:
    """Seconds until the first token of a prompt that is alone in such an engine."""
    seconds, computed = profile.arrival_s, 0
    while computed < tokens:
        chunk = min(profile.batch_tokens, tokens - computed)
        computed += chunk
        seconds += profile.iteration_s(((chunk, computed),), 0, 0)
    return seconds


def _iteration(points: tuple[DecodePoint, ...]) -> tuple[float, float]:
    """Seconds of an iteration: whatever is in it, and for each token of context."""
    rows = np.array([(1.0, point.requests, point.context_tokens) for point in points])
    scale = rows.max(axis=0)
    weighted = rows / scale / np.array([[point.tbt_s] for point in points])
    matrix = weighted.T @ weighted
    ridge = 1e-9 * np.diag(matrix).max() * np.eye(3)
    solved = non_negative_least_squares(matrix + ridge, weighted.sum(axis=0)) / scale
    floor_s, _, context_s = (float(value) for value in solved)
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


def _knots(
    curves: EngineCurves, arrival_s: float, floor_s: float, context_s: float, pair_s: float
) -> tuple[tuple[int, float], ...]:
    """The linear layers at the measured prompts of one chunk: never less for more tokens."""
    knots: list[tuple[int, float]] = []
    for point in curves.prefill:
        tokens = point.tokens
        if tokens > curves.chunk_tokens and knots:
            break
        seconds = point.ttft_s - arrival_s - context_s * tokens - pair_s * tokens**2
        knots.append((tokens, max(seconds, knots[-1][1] if knots else floor_s)))
    return tuple(knots)


def _token_s(knots: tuple[tuple[int, float], ...]) -> float:
    """Of a token above the last knot: the slope from the knot of at most half its tokens."""
    tokens, seconds = knots[-1]
    before = [knot for knot in knots if knot[0] <= tokens / 2] or [(0, 0.0)]
    return max(TOKEN_S_MIN, (seconds - before[-1][1]) / (tokens - before[-1][0]))


def _pair_s(profile: Profile, curves: EngineCurves) -> float:
    """Seconds of a token of a later chunk for each token in the chunks before it."""
    above = below = 0.0
    for point in curves.prefill:
        tokens, pairs = point.tokens, 0
        for start in range(profile.batch_tokens, tokens, profile.batch_tokens):
            pairs += min(profile.batch_tokens, tokens - start) * start
        above += pairs * (point.ttft_s - prefill_s(profile, tokens)) / point.ttft_s**2
        below += (pairs / point.ttft_s) ** 2
    return max(0.0, above / below) if below else 0.0
