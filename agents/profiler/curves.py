"""The curves of an engine that computes nothing else: first tokens of prompts alone, with nothing
of them cached and with most, and decoding.

Rounds go over all sizes, so that a slow minute of the machine is in one round of every size, and a
point is the median over the rounds. The load stays within what the engine is known to hold.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import inf
from statistics import median
from typing import NamedTuple

from agents.core.engine_curves import CachedPoint, DecodePoint, EngineCurves, PrefillPoint
from agents.profiler.engine import ProfiledEngine
from agents.profiler.measurement import DECODES_MAX, DECODES_UNKNOWN, KV_SHARE_MAX
from agents.profiler.stream import EngineUnusable, Stream
from infra.process import end_all

PROMPTS = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288)
FOLLOWING = (0, 128, 512)  # tokens after a prompt that is cached
CACHED_MIN = 256  # tokens of such a prompt
CONTEXTS = (32, 512, 2048)  # of each decoding request
ALONE_TOKENS = 2  # the last one may have no text, and is then not seen
DECODED_TOKENS = 24  # of each, after the first, at least
DECODED_S = 0.2  # at least: tokens of a fast engine may come several at once
FIRST_TOKENS = 512  # of a prompt that shows about how fast the engine is
POINT_SHARE = 0.1  # of the time, for all prompts of one point: longer ones are left out
ROUNDS_MIN, ROUNDS_MAX = 3, 20

SECONDS_MIN = 1e-6  # between tokens

Say = Callable[[str], None]


class _FirstToken(NamedTuple):
    """Tokens of a prompt, how many of them were cached (-1: not known), seconds until its first."""

    tokens: int
    cached_tokens: int
    seconds: float


async def measured(
    engine: ProfiledEngine, seconds: float, chunk_tokens: int | None, say: Say
) -> EngineCurves:
    """Measure for about so many seconds, three rounds at least. Raises EngineUnusable."""
    batch_max = min(engine.batch_max or DECODES_UNKNOWN, DECODES_MAX)
    kv_tokens = engine.reading.kv_capacity_tokens or batch_max * engine.context_tokens
    longest = min(engine.context_tokens - DECODED_TOKENS, KV_SHARE_MAX * kv_tokens)
    token_s = await _token_s(engine, longest)
    longest = min(longest, max(CONTEXTS[0], POINT_SHARE * seconds / token_s))
    sizes = [size for size in PROMPTS if size <= longest]
    loads = _loads(batch_max, longest, KV_SHARE_MAX * kv_tokens, POINT_SHARE * seconds / token_s)
    alone: dict[int, list[_FirstToken]] = {size: [] for size in sizes}
    cached: dict[tuple[int, int], list[_FirstToken]] = {
        (size, more): []
        for size in sizes
        for more in FOLLOWING
        if size >= CACHED_MIN and size + more <= longest
    }
    decoding: dict[tuple[int, int], list[tuple[int, float]]] = {load: [] for load in loads}
    until, rounds = time.monotonic() + seconds, 0
    while rounds < ROUNDS_MIN or (time.monotonic() < until and rounds < ROUNDS_MAX):
        rounds += 1
        say(f"measuring first tokens and decoding, round {rounds}")
        for size in sizes:
            prompt = engine.prompt(size)
            alone[size].append(await _alone(engine, size, prompt))
            for (first, more), seen_again in cached.items():
                if first == size:
                    longer = f"{prompt}{engine.prompt(more) if more else ''}"
                    seen_again.append(await _alone(engine, size + more, longer))
        for load in loads:
            if (seen := await _decoding(engine, *load)) is not None:
                decoding[load].append(seen)
    if not any(decoding.values()):
        raise EngineUnusable("no two tokens of a stream came while all requests of a load decoded")
    return EngineCurves(
        prefill=_prefill(alone.values()),
        cached=_cached(cached.values()),
        decode=tuple(
            DecodePoint(
                requests=requests,
                context_tokens=round(median(tokens for tokens, _ in seen)),
                tbt_s=median(tbt_s for _, tbt_s in seen),
            )
            for (requests, _), seen in decoding.items()
            if seen
        ),
        chunk_tokens=chunk_tokens or int(longest),
        kv_tokens=kv_tokens,
        batch_max=batch_max,
    )


async def _token_s(engine: ProfiledEngine, longest: float) -> float:
    """About what a token of a prompt takes."""
    size = max(size for size in PROMPTS if size <= max(PROMPTS[0], min(longest, FIRST_TOKENS)))
    found = await _alone(engine, size)
    return found.seconds / found.tokens


def _loads(
    batch_max: int, longest: float, kv_tokens: float, computed_max: float
) -> Sequence[tuple[int, int]]:
    """Requests at once, each doubling and the most, and the prompt of each; `computed_max`: tokens
    of all prompts of one load."""
    counts = [1]
    while counts[-1] < batch_max:
        counts.append(min(2 * counts[-1], batch_max))
    found = [
        (count, context)
        for count in counts
        for context in CONTEXTS
        if context <= longest
        and count * (context + DECODED_TOKENS) <= kv_tokens
        and (count * context <= computed_max or context == CONTEXTS[0])
    ]
    if not found:
        raise EngineUnusable(f"its KV memory of {kv_tokens:g} tokens is too small to be measured")
    return found


def _prefill(seen: Iterable[list[_FirstToken]]) -> tuple[PrefillPoint, ...]:
    """A point a size; the engine's own count of tokens is the same in every round, nearly."""
    points: dict[int, float] = {}
    for each in seen:
        points.setdefault(round(median(one.tokens for one in each)), _seconds(each))
    return tuple(PrefillPoint(tokens=tokens, ttft_s=points[tokens]) for tokens in sorted(points))


