"""The simulated engine with HyGen's two-phase scheduler: offline work in what online leaves.

Each iteration is composed in two phases (Sun et al., "HyGen", 2025, algorithms 1 and 2). First the
online requests, exactly as `agents.sim.engine` does it alone. Then offline ones, as far as three
budgets go: the seconds of an iteration as the latency predictor sees them, the tokens of an
iteration, and memory. Offline sequences that decode come first, oldest before newest; then those in
prefill, with the longest chunk that fits; then new ones in the order of the offline queue. Nothing
of that delays an online request by more than one iteration of `budget_s`, or of what the online
requests themselves take if that is longer.

An offline sequence that doesn't fit an iteration pauses: it keeps its memory and computes nothing.
New ones are admitted while those that pause hold a quarter of the memory at most (ours: else a
small budget, which lets in a few tokens of prefill but not the decode of a long document, fills the
memory with sequences that can't go on; with none allowed, one long document stops all offline work
until the online load is low, and what a budget yields hangs on where such documents fall). If
memory is short, offline sequences give theirs back, newest first, before any online one does; they
go back to their place in the offline queue, and what they published may still be cached when they
come again. While an online request waits for memory, no offline one is admitted.

Without a budget this is the paper's Sarathi++ (online first, blind to latency), and with offline
requests submitted at a fixed rate its HyGen*. While there is no offline request, iterations are
those of `EngineSim` to the last bit, in stretches; otherwise they are planned one by one. A
request whose decode alone takes longer than the budget waits until the budget is larger;
`agents.core.slo_profile` finds budgets.

Other than in the paper, the budget never shortens an online request's chunk (algorithm 1 passes it
to both phases): online requests are served as without HyGen. And offline requests are scheduled at
once, not by a second process that is one iteration behind.
"""

import math
from collections.abc import Callable

from agents.core.latency_predictor import BatchLoad, LatencyPredictor
from agents.sim.batch import SequenceState
from agents.sim.engine import EngineSim, Stretch
from agents.sim.events import DuplicateId, NeverFits, Preempted, SimRequest
from agents.sim.profiles import Profile
from agents.sim.profiling_run import Composition
from mesh.core.offline.offline_queue import OfflineQueue

PAUSED_SHARE_MAX = 0.25  # of the memory

Watch = Callable[[Composition, float], None]  # an iteration and its seconds


