"""Iterations of an engine, and what each computed, from the times at which streamed tokens came.

A profiling run can't look into an engine. But each iteration gives every decoding request a token,
so the tokens of one stream that lasts, the *marker*, show where iterations end. Between two of them
the streams that got tokens decoded, with contexts that are known. A newcomer's first token shows
the iteration that ended its prefill; a prompt longer than a chunk took the iterations before it
too, a whole chunk each (vLLM, SGLang and llama.cpp compute prompts in order of arrival).

What is not certain is left out: iterations while a newcomer waits, those in which a stream ended,
several prompts in one iteration that may not have fitted it, and prompts whose iterations came
before they were sent. Engines that pause decoding while they compute prompts show one long gap: to
an online request that is the iteration.

Times are in seconds of one clock.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import inf
from statistics import median
from typing import NamedTuple

from agents.core.latency_predictor import BatchLoad, LatencyPredictor, Sample

MERGED_S = 0.0005  # tokens that come closer than this came together
SLACK = 0.3  # of a usual gap: how far apart tokens of one iteration may come over two connections
WINDOW_TOKENS, WINDOW_TOKENS_MIN = 8, 4  # of the marker: one sample of decoding
LONG = 1.5  # usual gaps: an iteration with a chunk of prefill that shows
STALL = 3.0  # times the predicted seconds, or a part of them: a stall, not an iteration
STALLS_MAX = 0.1  # of the samples
TICKS_MIN = 4


class StreamTimes(NamedTuple):
    """One streamed request of a profiling run."""

    sent_at: float
    prompt_tokens: int
    token_at: tuple[float, ...]
    ended_at: float = inf


class Prefill(NamedTuple):
    """One prompt beside decoding requests, and over how many iterations it was seen to go."""

    tokens: int
    decodes: int
    iterations: int


class _Tick(NamedTuple):
    at: float
    tokens: int


class _Arrival(NamedTuple):
    """A newcomer of whom a first token came, at the end of interval `last`."""

    stream: StreamTimes
    last: int


class Recording:
    """The streams of one stretch of a profiling run, the marker first."""

    def __init__(self, streams: Sequence[StreamTimes]) -> None:
        self._streams = streams
        self._ticks = _ticks(streams[0].token_at) if streams else []
        gaps = [b.at - a.at for a, b in zip(self._ticks, self._ticks[1:], strict=False)]
        per_token = [gap / tick.tokens for gap, tick in zip(gaps, self._ticks[1:], strict=True)]
        self._usual_s = median(per_token) if per_token else 0.0
        self._slack_s = SLACK * self._usual_s
        ends = [tick.at for tick in self._ticks]
        self._arrivals = [
            _Arrival(stream, at)
            for stream in streams[1:]
            if stream.token_at
            and 0 < (at := bisect_right(ends, stream.token_at[0] - self._slack_s)) < len(ends)
        ]

    def prefills(self) -> Iterator[Prefill]:
        """Prompts that were computed while no other one was, as far as they show in the gaps."""
        if len(self._ticks) < TICKS_MIN:
            return
        for stream, last in self._arrivals:
            if any(
                other is not stream
                and other.sent_at < stream.token_at[0]
                and _first_at(other) > stream.sent_at
                for other in self._streams[1:]
            ):
                continue
            first = last
            while (
                first > 1
                and self._gap_s(first - 1) > LONG * self._usual_s * self._ticks[first - 1].tokens
                and self._ticks[first - 2].at >= stream.sent_at - self._slack_s
            ):
                first -= 1
            load = self._decodes(last)
            if load is not None:
                yield Prefill(stream.prompt_tokens, load.decodes, last - first + 1)

    def samples(self, chunk_tokens: int) -> list[Sample]:
        """What iterations computed, and their seconds, if prompts are cut into such chunks."""
        if len(self._ticks) < TICKS_MIN:
            return []
        chunks, unsure = self._chunks(chunk_tokens)
        found = []
        window: list[tuple[BatchLoad, float, int]] = []
        for at in range(1, len(self._ticks)):
            load = None if at in unsure else self._decodes(at)
            if load is None or at in chunks or (window and window[0][0].decodes != load.decodes):
                found += _window(window)
                window = []
            if load is None:
                continue
            if at not in chunks:
                window.append((load, self._gap_s(at), self._ticks[at].tokens))
                if sum(tokens for _, _, tokens in window) >= WINDOW_TOKENS:
                    found += _window(window)
                    window = []
            elif self._ticks[at].tokens == 1 and _fit(chunks[at], chunk_tokens - load.decodes):
                for tokens, computed in chunks[at]:
                    load = load.with_prefill(tokens, computed)
                found.append(Sample(load, self._gap_s(at)))
        return found + _window(window)

    def _gap_s(self, at: int) -> float:
        return self._ticks[at].at - self._ticks[at - 1].at

    def _decodes(self, at: int) -> BatchLoad | None:
        """What decoded between two ticks; None if a stream began to, or ended, in between."""
        begin, end = self._ticks[at - 1].at + self._slack_s, self._ticks[at].at - self._slack_s
        if end <= begin:
            return None
        load = BatchLoad()
        for stream in self._streams:
            if _first_at(stream) > begin:
                continue
            if stream.ended_at <= end or stream.token_at[-1] < end:
                if stream.ended_at <= begin:
                    continue
                return None
            load = load.with_decode(stream.prompt_tokens + bisect_right(stream.token_at, begin))
        return load

    def _chunks(self, chunk_tokens: int) -> tuple[dict[int, list[tuple[int, int]]], set[int]]:
        """Of each interval the (tokens, tokens before them) of prompts; and which to leave out."""
        chunks: dict[int, list[tuple[int, int]]] = {}
        placed: list[tuple[StreamTimes, range]] = []
        unsure: set[int] = set()
        for stream, last in self._arrivals:
            tokens = self._spread(stream, last, chunk_tokens)
            own = range(last - len(tokens) + 1, last + 1)
            placed.append((stream, own))
            before = 0
            for at, each in zip(own, tokens, strict=True):
                chunks.setdefault(at, []).append((each, before))
                before += each
        for stream, own in placed:
            if not self._is_alone(stream, own, placed):
                unsure.update(own)
        theirs = {id(stream): own for stream, own in placed}
        for stream in self._streams[1:]:
            unsure.update(self._waits(stream, theirs.get(id(stream), range(0))))
        return chunks, unsure

    def _spread(self, stream: StreamTimes, last: int, chunk_tokens: int) -> list[int]:
        """Its prompt's tokens in each of the intervals up to `last`; none if that isn't certain."""
        found: list[int] = []
        longest = -(-stream.prompt_tokens // max(1, chunk_tokens - len(self._streams)))
        for first in range(last, max(0, last - longest), -1):
            if self._ticks[first - 1].at < stream.sent_at - self._slack_s:
                break
            tokens, left = [], stream.prompt_tokens
            for at in range(first, last + 1):
                load = self._decodes(at)
                if load is None or left <= 0:
                    break
                tokens.append(min(left, max(1, chunk_tokens - load.decodes)))
                left -= tokens[-1]
            if left or len(tokens) != last + 1 - first:
                continue
            if found:
                return []
            found = tokens
        return found

    def _is_alone(
        self, stream: StreamTimes, own: range, placed: Sequence[tuple[StreamTimes, range]]
    ) -> bool:
        """Whether no other prompt may have had a part of its iterations that is not known."""
        for other, theirs in placed:
            if other is stream or (len(own) == 1 and own == theirs):
                continue
            if other.sent_at < _first_at(stream) and _first_at(other) > stream.sent_at:
                return False
        return True

    def _waits(self, stream: StreamTimes, own: range) -> Iterator[int]:
        """The intervals between its request and its first token, but for those that are its own."""
        until = min(_first_at(stream), stream.ended_at) - self._slack_s
        for at in range(1, len(self._ticks)):
            begin, end = self._ticks[at - 1].at, self._ticks[at].at
            if end > stream.sent_at and begin < until and at not in own:
                yield at


def chunk_seen(prefills: Sequence[Prefill]) -> int:
    """The size of a chunk that best explains over how many iterations prompts went.

    Engines are set to powers of two, mostly, so of equally good ones such a one is taken. Where no
    prompt took two iterations, the longest one is what is known. 0 if there was no prompt.
    """
    if all(each.iterations < 2 for each in prefills):
        return max((each.tokens for each in prefills), default=0)
    longest = max(each.tokens for each in prefills)
    powers = [1 << power for power in range(4, longest.bit_length() + 1)]
    others = [-(-each.tokens // each.iterations) + each.decodes for each in prefills]
    sizes = [*powers, *others]
    misses = [_misses(prefills, size) for size in sizes]
    return sizes[misses.index(min(misses))]


def _misses(prefills: Sequence[Prefill], size: int) -> int:
    wrong = 0
    for tokens, decodes, iterations in prefills:
        wrong += abs(-(-tokens // max(1, size - decodes)) - iterations)
    return wrong


def without_stalls(samples: Sequence[Sample]) -> list[Sample]:
    """The samples without those that took much longer or shorter than all the others say.

    A suspended process makes a few of these. If there are many, they are no stalls: all stay.
    """
    if not samples:
        return []
    predictor = LatencyPredictor(samples)
    near = [
        sample
        for sample in samples
        if 1 / STALL < sample.seconds / predictor.predict_s(sample.load) < STALL
    ]
    return near if len(near) >= (1 - STALLS_MAX) * len(samples) else list(samples)


def _ticks(times: Sequence[float]) -> list[_Tick]:
    """Tokens that came together as one tick, timed by the first of them."""
    ticks: list[_Tick] = []
    for at in times:
        if ticks and at - ticks[-1].at < MERGED_S:
            ticks[-1] = _Tick(ticks[-1].at, ticks[-1].tokens + 1)
        else:
            ticks.append(_Tick(at, 1))
    return ticks


def _window(intervals: Sequence[tuple[BatchLoad, float, int]]) -> list[Sample]:
    tokens = sum([tokens for _, _, tokens in intervals])
    if tokens < WINDOW_TOKENS_MIN:
        return []
    context = sum([load.context_tokens * count for load, _, count in intervals]) / tokens
    seconds = sum([gap_s for _, gap_s, _ in intervals]) / tokens
    return [Sample(intervals[0][0]._replace(context_tokens=round(context)), seconds)]


def _fit(chunks: Sequence[tuple[int, int]], tokens_max: int) -> bool:
    return len(chunks) == 1 or sum([tokens for tokens, _ in chunks]) <= tokens_max


def _first_at(stream: StreamTimes) -> float:
    return stream.token_at[0] if stream.token_at else inf
