"""What an engine is computing, as far as its agent can know: who is in prefill, who decodes, how
many iterations have passed.

An agent sees when a request is sent, when its first byte comes and when it ends. Between these the
latency predictor says how long an iteration of the present batch takes, so the time that has passed
is so many iterations. Each gives a token to every answer, and computes prompts in the order in
which they were sent, a chunk of them. A prompt that should be computed counts as decoding from then
on, whether or not a byte has come: an answer that is no stream sends its first one at its end.

Streamed answers show by their number of tokens how far that is right. Their tokens over the
iterations that were expected move the *pace*, by a little with each answer and within
PACE_MIN to PACE_MAX: an engine that became slower or faster since it was profiled is noticed within
some tens of answers, one odd answer changes nothing much, and no noise can make iterations seem
to take no time.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from agents.core.latency_predictor import BatchLoad, IterationTimes

PACE_MIN, PACE_MAX = 0.5, 2.0
PACE_MEMORY_TOKENS = 4000  # of answers: a few dozen usual ones
PACE_TOKENS_MAX = 400  # that one answer may count for
PACE_TOKENS_MIN = 16  # a shorter answer says little
SHORTEST_S = 1e-4  # of an iteration; a fit may say 0 of those that a profiling run hardly saw
PREFILLS_PER_ITERATION = 16  # more than that few chunks are made of


@dataclass(slots=True, eq=False)
class EngineMember:
    """One request at the engine. Tokens are those of its prompt that are to be computed."""

    key: Hashable
    offline: bool
    prompt_tokens: int
    answer_tokens_max: int
    kv_tokens: int  # that its prompt takes, cached or not
    answers: int = 1  # that it generates at once, each a sequence of the batch; it may be none
    prompts: int = 1  # that it has; `prompt_tokens` and `kv_tokens` are of all together
    computed_tokens: float = 0.0
    decodes_from: float | None = None  # iterations that had passed when it began to decode
    learns_from: float | None = None  # the same, of a first byte, while nothing was unsure since
    leaving: bool = False  # it is being aborted

    @property
    def left_tokens(self) -> float:
        return self.prompt_tokens - self.computed_tokens

    @property
    def sequence_tokens(self) -> int:
        """The context with which one of its answers begins."""
        return self.kv_tokens // self.prompts

    @property
    def shared_tokens(self) -> int:
        """Of its answers' contexts together, what is in memory once."""
        return max(0, self.answers - self.prompts) * self.sequence_tokens


@dataclass(slots=True)
class _Decoding:
    """The decoding answers of one kind. Their context grows by one token an iteration each."""

    count: int = 0
    base_tokens: float = 0.0
    shared_tokens: int = 0  # of prompts, counted for each answer and in memory once

    def join(self, member: EngineMember, steps: float) -> None:
        self.count += member.answers
        self.shared_tokens += member.shared_tokens
        self.base_tokens += member.answers * (member.sequence_tokens - steps)

    def leave(self, member: EngineMember) -> None:
        assert member.decodes_from is not None
        self.count -= member.answers
        self.shared_tokens -= member.shared_tokens
        self.base_tokens -= member.answers * (member.sequence_tokens - member.decodes_from)

    def context_tokens(self, steps: float) -> int:
        return max(0, round(self.base_tokens + self.count * steps)) if self.count else 0


@dataclass(slots=True)
class _Kinds:
    online: _Decoding = field(default_factory=_Decoding)
    offline: _Decoding = field(default_factory=_Decoding)

    def of(self, member: EngineMember) -> _Decoding:
        return self.offline if member.offline else self.online