def _cached(seen: Iterable[list[_FirstToken]]) -> tuple[CachedPoint, ...]:
    """A point for each of which the engine reported that it had something cached."""
    points = []
    for each in seen:
        tokens = round(median(one.tokens for one in each))
        cached = round(median(one.cached_tokens for one in each))
        if 0 < cached < tokens:
            points.append(CachedPoint(tokens=tokens, cached_tokens=cached, ttft_s=_seconds(each)))
    return tuple(points)


def _seconds(each: Iterable[_FirstToken]) -> float:
    return median(one.seconds for one in each)


async def _alone(engine: ProfiledEngine, size: int, prompt: str = "") -> _FirstToken:
    """The first token of a prompt of about that size, which is new unless it is given."""
    stream = Stream(size, ALONE_TOKENS)
    task = engine.start(stream, prompt=prompt)
    try:
        await stream.reached()
    finally:
        await end_all([task])
    if stream.problem:
        raise EngineUnusable(f"a prompt of {size} tokens: {stream.problem}")
    usage, seconds = stream.usage, stream.token_at[0] - stream.sent_at
    tokens = usage.prompt_tokens if usage.prompt_tokens > 0 else size
    return _FirstToken(tokens, usage.cached_tokens, seconds)


async def _decoding(
    engine: ProfiledEngine, requests: int, context: int
) -> tuple[int, float] | None:
    """Tokens of context of so many requests together, and seconds between two tokens of one; None
    if one had ended before all had begun.

    Those that begin first go on decoding until all have begun and decoded for a while together.
    """
    room = engine.context_tokens - context
    output = min(room - 1, 16 * (1 + requests) * DECODED_TOKENS)
    streams = [Stream(context, output) for _ in range(requests)]
    tasks = [engine.start(stream) for stream in streams]
    try:
        for stream in streams:
            await stream.reached(1)
        last = streams[-1]
        began_at = max((s.token_at[0] for s in streams if s.token_at), default=0.0)
        while not last.has_ended:
            await last.reached(len(last.token_at) + DECODED_TOKENS)
            if last.token_at[-1] >= began_at + DECODED_S:
                break
    finally:
        await end_all(tasks)
    for stream in streams:
        if stream.problem:
            raise EngineUnusable(f"{requests} requests of {context} tokens: {stream.problem}")
    ended_at = min(last.token_at[-1], *(s.ended_at for s in streams[:-1]), inf)
    gaps = [
        after - before
        for before, after in pairwise(last.token_at)
        if began_at <= before and after <= ended_at
    ]
    held = sum(stream.prompt_tokens + len(stream.token_at) for stream in streams)
    await engine.idle()
    if len(gaps) < DECODED_TOKENS / 2:
        return None
    return held, max(sum(gaps) / len(gaps), SECONDS_MIN)
