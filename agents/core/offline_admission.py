"""Which offline requests the engine gets, and which go back: HyGen's two phases by admission.

Phase one is the online requests: nothing here delays them or counts as their load. Phase two: an
offline request is given to the engine if the longest iteration that it will be part of keeps to the
latency budget of the profile (HyGen, Sun et al., 2025, §4), if memory allows, and if the prompts of
offline requests under computation stay within a bound. An agent can't cut a prompt into the chunks
that fit, nor pause a request, as the paper's scheduler inside the engine does; so:

- A request that would exceed the budget beside the online requests alone is passed over: the next
  one may go. Any other that doesn't fit is waited for, so that the order of the queue is kept.
- While no online request is at the engine, long chunks delay nobody: then only the decoding that
  follows must keep to the budget, and even that need not while no other offline request is there.
- With a `burst_s` the budget is a mean: iterations below it save up, while online requests are
  there, and a prompt whose iterations exceed it goes when that much is saved.

Online bursts come first. An offline request that waits in the engine before an online one, and has
not begun, leaves at once. One whose prompt is being computed stays if what is left takes less time,
for each online request that waits behind it, than what is done would take to compute anew; one that
decodes while iterations exceed the budget stays if that costs the online requests less than its
recomputation would cost the engine. While online requests wait in the engine's queue and its memory
or batch is full, the newest offline requests leave with each scrape: as many as online ones wait,
or as wait there themselves. Where the batch's size is not known and online requests have waited for
CROWDED_S, those leave that wait there themselves. What waits here is given back when the replica is
full, or has had no room beside its online requests for so long.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import inf

from agents.core.engine_batch import EngineBatch, EngineMember
from agents.core.engine_load import may_be_packed
from agents.core.events import NOTHING_KNOWN, EngineReading
from agents.core.latency_predictor import BatchLoad
from agents.core.offline_profile import OfflineProfile
from agents.core.offline_request import Abort, Admit, Decision, GiveBack, OfflineRequest

CROWDED_S = 0.5  # a burst that lasts longer than a few prompts take
PASSED_OVER_S = 10.0  # beside online requests that leave no room for one so large
LOOKAHEAD = 16  # queued requests that one decision looks at
RUNNING_MAX = 256  # answers of offline requests at the engine
BATCH_SHARE = 0.5  # of the engine's batch, where that is known
KV_FREE_SHARE = 0.1  # of the memory, left for online requests to grow and to come
# Of a prompt's part that was computed, what must be computed anew: an engine that caches prefixes
# has most of it still when the request comes again.
REDO_SHARE = 0.25
LOAD_OF_ONE = 256  # tokens of the small request that shows whether there is room


@dataclass(slots=True)
class _Queued:
    request: OfflineRequest
    passed_over_at: float = inf


class OfflineAdmission:
    """Pass it every event, then call `decide` and carry out what it returns."""

    def __init__(self, profile: OfflineProfile, *, refreshes: bool = True) -> None:
        """`refreshes`: learn the engine's pace. Not in runs that look for the budget."""
        self._profile = profile
        self._batch = EngineBatch(profile.times, profile.chunk_tokens, refreshes=refreshes)
        self._queue: deque[_Queued] = deque()
        self._queued_tokens = 0
        self._running: dict[Hashable, OfflineRequest] = {}
        self._running_tokens = self._running_answers = 0
        self._reading: EngineReading = NOTHING_KNOWN
        self._sent_since: dict[Hashable, int] = {}  # KV of online requests the scrape lacks
        self._scrape_answered = True  # no request left for the last scrape's sake
        self._crowded_since = inf
        self._saved_s = 0.0
        self._saved_at = 0.0  # iterations by then
        self._is_full = False
        self._online_waiting = 0  # in the engine's queue, by the last scrape
        self._online_waits_since = inf
        self.admitted_total = 0
        self.given_back_total = 0
        self.aborted_total = 0

    # What it knows.

    @property
    def waiting(self) -> int:
        """Requests queued here."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Offline requests at the engine."""
        return len(self._running)

    @property
    def pace(self) -> float:
        """An iteration's seconds over the predicted ones, as learned."""
        return self._batch.pace

    def room_tokens(self, now: float) -> int:
        """Tokens, of prompts and answers, that it would take now of offline requests."""
        if self._is_full or len(self._queue) >= self._profile.queued_requests_max:
            return 0
        if now - self._crowded_since >= CROWDED_S:
            return 0
        room = self._profile.queued_tokens_max - self._queued_tokens
        if (share := self._kv_share_tokens) < inf:
            room = min(room, int(share)) if self._queue else int(share)
        return max(0, room)

    def queue_s(self, now: float) -> float:
        """Seconds that an online prompt would wait for others, as predicted. Offline ones make
        room."""
        self._advance(now)
        return self._batch.queue_s()

    def offline_kv_tokens(self) -> int:
        """Of the engine's memory, what offline requests hold now."""
        return self._batch.offline_kv_tokens() if self._running else 0

    def offline_prefilling(self) -> bool:
        """Whether a prompt of an offline request is under computation."""
        return bool(self._running) and self._batch.offline_prefill_tokens > 0

    @property
    def _kv_share_tokens(self) -> float:
        capacity = self._reading.kv_capacity_tokens
        return inf if capacity is None else self._profile.kv_share * capacity

    # What happens.

    def offer(self, request: OfflineRequest, now: float) -> bool:
        """Queue a request; False if there is no room for it."""
        if request.tokens > self.room_tokens(now):
            return False
        self._queue.append(_Queued(request))
        self._queued_tokens += request.tokens
        return True

    def withdraw(self, key: Hashable) -> None:
        """A queued request was cancelled, or its time is over."""
        for queued in self._queue:
            if queued.request.key == key:
                self._queue.remove(queued)
                self._queued_tokens -= queued.request.tokens
                return

    def online_sent(
        self, key: Hashable, prompt_tokens: int, kv_tokens: int, now: float, *, generates: bool
    ) -> None:
        """An online request was sent to the engine."""
        self._advance(now)
        self._batch.send(key, prompt_tokens, kv_tokens=kv_tokens, answers=int(generates))
        self._sent_since[key] = max(prompt_tokens, kv_tokens)

    def began(self, key: Hashable, now: float) -> None:
        """The first byte of an answer came, online or offline."""
        self._advance(now)
        self._batch.begin(key)

    def ended(self, key: Hashable, now: float, streamed_tokens: int = -1) -> None:
        """A request has left the engine; `streamed_tokens`: of a whole streamed answer."""
        self._advance(now)
        self._batch.end(key, streamed_tokens)
        self._sent_since.pop(key, None)
        request = self._running.pop(key, None)
        if request is not None:
            self._running_tokens -= request.tokens
            self._running_answers -= request.answers

    def scraped(self, reading: EngineReading, online_waiting: int, now: float) -> None:
        """The engine's own numbers; `online_waiting`: of its queue, what is online."""
        self._advance(now)
        self._reading = reading
        self._online_waiting = online_waiting
        self._online_waits_since = min(self._online_waits_since, now) if online_waiting else inf
        self._scrape_answered = False
        self._sent_since.clear()

    def restart_clock(self, now: float) -> None:
        """The agent was stopped until now."""
        self._batch.restart_clock(now)
        self._saved_at = self._batch.steps
        if self._crowded_since < inf:
            self._crowded_since = now
        if self._online_waits_since < inf:
            self._online_waits_since = now

    # What to do.

    def decide(self, now: float, *, full: bool) -> list[Decision]:
        """What to do now, in this order; `full`: new online work would be refused."""
        self._advance(now)
        self._is_full = full
        if not self._queue and not self._running:
            self._crowd(now)
            return []
        done = list(self._preempt(now, full))
        self._crowd(now)
        admitted = [] if full else self._admit(now)
        return [*done, *admitted, *self._give_back(now, full)]

    def give_back_all(self) -> list[Decision]:
        """Empty the queue: the engine is away, or the replica leaves."""
        keys = [queued.request.key for queued in self._queue]
        self._queue.clear()
        self._queued_tokens = 0
        self.given_back_total += len(keys)
        return [GiveBack(key) for key in keys]

    def _advance(self, now: float) -> None:
        batch = self._batch
        batch.advance(now)
        steps = batch.steps - self._saved_at
        self._saved_at = batch.steps
        if not self._profile.burst_s or steps <= 0.0 or not batch.online:
            return
        budget_s, seconds = self._profile.latency_budget_s, batch.seconds(batch.load())
        if seconds > budget_s:  # what online requests take by themselves is not held against it
            budget_s = max(budget_s, batch.seconds(batch.load(offline=False)))
        saved_s = self._saved_s + steps * (budget_s - seconds)
        self._saved_s = min(max(saved_s, -self._profile.burst_s), self._profile.burst_s)

    def _crowd(self, now: float) -> None:
        """Online requests alone leave no room, or do again."""
        batch, budget_s = self._batch, self._profile.latency_budget_s
        alone = batch.load(offline=False).with_decode(LOAD_OF_ONE)
        is_crowded = batch.online > 0 and batch.seconds(alone) > budget_s
        if not is_crowded:
            self._crowded_since = inf
        elif self._crowded_since == inf:
            self._crowded_since = now

    # Preemption.

    def _preempt(self, now: float, full: bool) -> Iterable[Decision]:
        if not self._running or (not self._batch.online and not full):
            return
        yield from self._leave(self._before_online())
        yield from self._leave(self._too_slow())
        yield from self._leave(self._for_the_queue(now, full))

    def _leave(self, members: Iterable[EngineMember]) -> Iterable[Decision]:
        for member in members:
            member.leaving = True
            self.aborted_total += 1
            yield Abort(member.key)

    def _before_online(self) -> list[EngineMember]:
        """In prefill before an online request, where keeping costs more than computing anew."""
        batch = self._batch
        leaving, ahead = [], []
        prefilling = list(batch.prefilling())
        waiting = sum(not member.offline for member in prefilling)
        for member in prefilling:
            if not waiting:
                break
            if not member.offline:
                waiting -= 1
            elif not member.leaving:
                ahead.append((member, waiting))
        for member, behind in ahead:
            lost_s = behind * batch.prefill_s(member.computed_tokens, member.prompt_tokens)
            if lost_s > REDO_SHARE * batch.prefill_s(0.0, member.computed_tokens):
                leaving.append(member)
        return leaving

    def _too_slow(self) -> list[EngineMember]:
        """Newest first, until iterations keep to the budget or keeping the rest is cheaper."""
        batch, budget_s = self._batch, self._profile.latency_budget_s
        load = batch.load()
        if not batch.online_decoding or batch.seconds(load) <= budget_s:
            return []
        decoding = [
            member
            for member in self._at_engine()
            if member.decodes_from is not None and not member.leaving
        ]
        # While prompts are computed, only for as long as that takes.
        lasts = inf
        if batch.seconds(batch.decodes()) <= budget_s:
            left = sum(member.left_tokens for member in batch.prefilling())
            lasts = left / max(1, load.prefill_tokens)
        leaving: list[EngineMember] = []
        for member in reversed(decoding):
            generated = batch.generated_tokens(member)
            context = member.sequence_tokens + round(generated)
            without = load.with_decodes(-member.answers, context)
            price_s = batch.seconds(load) - batch.seconds(without)
            steps = min(lasts, max(1.0, member.answer_tokens_max - generated))
            if batch.online_decoding * price_s * steps <= batch.prefill_s(
                0.0, member.kv_tokens + round(generated)
            ):
                continue
            leaving.append(member)
            load = without
            if batch.seconds(load) <= budget_s:
                break
        return leaving

    def _for_the_queue(self, now: float, full: bool) -> list[EngineMember]:
        """With each scrape the newest ones: as many as wait in the engine, since these have not
        begun, and at least as many as online requests wait there for memory or a place."""
        waits = full and self._online_waiting and not self._scrape_answered
        is_packed = may_be_packed(self._reading, KV_FREE_SHARE)
        if not waits or not (is_packed or self._may_lack_a_place(now)):
            return []
        here = self._at_engine()
        staying = [member for member in here if not member.leaving]
        if not staying:
            return []
        self._scrape_answered = True
        leaving = len(here) - len(staying)  # they may still be among those that wait
        unbegun = max(0, (self._reading.waiting or 0) - self._online_waiting - leaving)
        most = max(self._online_waiting, unbegun) if is_packed else unbegun
        return staying[: -1 - most : -1]

    def _may_lack_a_place(self, now: float) -> bool:
        """Whether online requests have waited for a while, and the batch's size is not known: they
        may wait for prompts before them alone, so no line that has begun leaves for that."""
        return self._reading.batch_max is None and now - self._online_waits_since >= CROWDED_S

    def _at_engine(self) -> list[EngineMember]:
        members = self._batch.members
        return [members[key] for key in self._running if key in members]

    # Admission.

    def _admit(self, now: float) -> Iterable[Decision]:
        at = 0
        while at < min(LOOKAHEAD, len(self._queue)):
            queued = self._queue[at]
            request = queued.request
            if not self._has_place(request):
                return
            if self._in_time(request):
                del self._queue[at]
                self._queued_tokens -= request.tokens
                self._start(request)
                yield Admit(request.key)
            elif self._fits_alone(request):
                return
            else:
                queued.passed_over_at = min(queued.passed_over_at, now)
                at += 1

    def _start(self, request: OfflineRequest) -> None:
        self._running[request.key] = request
        self._running_tokens += request.tokens
        self._running_answers += request.answers
        self.admitted_total += 1
        self._batch.send(
            request.key,
            request.prompt_tokens,
            offline=True,
            kv_tokens=request.kv_tokens,
            answer_tokens_max=request.answer_tokens_max,
            answers=request.answers,
            prompts=request.prompts,
        )

    def _has_place(self, request: OfflineRequest) -> bool:
        """In the batch, among the prompts under computation, and in memory."""
        reading = self._reading
        most = RUNNING_MAX
        if reading.batch_max is not None:
            most = min(most, max(1, int(BATCH_SHARE * reading.batch_max)))
            if len(self._batch.members) >= reading.batch_max:
                return False
        if self._running and self._running_answers + request.answers > most:
            return False
        prefill = self._batch.offline_prefill_tokens
        if prefill and prefill + request.prompt_tokens > self._profile.prefill_tokens_max:
            return False
        capacity = reading.kv_capacity_tokens
        if capacity is None:
            return reading.kv_used_ratio is None or reading.kv_used_ratio < 1.0 - KV_FREE_SHARE
        if self._running_tokens + request.tokens > self._kv_share_tokens:
            return False
        used = capacity * (reading.kv_used_ratio or 0.0)
        online = max(0.0, used - self.offline_kv_tokens()) + sum(self._sent_since.values())
        free = (1.0 - KV_FREE_SHARE) * capacity - online - self._running_tokens
        return request.tokens <= free

    def _in_time(self, request: OfflineRequest) -> bool:
        """Whether the iterations that it will be part of keep to the budget."""
        batch, budget_s = self._batch, self._profile.latency_budget_s
        if not batch.online and not self._running:
            return True
        later = request.decoding(batch.settled())
        if batch.seconds(later) > budget_s:
            return False
        if not batch.online:
            return True
        longest_s = batch.seconds(self._with_prefill(request, batch.load(), batch.decodes()))
        return longest_s <= budget_s or self._is_saved(request, longest_s - budget_s)

    def _is_saved(self, request: OfflineRequest, excess_s: float) -> bool:
        chunks = -(-request.prompt_tokens // self._profile.chunk_tokens)
        burst_s = self._profile.burst_s
        return burst_s > 0.0 and self._saved_s >= min(chunks * excess_s, burst_s)

    def _fits_alone(self, request: OfflineRequest) -> bool:
        """Whether it would keep to the budget if no other offline request were there."""
        batch, budget_s = self._batch, self._profile.latency_budget_s
        later = request.decoding(batch.settled(offline=False))
        if batch.seconds(later) > budget_s:
            return False
        if not batch.online or self._profile.burst_s:
            return True
        decodes = batch.decodes(offline=False)
        return batch.seconds(self._with_prefill(request, decodes, decodes)) <= budget_s

    def _with_prefill(
        self, request: OfflineRequest, load: BatchLoad, decodes: BatchLoad
    ) -> BatchLoad:
        """The longest iteration with a chunk of it: at its end, where it attends to most.

        Behind prompts that fill the iteration it comes after them.
        """
        tokens = min(
            request.prompt_tokens,
            self._profile.chunk_tokens - load.prefill_tokens - load.decodes,
        )
        if tokens < 1:
            load = decodes
            tokens = min(request.prompt_tokens, max(1, self._profile.chunk_tokens - load.decodes))
        context = max(request.kv_tokens, request.prompt_tokens)
        return load.with_prefill(tokens, context - tokens)

    # Giving back.

    def _give_back(self, now: float, full: bool) -> list[Decision]:
        if not self._queue:
            return []
        if full or now - self._crowded_since >= CROWDED_S:
            return self.give_back_all()
        if not self._batch.online:
            for queued in self._queue:
                queued.passed_over_at = inf
            return []
        late = [queued for queued in self._queue if now - queued.passed_over_at >= PASSED_OVER_S]
        for queued in late:
            self._queue.remove(queued)
            self._queued_tokens -= queued.request.tokens
        self.given_back_total += len(late)
        return [GiveBack(queued.request.key) for queued in late]