class EngineBatch:
    """Call `advance` before any question. The caller bounds the number of its members."""

    def __init__(self, times: IterationTimes, chunk_tokens: int, *, refreshes: bool) -> None:
        """`chunk_tokens`: most prompt tokens of one iteration. `refreshes`: learn the pace."""
        self._times = times
        self._chunk_tokens = chunk_tokens
        self._refreshes = refreshes
        self._decoding = _Kinds()
        self._prefilling: dict[Hashable, EngineMember] = {}  # in the order in which they were sent
        self._now = -inf
        self.members: dict[Hashable, EngineMember] = {}
        self.steps = 0.0  # iterations so far
        self.pace = 1.0  # an iteration's seconds over the predicted ones

    @property
    def online(self) -> int:
        """Online requests at the engine."""
        waiting = sum(not member.offline for member in self._prefilling.values())
        return waiting + self._decoding.online.count

    @property
    def online_decoding(self) -> int:
        return self._decoding.online.count

    @property
    def offline_prefill_tokens(self) -> int:
        """Of offline requests' prompts, what is not computed yet."""
        return round(sum(m.left_tokens for m in self._prefilling.values() if m.offline))

    def prefilling(self) -> Iterable[EngineMember]:
        """Those whose prompts are not computed, in the order in which they were sent."""
        return self._prefilling.values()

    def advance(self, now: float) -> None:
        """Count the iterations until `now`."""
        passed_s = now - self._now
        self._now = now
        # A prompt's last chunk makes the iterations after it shorter: one part for each.
        for _ in range(PREFILLS_PER_ITERATION):
            if passed_s <= 0.0 or not self.members:
                return
            load = self.load()
            iteration_s = self.seconds(load)
            steps = passed_s / iteration_s
            front = next(iter(self._prefilling.values()), None)
            if front is not None:
                chunk = min(front.left_tokens, load.prefill_tokens)
                steps = min(steps, front.left_tokens / chunk)
                self._compute(steps * load.prefill_tokens)
            self.steps += steps
            passed_s -= steps * iteration_s
            self._settle()

    def send(
        self,
        key: Hashable,
        prompt_tokens: int,
        *,
        offline: bool = False,
        kv_tokens: int = 0,
        answer_tokens_max: int = 0,
        answers: int = 1,
        prompts: int = 1,
    ) -> None:
        """A request was sent to the engine. `answer_tokens_max`: of one of its answers."""
        kv, own = max(kv_tokens, prompt_tokens), max(1, prompt_tokens)
        member = EngineMember(key, offline, own, answer_tokens_max, kv, answers, prompts)
        self.members[key] = self._prefilling[key] = member

    def begin(self, key: Hashable) -> None:
        """Its first byte came."""
        member = self.members.get(key)
        if member is None:
            return
        if self._prefilling.pop(key, None) is None and member.answers:
            self._decoding.of(member).leave(member)
        self._decode(member)
        member.learns_from = self.steps

    def end(self, key: Hashable, streamed_tokens: int = -1) -> EngineMember | None:
        """It has left the engine; `streamed_tokens`: of a whole streamed answer, else -1."""
        member = self.members.pop(key, None)
        if member is None:
            return None
        if self._prefilling.pop(key, None) is None and member.answers:
            self._decoding.of(member).leave(member)
        if self._refreshes and member.learns_from is not None:
            self._learn(self.steps - member.learns_from, streamed_tokens - 1)
        return member

    def restart_clock(self, now: float) -> None:
        """The agent was stopped until now: nobody knows what the engine did."""
        self._now = now
        for member in self.members.values():
            member.learns_from = None

    def generated_tokens(self, member: EngineMember) -> float:
        """Of its answer, by the iterations that have passed."""
        return 0.0 if member.decodes_from is None else self.steps - member.decodes_from

    def seconds(self, load: BatchLoad) -> float:
        """Seconds of an iteration, at the engine's present pace; never none."""
        return self.pace * max(SHORTEST_S, self._times.predict_s(load))

    def prefill_s(self, from_tokens: float, to_tokens: float) -> float:
        """Seconds to compute that part of a prompt alone."""
        tokens = to_tokens - from_tokens
        if tokens <= 0.0:
            return 0.0
        chunk = min(round(tokens) or 1, self._chunk_tokens)
        context = round((from_tokens + to_tokens) / 2)
        return self.seconds(BatchLoad().with_prefill(chunk, context)) * tokens / chunk

    def queue_s(self) -> float:
        """Seconds until the prompts of online requests here are computed: a new one's wait."""
        waiting = [member for member in self._prefilling.values() if not member.offline]
        if not waiting:
            return 0.0
        left = max(1.0, sum(member.left_tokens for member in waiting))
        decodes = self.decodes()
        chunk = min(round(left) or 1, max(1, self._chunk_tokens - decodes.decodes))
        context = sum(member.kv_tokens for member in waiting) // (2 * len(waiting))
        return self.seconds(decodes.with_prefill(chunk, context)) * left / chunk

    def decodes(self, *, offline: bool = True) -> BatchLoad:
        """An iteration of those that decode."""
        return _decodes(self._decoding, self.steps, offline)

    def load(self, *, offline: bool = True) -> BatchLoad:
        """The next iteration; without `offline`, as if only online requests were there."""
        load = self.decodes(offline=offline)
        left = max(1, self._chunk_tokens - load.decodes)
        for member in _first(self._prefilling.values(), PREFILLS_PER_ITERATION):
            if left < 1:
                break
            if member.offline and not offline:
                continue
            tokens = min(left, max(1, round(member.left_tokens)))
            cached = member.kv_tokens - member.prompt_tokens
            load = load.with_prefill(tokens, max(0, cached + round(member.computed_tokens)))
            left -= tokens
        return load

    def settled(self, *, offline: bool = True) -> BatchLoad:
        """An iteration once every prompt here is computed."""
        load = self.decodes(offline=offline)
        for member in self._prefilling.values():
            if offline or not member.offline:
                load = load.with_decodes(member.answers, member.sequence_tokens)
        return load

    def offline_kv_tokens(self) -> int:
        """What offline requests hold of the memory now."""
        waiting = sum(
            member.computed_tokens + member.kv_tokens - member.prompt_tokens
            for member in self._prefilling.values()
            if member.offline
        )
        decoding = self._decoding.offline
        return round(waiting) + max(0, decoding.context_tokens(self.steps) - decoding.shared_tokens)

    def _compute(self, tokens: float) -> None:
        for member in self._prefilling.values():
            if tokens <= 0.0:
                break
            done = min(tokens, member.left_tokens)
            member.computed_tokens += done
            tokens -= done

    def _settle(self) -> None:
        """Prompts that are computed by now decode."""
        while self._prefilling:
            key, member = next(iter(self._prefilling.items()))
            if member.left_tokens > 0.5:
                return
            del self._prefilling[key]
            self._decode(member)

    def _decode(self, member: EngineMember) -> None:
        if not member.answers:
            return
        member.decodes_from = self.steps
        self._decoding.of(member).join(member, self.steps)

    def _learn(self, expected: float, tokens: int) -> None:
        if tokens < PACE_TOKENS_MIN or expected <= 0.0:
            return
        weight = min(tokens, PACE_TOKENS_MAX) / PACE_MEMORY_TOKENS
        seen = min(max(self.pace * expected / tokens, PACE_MIN), PACE_MAX)
        self.pace += weight * (seen - self.pace)


def _decodes(kinds: _Kinds, steps: float, offline: bool) -> BatchLoad:
    count, context = kinds.online.count, kinds.online.context_tokens(steps)
    if offline:
        count += kinds.offline.count
        context += kinds.offline.context_tokens(steps)
    return BatchLoad(0, context, 0, count, 0)


def _first(members: Iterable[EngineMember], count: int) -> Iterator[EngineMember]:
    for number, member in enumerate(members):
        if number >= count:
            return
        yield member
