"""One inference engine as a model of time: continuous batching, chunked prefill, paged KV.

Requests arrive, and `arrival_s` later the scheduler sees them in the waiting queue, first come
first served; before that, one prompt after the other takes `arrival_token_s` for each of its
tokens. The engine runs iterations. Each gives one token to every decoding sequence and spends the
rest of its token budget on prefill, oldest first, admitting from the queue while the batch and the
memory have room. What waits is *pending*. A request that arrives during an iteration joins the
next.

The engine plans a *stretch*: one iteration if anything is in prefill, else as many decode
iterations as nothing can happen in (nobody finishes, memory is enough, no known arrival). Within
it only the contexts change, by one token per sequence, so iteration i lasts `first_s + i ·
growth_s` and the end of the k-th is a quadratic in k. An arrival or an abort cuts the stretch
after the running iteration. So a driver may step at every token (`watch_tokens`, the HTTP server)
or jump from one change to the next in O(1) (a simulator with thousands of engines), with the same
times to the last bit.

The driver's duty: call `step` at `wake_at`, or a little later; call everything else with a `now`
that never runs backwards.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from agents.sim.batch import Batch, Chunk, EngineInternals, SequenceState
from agents.sim.events import (
    Decoded,
    DuplicateId,
    EngineStats,
    Finished,
    NeverFits,
    Preempted,
    PrefillFinished,
    QueueFull,
    SimEvent,
    SimRequest,
    StepResult,
)
from agents.sim.kv_cache import BLOCK_TOKENS, KvCache
from agents.sim.profiles import Profile, Publishing


@dataclass(slots=True)
class Stretch:
    """`rounds` iterations from `start_s`; `done` of them are settled."""

    start_s: float
    first_s: float
    growth_s: float
    rounds: int
    done: int = 0
    end_s: float = field(init=False)  # when the whole stretch is over

    def __post_init__(self) -> None:
        self.end_s = self.end_of(self.rounds)

    def end_of(self, rounds: int) -> float:
        """When the first `rounds` iterations are over."""
        return self.start_s + rounds * (self.first_s + self.growth_s * (rounds - 1) / 2)

    def rounds_by(self, now: float) -> int:
        """How many iterations are over at `now`, of those in the stretch."""
        if now >= self.end_s:
            return self.rounds
        rounds = max(min(self._estimate(now - self.start_s), self.rounds), 0)
        while rounds > 0 and self.end_of(rounds) > now:
            rounds -= 1
        while rounds < self.rounds and self.end_of(rounds + 1) <= now:
            rounds += 1
        return rounds

    def cut(self, at: float) -> None:
        """End the stretch with the iteration that is running at `at`."""
        self.rounds = min(self.rounds, max(self.rounds_by(at), self.done) + 1)
        self.end_s = self.end_of(self.rounds)

    def _estimate(self, elapsed_s: float) -> int:
        if elapsed_s <= 0:
            return 0
        if self.growth_s == 0:
            return int(elapsed_s / self.first_s)
        linear = self.first_s - self.growth_s / 2
        root = math.sqrt(linear * linear + 2 * self.growth_s * elapsed_s)
        return int((root - linear) / self.growth_s)


QUEUE_LIMIT = 4096
ALIKE_TOKENS = 32  # of SGLang: prompts with that many equal tokens at the start are duplicates


class EngineSim:
    """submit, abort, step, stats: all at a `now` in the engine's own seconds."""

    def __init__(
        self,
        profile: Profile,
        *,
        kv_tokens: int | None = None,
        max_seqs: int | None = None,
        block_tokens: int = BLOCK_TOKENS,
        queue_limit: int = QUEUE_LIMIT,
        watch_tokens: bool = False,
    ) -> None:
        """`kv_tokens` and `max_seqs` replace the profile's own."""
        self.profile = profile
        self.block_tokens = block_tokens
        blocks = (kv_tokens or profile.kv_tokens) // block_tokens
        if blocks < 2:
            raise ValueError(f"kv_tokens is less than two blocks of {block_tokens} tokens")
        self.cache = KvCache(blocks)
        self._batch = Batch(
            self.cache, block_tokens, max_seqs or profile.max_seqs, profile.publishing
        )
        self._queue_limit = queue_limit
        self._watch_tokens = watch_tokens

        self._arriving: deque[SequenceState] = deque()
        self._waiting: deque[SequenceState] = deque()
        self._sequences: dict[int, SequenceState] = {}
        self._read_at = 0.0  # when every prompt so far is cut into tokens
        self._stretch: Stretch | None = None
        self._chunks: list[Chunk] = []
        self._stalled = False  # the head of the queue didn't fit and nothing changed since
        self._decoding_ids: tuple[int, ...] | None = None  # until the batch changes
        self._events: list[SimEvent] = []

        self._preemptions = self._prompt_tokens = self._generated_tokens = 0
        self._queried_tokens = self._hit_tokens = self._finished = self._aborted = 0

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence, prompt and answer, that can ever run here."""
        return self.cache.capacity * self.block_tokens

    @property
    def running(self) -> int:
        """Sequences in the batch, as of the last call."""
        return self._batch.size

    @property
    def nobody_waits(self) -> bool:
        """Whether all requests are in the batch, as of the last call."""
        return not (self._waiting or self._arriving)

    @property
    def wake_at(self) -> float | None:
        """When the next step is due; None while there is nothing to do."""
        if self._events:
            return self._events[0].at
        if self._stretch is not None:
            if self._watch_tokens:
                return self._stretch.end_of(self._stretch.done + 1)
            return self._stretch.end_s
        return self._arriving[0].ready_at if self._arriving else None

    def submit(self, request: SimRequest, now: float) -> None:
        """Queue a request. Raises NeverFits, QueueFull or DuplicateId, and keeps nothing then.

        `wake_at` may be earlier afterwards.
        """
        if request.total_tokens > self.capacity_tokens:
            raise NeverFits(
                f"prompt ({request.prompt_tokens} tokens) and answer ({request.output_tokens}) "
                f"exceed the KV memory of {self.capacity_tokens} tokens"
            )
        if request.id in self._sequences:
            raise DuplicateId(f"request {request.id} is still in the engine")
        if len(self._waiting) + len(self._arriving) >= self._queue_limit:
            raise QueueFull(f"{self._queue_limit} requests are waiting already")
        self._settle(now)
        arriving_s = self.profile.arrival_token_s * request.prompt_tokens
        self._read_at = max(self._read_at, now) + arriving_s
        seq = SequenceState(request, ready_at=self._read_at + self.profile.arrival_s)
        self._sequences[request.id] = seq
        self._arriving.append(seq)
        if self._stretch is not None:
            self._stretch.cut(seq.ready_at)
        self._settle(now)

    def abort(self, request_id: int, now: float) -> bool:
        """Drop a request and free its memory at once. False if it is not here (any more)."""
        self._settle(now)
        seq = self._sequences.pop(request_id, None)
        if seq is None:
            return False
        self._aborted += 1
        if seq.blocks:
            self._leave(seq)
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not seq]
        elif seq in self._waiting:
            self._waiting.remove(seq)
            self._stalled = False
        else:
            self._arriving.remove(seq)
        if self._stretch is not None:
            self._stretch.cut(now)
        return True

    def pin(self, keys: Sequence[int], now: float) -> list[int]:
        """Keep the cached ones of these leading blocks until `unpin`, for another engine."""
        self._settle(now)
        hits = self.cache.matched(keys)
        return self.cache.reserve(keys[:hits], hits, spare=0) or []

    def unpin(self, pinned: Sequence[int], now: float) -> None:
        """Nobody fetches them any more. `wake_at` may be earlier afterwards."""
        self._settle(now)
        self.cache.release(pinned, 0)
        self._stalled = False
        if self._stretch is None and self._waiting:
            self._plan(now)

    def receive(self, keys: Sequence[int], now: float) -> None:
        """These blocks came from another engine, as many as there is room for: they are cached."""
        self._settle(now)
        new = keys[self.cache.matched(keys) :]
        room = min(len(new), self.cache.available)
        self.cache.take(room)
        fresh = self.cache.publish(new[:room])
        self.cache.release(fresh, room - len(fresh))

    def step(self, now: float) -> StepResult:
        """Let everything up to `now` happen. Call again at the returned `wake_at`."""
        self._settle(now)
        events, self._events = self._events, []
        return StepResult(events, self.wake_at)

    def stats(self, now: float) -> EngineStats:
        """The numbers at `now`; events up to then stay for the next step."""
        ahead, batch = self._ahead(now), self._batch
        used = self.cache.used + (batch.growth(ahead) if ahead else 0)
        return EngineStats(
            running=batch.size,
            waiting=len(self._waiting),
            kv_used_tokens=used * self.block_tokens,
            kv_capacity_tokens=self.capacity_tokens,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens + ahead * len(batch.decoding),
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            finished=self._finished,
            aborted=self._aborted,
        )

    def inside(self, now: float) -> EngineInternals:
        """What only a simulation can read: the sequences and their progress."""
        ahead = self._ahead(now)
        stretch = self._stretch
        left_s = 0.0 if stretch is None else stretch.end_of(stretch.done + ahead + 1) - now
        computing = {seq.request.id: tokens for seq, tokens in self._chunks}
        return EngineInternals(
            iteration_left_s=max(0.0, left_s),
            rounds_ahead=ahead,
            prefilling=tuple(
                (seq, seq.target - seq.computed - computing.get(seq.request.id, 0))
                for seq in self._batch.prefilling
            ),
            decoding=tuple(self._batch.decoding),
            queued=(*self._waiting, *self._arriving),
            available_blocks=self.cache.available - self._batch.growth(ahead),
        )

    def _ahead(self, now: float) -> int:
        """Decode iterations of the running stretch that are over and not settled yet.

        A reader of the engine's numbers need not cut a long stretch into pieces: what the
        iterations add is known without them.
        """
        stretch = self._stretch
        rounds = 0 if stretch is None else stretch.rounds_by(now)
        if stretch is None or rounds == stretch.rounds:
            self._settle(now)
            return 0
        self._arrive(now)
        return rounds - stretch.done

    def _settle(self, now: float) -> None:
        while True:
            stretch = self._stretch
            if stretch is None:
                if not self._arriving or self._arriving[0].ready_at > now:
                    return
                self._plan(self._arriving[0].ready_at)
                continue
            self._run(stretch, stretch.rounds_by(now))
            if stretch.done < stretch.rounds:
                self._arrive(now)
                return
            self._plan(stretch.end_s)

    def _run(self, stretch: Stretch, rounds: int) -> None:
        fresh = rounds - stretch.done
        if fresh <= 0:
            return
        at = stretch.end_of(rounds)
        gap_s = (at - stretch.end_of(stretch.done)) / fresh
        stretch.done = rounds
        batch = self._batch
        if batch.decoding:
            if self._decoding_ids is None:
                self._decoding_ids = tuple(seq.request.id for seq in batch.decoding)
            batch.decode(fresh)
            self._generated_tokens += fresh * len(batch.decoding)
            self._events.append(Decoded(at, self._decoding_ids, fresh, gap_s))
        for seq, tokens in self._chunks:
            if batch.prefill(seq, tokens):
                self._first_token(seq, at, gap_s)
        if rounds == stretch.rounds:
            self._finish(at)

    def _first_token(self, seq: SequenceState, at: float, gap_s: float) -> None:
        self._decoding_ids = None
        self._stalled = False  # what it published may be what the head of the queue needs
        request = seq.request
        self._generated_tokens += request.generates
        if seq.length > request.prompt_tokens + 1:
            self._events.append(Decoded(at, (request.id,), 1, gap_s))
            return
        cached_tokens = seq.cached_tokens or 0
        self._prompt_tokens += request.prompt_tokens
        self._events.append(PrefillFinished(at, request.id, cached_tokens))

    def _finish(self, at: float) -> None:
        for seq in [seq for seq in self._batch.decoding if seq.remaining == 0]:
            self._leave(seq)
            del self._sequences[seq.request.id]
            self._finished += 1
            self._events.append(Finished(at, seq.request.id))

    def _leave(self, seq: SequenceState) -> None:
        self._batch.remove(seq)
        self._decoding_ids = None
        self._stalled = False

    def _arrive(self, now: float) -> None:
        while self._arriving and self._arriving[0].ready_at <= now:
            self._waiting.append(self._arriving.popleft())

    def _plan(self, at: float) -> None:
        """Choose what the iterations from `at` on compute."""
        self._arrive(at)
        self._stretch = None
        self._chunks = []
        batch = self._batch
        self._fill(at)
        if not batch.size:
            return
        if self._chunks:
            self._stretch = Stretch(at, self._mixed_s(), 0.0, 1)
        else:
            self._stretch = self._decode_stretch(at)

    def _fill(self, at: float) -> int:
        """Choose who computes in the iteration at `at`; returns what is left of its tokens."""
        self._make_room(at)
        budget = max(self.profile.batch_tokens - len(self._batch.decoding), 1)
        for seq in self._batch.prefilling:
            budget -= self._add_chunk(seq, budget)
        return self._admit(budget, at)

    def _make_room(self, at: float) -> None:
        # A preempted sequence is not admitted again at once: admission leaves every sequence a
        # block to grow, which is more than the preemption freed.
        while self._batch.rounds_that_fit(1) < 1:
            seq = self._batch.newest()
            self._leave(seq)
            self._waiting.appendleft(seq)
            self._preemptions += 1
            self._events.append(Preempted(at, seq.request.id))

    def _add_chunk(self, seq: SequenceState, budget: int) -> int:
        if budget <= 0:
            return 0
        chunk = self._batch.chunk(seq, budget)
        self._chunks.append(chunk)
        return chunk[1]

    def _admit(self, budget: int, at: float) -> int:
        if budget > 0 and self.profile.publishing is Publishing.COMPUTED:
            self._put_duplicates_last()
        while budget > 0 and self._waiting and not self._stalled:
            seq = self._waiting[0]
            if not self._take_in(seq, at):
                self._stalled = True
                break
            self._waiting.popleft()
            budget -= self._add_chunk(seq, budget)
        return budget

    def _put_duplicates_last(self) -> None:
        """Of waiting prompts that begin alike and are not cached, all but the first go last.

        So the first has most often been computed when the others are admitted. SGLang with
        `--schedule-policy lpm` (`SchedulePolicy._compute_prefix_matches`): up to 32 tokens cached,
        and 32 that an earlier one in the queue shares. Its order by cached tokens is left out.
        """
        if len(self._waiting) < 2:
            return
        blocks = max(1, ALIKE_TOKENS // self.block_tokens)
        seen: set[int] = set()
        first, last = list[SequenceState](), list[SequenceState]()
        for seq in self._waiting:
            keys = seq.request.keys[: blocks + 1]
            is_cached = self.cache.matched(keys) > blocks
            start = keys[blocks - 1] if len(keys) >= blocks and not is_cached else None
            (last if start in seen else first).append(seq)
            if start is not None:
                seen.add(start)
        self._waiting = deque([*first, *last])

    def _take_in(self, seq: SequenceState, at: float) -> bool:
        first_time = seq.cached_tokens is None
        if not self._batch.admit(seq):
            return False
        if first_time:
            self._queried_tokens += seq.request.prompt_tokens
            self._hit_tokens += seq.computed
        return True

    def _mixed_s(self) -> float:
        batch = self._batch
        chunks = tuple((tokens, seq.computed + tokens) for seq, tokens in self._chunks)
        return self.profile.iteration_s(chunks, len(batch.decoding), batch.context_tokens)

    def _decode_stretch(self, at: float) -> Stretch:
        batch = self._batch
        sequences = len(batch.decoding)
        rounds = batch.rounds_that_fit(min(seq.remaining for seq in batch.decoding))
        first_s = self.profile.decode_s(sequences, batch.context_tokens)
        stretch = Stretch(at, first_s, self.profile.context_s * sequences, rounds)
        if self._arriving:
            stretch.cut(self._arriving[0].ready_at)
        return stretch
