"""Samples of an engine's iterations: it is loaded in steps, and its streams are timed.

A *ramp* begins with one stream that lasts, the marker. To it come others, and none leaves: at each
doubling of their number a group fills up, then single prompts of several lengths come one by one,
each after a few iterations that only decode. Contexts grow as streams decode, and differ between
ramps. The first ramp is of single prompts alone: from it the size of a chunk is learned, and what a
prompt costs, so that the later ramps ask for no more than the engine computes in their time.

The load stays within what the engine is known to hold: its batch, its context, most of its memory.
A ramp also ends when the engine lets requests wait.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from agents.core.iteration_samples import Recording, StreamTimes, chunk_seen, without_stalls
from agents.core.latency_predictor import LatencyPredictor, Sample, mean_error
from agents.profiler.engine import ProfiledEngine
from agents.profiler.stream import EngineUnusable, Stream
from infra.process import end_all

MARKER_TOKENS = 64  # of its prompt
SETTLE_TOKENS = 12  # of the marker, between newcomers: one sample of decoding and a part
OUTPUT_TOKENS = 4096  # more than a ramp lasts
PROMPT_TOKENS_MAX = 16_384
PROMPT_TOKENS_MIN = 16
DECODES_UNKNOWN, DECODES_MAX = 64, 256
KV_SHARE_MAX = 0.7  # of the memory; online users are not here, but streams grow
EXPLORING_SHARE = 0.25  # of the time: the first ramp
FILLING_SHARE = 0.2  # of the time: one group that fills up a ramp
SIZES = (32, 96, 256, 512, 1024, 1536, 3072, 6144, 12_288)  # of the first ramp
FILLS = (48, 400, 1600)  # tokens of the prompts that fill up
CHUNK_PARTS = (0.25, 0.9, 0.08, 0.6, 0.4, 1.8, 0.15, 0.75)  # of a chunk: single prompts
PROBES_PER_LEVEL = 3
HELD_OUT = 5  # one sample in so many is kept from the fit, to measure its error
SAMPLES_MIN, PREFILL_SAMPLES_MIN = 30, 6
LONGER_S = 20.0  # more time where the given one was too short
RECORDINGS_MAX = 200


@dataclass(frozen=True, slots=True)
class Measured:
    """What a profiling run found of an engine's iterations."""

    predictor: LatencyPredictor
    error: float  # mean and relative, on samples that the fit had not
    samples: int
    held_out: int
    chunk_tokens: int
    decodes_max: int  # most that decoded at once
    prefill_s_per_token: float
    seconds: float


