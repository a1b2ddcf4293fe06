"""The engine as a whole: batching, caching, queueing, preemption, and times that add up."""

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.sim.engine import EngineSim
from agents.sim.events import (
    Decoded,
    DuplicateId,
    Finished,
    NeverFits,
    Preempted,
    PrefillFinished,
    QueueFull,
    SimEvent,
    SimRequest,
)
from agents.sim.profiles import Profile, Publishing

# Round numbers: an iteration takes 1 s, a prefill token 10 ms more, a decoding sequence 0.
PLAIN = Profile(
    name="plain",
    knots=((64, 1.0),),
    token_s=0.01,
    sequence_s=0.0,
    context_s=0.0,
    arrival_s=0.0,
    batch_tokens=164,
    kv_tokens=1600,
    max_seqs=8,
)
ROUGH = Profile(
    name="rough",
    knots=((4, 0.010), (32, 0.017)),
    token_s=0.0003,
    sequence_s=0.0007,
    context_s=0.000013,
    arrival_s=0.02,
    batch_tokens=48,
    kv_tokens=640,
    max_seqs=6,
)


def keys(family: int, tokens: int) -> list[int]:
    return [family * 10_000 + block for block in range(tokens // 16)]


def request(request_id: int, prompt: int, output: int, family: int | None = None) -> SimRequest:
    family = request_id + 100 if family is None else family
    return SimRequest(request_id, prompt, output, keys(family, prompt + output))


def drain(engine: EngineSim) -> list[SimEvent]:
    events: list[SimEvent] = []
    while engine.wake_at is not None:
        events += engine.step(engine.wake_at).events
    return events


def of(kind: type, events: list[SimEvent]) -> dict[int, SimEvent]:
    return {event.request_id: event for event in events if isinstance(event, kind)}


def tokens_of(events: list[SimEvent]) -> Counter[int]:
    tokens: Counter[int] = Counter()
    for event in events:
        if isinstance(event, PrefillFinished):
            tokens[event.request_id] += 1
        elif isinstance(event, Decoded):
            for request_id in event.request_ids:
                tokens[request_id] += event.tokens
    return tokens


def test_one_request_from_arrival_to_end():
    engine = EngineSim(PLAIN, watch_tokens=True)
    engine.submit(request(1, prompt=64, output=3), now=10.0)
    assert engine.wake_at == 11.0
    assert engine.step(10.5).events == []
    assert engine.step(11.0).events == [PrefillFinished(11.0, 1, 0)]
    assert engine.step(12.0).events == [Decoded(12.0, (1,), 1, 1.0)]
    progress = engine.step(13.0)
    assert progress.events == [Decoded(13.0, (1,), 1, 1.0), Finished(13.0, 1)]
    assert progress.wake_at is None


def test_a_late_step_reports_what_happened_when_it_happened():
    engine = EngineSim(PLAIN, watch_tokens=True)
    engine.submit(request(1, prompt=64, output=3), now=0.0)
    assert engine.step(100.0).events == [
        PrefillFinished(1.0, 1, 0),
        Decoded(3.0, (1,), 2, 1.0),
        Finished(3.0, 1),
    ]


def test_prefill_is_chunked_and_decoding_goes_on_beside_it():
    engine = EngineSim(PLAIN, watch_tokens=True)
    engine.submit(request(1, prompt=64, output=10), now=0.0)
    engine.submit(request(2, prompt=400, output=2), now=1.5)
    events = drain(engine)
    # Iterations of 164 tokens, one of them request 1's: 2 s each, from 2 s on; 3 are needed.
    assert [e.at for e in events if isinstance(e, Decoded) and 1 in e.request_ids][:4] == [
        pytest.approx(at) for at in (2.0, 4.0, 6.0, 6.0 + 1.0 + 0.01 * (74 + 1 - 64))
    ]
    assert of(PrefillFinished, events)[2].at == pytest.approx(7.11)


def test_a_repeated_prefix_is_cached_but_never_the_whole_prompt():
    engine = EngineSim(PLAIN)
    engine.submit(request(1, prompt=320, output=1, family=5), now=0.0)
    drain(engine)
    engine.submit(request(2, prompt=320, output=1, family=5), now=50.0)
    first = of(PrefillFinished, drain(engine))[2]
    assert first.cached_tokens == 304, "one block is computed to get the next token"
    assert first.at == pytest.approx(51.0)
    stats = engine.stats(60.0)
    assert (stats.queried_tokens, stats.hit_tokens) == (640, 304)


def test_the_kv_of_an_answer_is_cached_for_the_next_turn():
    engine = EngineSim(PLAIN)
    engine.submit(request(1, prompt=100, output=61, family=5), now=0.0)
    drain(engine)
    engine.submit(request(2, prompt=200, output=1, family=5), now=100.0)
    # 160 of the 161 tokens have KV: the last token's was never computed.
    assert of(PrefillFinished, drain(engine))[2].cached_tokens == 160


def test_first_come_first_served_and_only_so_many_in_the_batch():
    engine = EngineSim(PLAIN, max_seqs=2)
    for request_id in range(5):
        engine.submit(request(request_id, prompt=16, output=4), now=0.0)
    stats = engine.stats(0.0)
    assert (stats.running, stats.waiting) == (1, 4), "the first iteration began with the first"
    assert list(of(Finished, drain(engine))) == [0, 1, 2, 3, 4]


def test_who_comes_during_an_iteration_joins_the_next():
    engine = EngineSim(PLAIN)
    engine.submit(request(1, prompt=64, output=100), now=0.0)
    engine.step(1.0)
    engine.submit(request(2, prompt=16, output=1), now=7.25)
    assert of(PrefillFinished, drain(engine))[2].at == pytest.approx(9.0)


def test_memory_shortage_preempts_the_newest_and_all_still_finish():
    engine = EngineSim(PLAIN, kv_tokens=320)
    for request_id in range(3):
        engine.submit(request(request_id, prompt=80, output=120), now=0.0)
    events = drain(engine)
    preempted = {event.request_id for event in events if isinstance(event, Preempted)}
    assert preempted
    assert 0 not in preempted, "the oldest never gives way"
    assert tokens_of(events) == {0: 120, 1: 120, 2: 120}
    assert engine.stats(1e9).preemptions == sum(isinstance(e, Preempted) for e in events)


def test_who_was_preempted_is_next_in_line():
    engine = EngineSim(PLAIN, kv_tokens=320, max_seqs=2)
    for request_id in range(3):
        engine.submit(request(request_id, prompt=80, output=120), now=0.0)
    events = drain(engine)
    assert next(iter(of(Preempted, events))) == 1
    assert list(of(Finished, events)) == [0, 1, 2]


def test_who_waits_for_memory_gets_in_when_its_prefix_is_published():
    after_the_chunk = dataclasses.replace(PLAIN, publishing=Publishing.COMPUTED)
    engine = EngineSim(after_the_chunk, kv_tokens=320)
    engine.submit(request(0, prompt=16, output=90), now=0.0)
    engine.submit(request(1, prompt=160, output=60, family=5), now=0.0)
    engine.submit(request(2, prompt=160, output=1, family=5), now=0.0)
    assert engine.stats(2.0).waiting == 1, "ten more blocks and some to grow are not there"
    events = drain(engine)
    assert of(PrefillFinished, events)[2].cached_tokens == 144
    assert of(PrefillFinished, events)[2].at < of(Finished, events)[1].at


def test_events_caused_by_reading_stats_come_with_the_next_step():
    engine = EngineSim(PLAIN)
    engine.submit(request(1, prompt=16, output=1), now=0.0)
    assert engine.stats(5.0).finished == 1
    assert engine.wake_at == 1.0, "a step is due, though nothing runs any more"
    assert of(Finished, engine.step(5.0).events).keys() == {1}
    assert engine.wake_at is None


def test_a_request_that_can_never_fit_is_refused():
    engine = EngineSim(PLAIN, kv_tokens=320)
    engine.submit(request(1, prompt=300, output=20), now=0.0)
    with pytest.raises(NeverFits, match="320 tokens"):
        engine.submit(request(2, prompt=300, output=21), now=0.0)
    assert tokens_of(drain(engine)) == {1: 20}


def test_the_queue_is_bounded_and_ids_are_unique():
    engine = EngineSim(PLAIN, max_seqs=1, queue_limit=2)
    engine.submit(request(1, 16, 9), now=0.0)
    with pytest.raises(DuplicateId):
        engine.submit(request(1, 16, 9), now=0.0)
    engine.submit(request(2, 16, 9), now=0.0)
    engine.submit(request(3, 16, 9), now=0.0)
    with pytest.raises(QueueFull, match="2 requests"):
        engine.submit(request(4, 16, 9), now=0.0)
    assert set(of(Finished, drain(engine))) == {1, 2, 3}


def test_abort_frees_the_memory_at_once_and_lets_the_next_in():
    engine = EngineSim(PLAIN, kv_tokens=320)
    engine.submit(request(1, prompt=300, output=20), now=0.0)
    engine.submit(request(2, prompt=300, output=2), now=0.0)
    assert engine.stats(5.0).kv_used_tokens >= 300
    assert engine.stats(5.0).waiting == 1
    assert engine.abort(1, now=5.5)
    assert engine.stats(5.5).kv_used_tokens == 0
    events = drain(engine)
    assert set(of(Finished, events)) == {2}
    assert not engine.abort(1, now=99.0)
    assert not engine.abort(2, now=99.0)


@pytest.mark.parametrize("when", [0.001, 0.03, 0.2])
def test_abort_while_arriving_waiting_or_in_prefill(when):
    engine = EngineSim(ROUGH, max_seqs=1)
    engine.submit(request(1, prompt=600, output=2), now=0.0)
    engine.submit(request(2, prompt=600, output=2), now=0.0)
    assert engine.abort(2, now=when)
    assert engine.abort(1, now=when)
    events = drain(engine)
    assert not of(Finished, events)
    assert engine.stats(10.0).kv_used_tokens == 0


def test_a_request_on_its_way_in_is_not_pending():
    engine = EngineSim(ROUGH)
    engine.submit(request(1, prompt=16, output=2), now=0.0)
    assert engine.stats(0.019).waiting == engine.stats(0.019).running == 0
    assert engine.wake_at == pytest.approx(0.02)
    assert engine.stats(0.021).running == 1


def test_prompts_are_read_one_after_another_before_the_scheduler_sees_them():
    engine = EngineSim(dataclasses.replace(PLAIN, arrival_s=0.5, arrival_token_s=0.125))
    engine.submit(request(1, prompt=16, output=1), now=0.0)
    engine.submit(request(2, prompt=8, output=1), now=1.0)
    assert engine.wake_at == 2.5, "16 tokens, and what each prompt takes"
    assert (engine.stats(2.75).running, engine.stats(2.75).waiting) == (1, 0)
    assert of(PrefillFinished, drain(engine))[2].at == 4.5, "it was read by 3.0"


def test_a_known_arrival_ends_a_stretch_of_decoding():
    engine = EngineSim(dataclasses.replace(PLAIN, arrival_s=2.5))
    engine.submit(request(1, prompt=16, output=100), now=0.0)
    engine.submit(request(2, prompt=16, output=1), now=3.2)
    # Ready at 5.7 s, in the iteration that ends at 6.5 s.
    assert of(PrefillFinished, drain(engine))[2].at == pytest.approx(7.5)


def test_an_abort_lets_the_next_in_with_the_next_iteration():
    engine = EngineSim(PLAIN, kv_tokens=320)
    engine.submit(request(0, prompt=16, output=90), now=0.0)
    engine.submit(request(1, prompt=160, output=60), now=0.0)
    engine.submit(request(2, prompt=160, output=1), now=0.0)
    engine.step(10.0)
    running_until = engine.step(10.0).wake_at
    engine.abort(1, now=10.0)
    assert engine.wake_at < running_until
    assert of(PrefillFinished, drain(engine))[2].at < 14.0


def test_an_idle_engine_needs_no_step():
    engine = EngineSim(PLAIN)
    assert engine.wake_at is None
    assert engine.step(100.0).wake_at is None


class Script:
    """A random but repeatable series of submits, aborts and looks, with what must come of it."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.actions: list[tuple[float, str, object]] = []
        self.requests: dict[int, SimRequest] = {}
        at = 0.0
        for request_id in range(rng.randrange(1, 40)):
            at += rng.choice((0.0, 0.001, 0.05, 0.4)) * rng.random()
            prompt, output = rng.randrange(1, 300), rng.randrange(1, 200)
            made = request(request_id, prompt, output, family=rng.randrange(4))
            self.requests[request_id] = made
            self.actions.append((at, "submit", made))
            if rng.random() < 0.3:
                self.actions.append((at + 3 * rng.random(), "abort", request_id))
            if rng.random() < 0.2:
                self.actions.append((at + rng.random(), "stats", None))
        self.actions.sort(key=lambda action: action[0])

    def play(self, engine: EngineSim) -> tuple[list[SimEvent], set[int]]:
        """Returns the events and who was aborted before its end."""
        events: list[SimEvent] = []
        aborted: set[int] = set()
        for at, action, what in self.actions:
            while engine.wake_at is not None and engine.wake_at <= at:
                events += engine.step(engine.wake_at).events
            if action == "submit":
                engine.submit(what, at)
            elif action == "abort" and engine.abort(what, at):
                aborted.add(what)
            else:
                engine.stats(at)
            self.check(engine, at)
        return events + drain(engine), aborted

    def check(self, engine: EngineSim, at: float) -> None:
        cache, stats = engine.cache, engine.stats(at)
        assert cache.free + cache.used + cache.idle == cache.capacity
        assert min(cache.free, cache.private, cache.idle) >= 0
        assert 0.0 <= stats.kv_utilization <= 1.0
        assert stats.running <= ROUGH.max_seqs


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_every_request_ends_exactly_once_and_gives_everything_back(seed):
    script = Script(seed)
    engine = EngineSim(ROUGH, watch_tokens=True)
    events, aborted = script.play(engine)
    ended = Counter(event.request_id for event in events if isinstance(event, Finished))
    assert set(ended.values()) <= {1}
    assert set(ended) | aborted == set(script.requests)
    assert not set(ended) & aborted
    tokens = tokens_of(events)
    for request_id, made in script.requests.items():
        if request_id in ended:
            assert tokens[request_id] == made.output_tokens
        else:
            assert tokens[request_id] <= made.output_tokens
    times = [event.at for event in events]
    assert times == sorted(times)
    assert engine.cache.used == 0
    stats = engine.stats(1e9)
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.finished + stats.aborted == len(script.requests)
    assert stats.generated_tokens == sum(tokens.values())


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_jumping_from_change_to_change_gives_the_same_events(seed):
    script = Script(seed)
    every_token, _ = script.play(EngineSim(ROUGH, watch_tokens=True))
    changes_only, _ = script.play(EngineSim(ROUGH, watch_tokens=False))
    assert len(changes_only) <= len(every_token)
    for kind in (PrefillFinished, Preempted, Finished):
        assert [e for e in changes_only if isinstance(e, kind)] == [
            e for e in every_token if isinstance(e, kind)
        ]
    assert tokens_of(changes_only) == tokens_of(every_token)