class TwoPhaseEngine(EngineSim):
    """An EngineSim that also takes requests marked `offline`; `offline_queue` orders them."""

    def __init__(
        self,
        profile: Profile,
        offline_queue: OfflineQueue,
        *,
        predictor: LatencyPredictor | None = None,
        budget_s: float = math.inf,
        watch: Watch | None = None,
        kv_tokens: int | None = None,
    ) -> None:
        """`budget_s` of an iteration needs a `predictor`. `watch` is called at each plan."""
        if not budget_s > 0:
            raise ValueError(f"budget_s is {budget_s}: it should be above 0")
        if predictor is None and budget_s < math.inf:
            raise ValueError("a budget_s needs a predictor")
        super().__init__(profile, kv_tokens=kv_tokens)
        self._offline_queue = offline_queue
        self._predictor = predictor
        self._budget_s = budget_s
        self._watch = watch
        self._max_seqs = profile.max_seqs
        self._held: list[SequenceState] = []  # offline, with memory, computing or paused; by age

    @property
    def offline_waiting(self) -> int:
        """Offline requests without memory."""
        return len(self._offline_queue)

    @property
    def offline_held(self) -> int:
        """Offline requests with memory, computing or paused."""
        return len(self._held)

    def submit(self, request: SimRequest, now: float) -> None:
        """As the engine's; an offline request may also raise OfflineQueueFull.

        It enters the offline queue at once: what `arrival_s` stands for is done in its own time.
        """
        if not request.offline:
            super().submit(request, now)
            return
        if request.total_tokens > self.capacity_tokens:
            raise NeverFits(
                f"offline request {request.id} has {request.total_tokens} tokens, "
                f"the KV memory {self.capacity_tokens}"
            )
        if request.id in self._sequences:
            raise DuplicateId(f"request {request.id} is still in the engine")
        self._settle(now)
        prompt_keys = request.keys[: request.prompt_tokens // self.block_tokens]
        self._offline_queue.add(request.id, prompt_keys)
        self._sequences[request.id] = SequenceState(request, ready_at=now)
        if self._stretch is None:
            self._plan(now)
        else:
            self._stretch.cut(now)

    def abort(self, request_id: int, now: float) -> bool:
        """Drop a request and free its memory at once. False if it is not here (any more)."""
        self._settle(now)
        seq = self._sequences.get(request_id)
        if seq is None or not seq.request.offline:
            return super().abort(request_id, now)
        del self._sequences[request_id]
        self._aborted += 1
        if seq.blocks:
            self._leave(seq)
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not seq]
        self._offline_queue.forget(request_id)
        if self._stretch is not None:
            self._stretch.cut(now)
        return True

    def _plan(self, at: float) -> None:
        super()._plan(at)
        if self._watch is not None and self._stretch is not None:
            self._watch(self._composition(), self._stretch.first_s)

    def _fill(self, at: float) -> int:
        if not self._held and not self._offline_queue:
            return super()._fill(at)
        self._decoding_ids = None
        self._pause_all()
        tokens_left = super()._fill(at)
        tokens_left, load = self._add_decodes(tokens_left, self._composition().load, at)
        tokens_left, load = self._add_prefills(tokens_left, load)
        if self._paused_blocks() > PAUSED_SHARE_MAX * self.cache.capacity:
            return tokens_left
        return self._admit_offline(tokens_left, load)

    def _pause_all(self) -> None:
        """Let no offline sequence compute; they keep their memory until `_resume` or `_leave`."""
        batch = self._batch
        batch.decoding = [seq for seq in batch.decoding if not seq.request.offline]
        batch.prefilling = [seq for seq in batch.prefilling if not seq.request.offline]

    def _resume(self, seq: SequenceState) -> None:
        """Let a paused sequence compute again, as the batch's newest."""
        batch = self._batch
        (batch.decoding if seq.computed >= seq.target else batch.prefilling).append(seq)

    def _paused_blocks(self) -> int:
        computing = [*self._batch.decoding, *self._batch.prefilling]
        held = sum([seq.blocks for seq in self._held])
        return held - sum([seq.blocks for seq in computing if seq.request.offline])

    def _add_decodes(self, tokens: int, load: BatchLoad, at: float) -> tuple[int, BatchLoad]:
        batch, cache = self._batch, self.cache
        growing = batch.growth(1)
        for seq in [seq for seq in self._held if seq.computed >= seq.target]:
            if tokens < 1 or batch.size >= self._max_seqs:
                break
            if not seq.blocks:
                continue  # it gave its memory to an older one
            more = load.with_decode(seq.length)
            if not self._in_time(more):
                continue
            needed = int(seq.computed >= seq.blocks * self.block_tokens)
            while cache.available < growing + needed and self._held[-1] is not seq:
                self._preempt_offline(at)
            if cache.available < growing + needed:
                continue
            growing += needed
            self._resume(seq)
            tokens, load = tokens - 1, more
        return tokens, load

    def _add_prefills(self, tokens: int, load: BatchLoad) -> tuple[int, BatchLoad]:
        for seq in self._held:
            if seq.computed >= seq.target:
                continue
            if tokens < 1 or self._batch.size >= self._max_seqs:
                break
            chunk = self._longest_chunk(tokens, load, seq.computed)
            if chunk < 1:  # one that is less far may fit
                continue
            self._resume(seq)
            tokens, load = self._add_offline_chunk(seq, chunk, tokens, load)
        return tokens, load

    def _admit_offline(self, tokens: int, load: BatchLoad) -> int:
        while not self._waiting and self._longest_chunk(tokens, load, 0) >= 1:
            first = self._offline_queue.first()
            if first is None:
                break
            seq = self._sequences[first]
            if not super()._take_in(seq, 0.0):
                break
            self._offline_queue.take(first)
            self._held.append(seq)
            chunk = self._longest_chunk(tokens, load, seq.computed)
            if chunk < 1:  # attending to what is cached of it takes too long now: it pauses
                self._batch.prefilling.remove(seq)
                break
            tokens, load = self._add_offline_chunk(seq, chunk, tokens, load)
        return tokens

    def _add_offline_chunk(
        self, seq: SequenceState, chunk: int, tokens: int, load: BatchLoad
    ) -> tuple[int, BatchLoad]:
        added = self._add_chunk(seq, chunk)
        return tokens - added, load.with_prefill(added, seq.computed)

    def _take_in(self, seq: SequenceState, at: float) -> bool:
        while not super()._take_in(seq, at):
            if not self._held or self._batch.size >= self._max_seqs:
                return False
            self._preempt_offline(at)
        return True

    def _make_room(self, at: float) -> None:
        while self._held and self._batch.rounds_that_fit(1) < 1:
            self._preempt_offline(at)
        super()._make_room(at)

    def _preempt_offline(self, at: float) -> None:
        seq = self._held[-1]
        self._leave(seq)
        self._offline_queue.put_back(seq.request.id)
        self._preemptions += 1
        self._events.append(Preempted(at, seq.request.id))

    def _leave(self, seq: SequenceState) -> None:
        if seq.request.offline:
            self._held.remove(seq)
            if seq not in self._batch.decoding and seq not in self._batch.prefilling:
                self._resume(seq)
        super()._leave(seq)

    def _finish(self, at: float) -> None:
        ended = [s for s in self._batch.decoding if s.request.offline and not s.remaining]
        super()._finish(at)
        for seq in ended:
            self._offline_queue.forget(seq.request.id)

    def _decode_stretch(self, at: float) -> Stretch:
        if self._held or self._offline_queue:
            return Stretch(at, self._mixed_s(), 0.0, 1)
        return super()._decode_stretch(at)

    def _composition(self) -> Composition:
        batch = self._batch
        chunks = tuple([(tokens, seq.computed + tokens) for seq, tokens in self._chunks])
        return Composition(chunks, len(batch.decoding), batch.context_tokens)

    def _in_time(self, load: BatchLoad) -> bool:
        return self._predictor is None or self._predictor.predict_s(load) <= self._budget_s

    def _longest_chunk(self, tokens: int, load: BatchLoad, computed_tokens: int) -> int:
        if self._predictor is None:
            return max(tokens, 0)
        return self._predictor.longest_prefill(self._budget_s, tokens, load, computed_tokens)