class Measurement:
    """Run it once. Raises EngineUnusable."""

    def __init__(
        self,
        engine: ProfiledEngine,
        seconds: float,
        dice: random.Random,
        chunk_tokens: int | None = None,
    ) -> None:
        """`chunk_tokens`: the operator's, else it is learned."""
        self._engine = engine
        self._seconds = seconds
        self._dice = dice
        self._given_chunk = chunk_tokens
        self._began_at = time.monotonic()
        self._recorded: list[Sequence[StreamTimes]] = []
        self._prefill_s_per_token = 0.0
        capacity = engine.reading.kv_capacity_tokens
        self._kv_tokens_max = inf if capacity is None else KV_SHARE_MAX * capacity
        longest = min(engine.context_tokens // 2, self._kv_tokens_max / 2, PROMPT_TOKENS_MAX)
        self._prompt_tokens_max = max(PROMPT_TOKENS_MIN, int(longest))
        self._decodes_max = min(engine.batch_max or DECODES_UNKNOWN, DECODES_MAX)

    async def run(self, say: Callable[[str], None] = lambda text: None) -> Measured:
        """Load the engine for the given seconds, and fit what was seen."""
        sizes = [size for size in SIZES if size <= self._prompt_tokens_max]
        await self._ramp([[size] for size in sizes], self._seconds * EXPLORING_SHARE)
        self._learn_prefill()
        ramps = 0
        while self._wants_more() and len(self._recorded) < RECORDINGS_MAX:
            seconds = max(self._left_s(), EXPLORING_SHARE * self._seconds)
            say(f"measuring iterations, {seconds:.0f} s left")
            await self._ramp(self._steps(FILLS[ramps % len(FILLS)], ramps), seconds)
            ramps += 1
        return self._fitted()

    def _left_s(self) -> float:
        return self._began_at + self._seconds - time.monotonic()

    def _wants_more(self) -> bool:
        """Until its time is over, or longer where that gave too little."""
        left_s = self._left_s()
        return left_s > 0 or (left_s > -LONGER_S and not _is_enough(self._samples()))

    @property
    def _chunk_tokens(self) -> int:
        if self._given_chunk is not None:
            return self._given_chunk
        prefills = [each for streams in self._recorded for each in Recording(streams).prefills()]
        return chunk_seen(prefills) or self._prompt_tokens_max

    def _steps(self, fill_tokens: int, ramp: int) -> list[list[int]]:
        """The prompts of a ramp: each list comes at once, after the one before has settled."""
        chunk = self._chunk_tokens
        fill_tokens = max(PROMPT_TOKENS_MIN, min(fill_tokens, self._prompt_tokens_max // 2))
        fill_s = fill_tokens * self._prefill_s_per_token
        at_once = max(1, int(FILLING_SHARE * self._seconds / fill_s)) if fill_s else DECODES_MAX
        parts = [CHUNK_PARTS[(ramp * 5 + at) % len(CHUNK_PARTS)] for at in range(len(CHUNK_PARTS))]
        steps: list[list[int]] = []
        count, level, probe = 1, 2, 0
        while count < self._decodes_max:
            missing = min(level - count - PROBES_PER_LEVEL, at_once)
            if missing > 0:
                steps.append([fill_tokens + self._dice.randrange(16) for _ in range(missing)])
                count += missing
            for _ in range(min(PROBES_PER_LEVEL, self._decodes_max - count)):
                wanted = parts[probe % len(parts)] * chunk * self._dice.uniform(0.9, 1.1)
                tokens = min(round(wanted), self._prompt_tokens_max)
                steps.append([max(PROMPT_TOKENS_MIN, tokens)])
                count, probe = count + 1, probe + 1
            if missing >= at_once:
                break
            level = 2 * level
        return steps

    async def _ramp(self, steps: Sequence[Sequence[int]], seconds: float) -> None:
        until = time.monotonic() + seconds
        engine = self._engine
        room = engine.context_tokens - MARKER_TOKENS
        marker = Stream(MARKER_TOKENS, max(1, min(2 * OUTPUT_TOKENS, room)))
        streams, tasks = [marker], [engine.start(marker)]
        try:
            await _answered(marker)
            await marker.reached(SETTLE_TOKENS)
            for sizes in steps:
                if time.monotonic() > until or marker.has_ended or self._is_full(streams, sizes):
                    break
                news = [self._newcomer(size) for size in sizes]
                streams += news
                tasks += [engine.start(stream) for stream in news]
                if not await self._all_began(news):
                    break
                await marker.reached(len(marker.token_at) + SETTLE_TOKENS)
        finally:
            await end_all(tasks)
        self._recorded.append([stream.times for stream in streams])
        await engine.idle()

    def _newcomer(self, tokens: int) -> Stream:
        room = self._engine.context_tokens - tokens
        return Stream(tokens, max(1, min(OUTPUT_TOKENS, room - 1)))

    def _is_full(self, streams: Sequence[Stream], sizes: Sequence[int]) -> bool:
        if len(streams) + len(sizes) > self._decodes_max:
            return True
        held = sum([stream.prompt_tokens + len(stream.token_at) for stream in streams])
        return held + sum(sizes) > self._kv_tokens_max

    async def _all_began(self, news: Sequence[Stream]) -> bool:
        """Whether each newcomer got a first token; False once the engine lets one wait."""
        watch = asyncio.create_task(self._until_one_waits())
        began = asyncio.create_task(_all_answered(news))
        try:
            await asyncio.wait([watch, began], return_when=asyncio.FIRST_COMPLETED)
            await (began if began.done() else watch)  # raises what went wrong
            return began.done()
        finally:
            await end_all([watch, began])

    async def _until_one_waits(self) -> None:
        """Return when requests wait in two scrapes, one second apart, and none runs that computes
        a prompt."""
        before = -1
        while True:
            await asyncio.sleep(1.0)
            reading = await self._engine.scrape()
            waiting = reading.waiting or 0
            if 0 < waiting == before:
                self._decodes_max = max(1, min(self._decodes_max, reading.running or 1))
                return
            before = waiting

    def _learn_prefill(self) -> None:
        """What a token of a prompt costs, from the longest that came alone."""
        seen = [
            (stream.prompt_tokens, stream.token_at[0] - stream.sent_at)
            for streams in self._recorded
            for stream in streams[1:]
            if stream.token_at
        ]
        if not seen:
            return
        (few, short_s), (many, long_s) = min(seen), max(seen)
        if many > few:
            self._prefill_s_per_token = max(0.0, (long_s - short_s) / (many - few))

    def _samples(self) -> list[Sample]:
        chunk, samples = self._chunk_tokens, list[Sample]()
        for streams in self._recorded:
            samples += Recording(streams).samples(chunk)
        return without_stalls(samples)

    def _fitted(self) -> Measured:
        chunk, samples = self._chunk_tokens, self._samples()
        if not _is_enough(samples):
            with_prefill = sum(sample.load.prefills > 0 for sample in samples)
            raise EngineUnusable(
                f"only {len(samples)} iterations could be timed in {self._seconds:.0f} s, "
                f"{with_prefill} of them with prefill: give a longer --duration-s, and see that "
                "the engine sends each token by itself and that nobody else uses it"
            )
        self._dice.shuffle(samples)
        held_out = samples[::HELD_OUT]
        fitted = [sample for at, sample in enumerate(samples) if at % HELD_OUT]
        return Measured(
            predictor=LatencyPredictor(samples),
            error=mean_error(LatencyPredictor(fitted), held_out),
            samples=len(samples),
            held_out=len(held_out),
            chunk_tokens=chunk,
            decodes_max=max(sample.load.decodes for sample in samples),
            prefill_s_per_token=self._prefill_s_per_token,
            seconds=time.monotonic() - self._began_at,
        )


def _is_enough(samples: Sequence[Sample]) -> bool:
    with_prefill = sum(sample.load.prefills > 0 for sample in samples)
    return len(samples) >= SAMPLES_MIN and with_prefill >= PREFILL_SAMPLES_MIN


async def _all_answered(streams: Sequence[Stream]) -> None:
    for stream in streams:
        await _answered(stream)


async def _answered(stream: Stream) -> None:
    """Return when it has its first token. Raises EngineUnusable if it failed."""
    await stream.reached(1)
    if stream.problem:
        raise EngineUnusable(f"a prompt of {stream.prompt_tokens} tokens: {stream.problem}")
