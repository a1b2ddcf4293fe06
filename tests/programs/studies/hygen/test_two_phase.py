"""The two-phase engine: online requests as without it, offline ones within three budgets."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.core.latency_predictor import BatchLoad, LatencyPredictor
from agents.sim.engine import EngineSim
from agents.sim.events import (
    Decoded,
    DuplicateId,
    Finished,
    NeverFits,
    Preempted,
    PrefillFinished,
    SimEvent,
    SimRequest,
)
from agents.sim.profiles import Profile
from agents.sim.profiling_run import Composition, compositions, profiling_run
from mesh.core.offline.offline_queue import OfflineQueue, OfflineQueueFull, UnknownOffline
from tests.agents.sim.test_engine import ROUGH
from tests.agents.sim.test_engine import request as plain_request
from tests.programs.studies.hygen.two_phase import TwoPhaseEngine

# An iteration takes 10 ms, a token 1 ms, a decoding sequence nothing more: exactly predictable.
EVEN = Profile(
    name="even",
    knots=((0, 0.010),),
    token_s=0.001,
    sequence_s=0.0,
    context_s=0.0,
    arrival_s=0.0,
    batch_tokens=64,
    kv_tokens=1024,
    max_seqs=8,
)


PREDICTOR = LatencyPredictor(profiling_run(EVEN))


def queue(utility_ratio: float = 1.0, **limits: int) -> OfflineQueue:
    return OfflineQueue(random.Random(1), utility_ratio=utility_ratio, **limits)


def hygen(budget_s: float, profile: Profile = EVEN, **options) -> TwoPhaseEngine:
    return TwoPhaseEngine(profile, queue(), predictor=PREDICTOR, budget_s=budget_s, **options)


def request(number: int, prompt: int, output: int, *, offline: bool, family: int | None = None):
    return replace(plain_request(number, prompt, output, family), offline=offline)


def online(number: int, prompt: int, output: int) -> SimRequest:
    return request(number, prompt, output, offline=False)


def offline(number: int, prompt: int, output: int, family: int | None = None) -> SimRequest:
    return request(number, prompt, output, offline=True, family=family)


def drain(engine: EngineSim, until: float = 1e9) -> list[SimEvent]:
    events: list[SimEvent] = []
    while engine.wake_at is not None and engine.wake_at <= until:
        events += engine.step(engine.wake_at).events
    return events


def tokens_of(events: list[SimEvent]) -> Counter[int]:
    tokens: Counter[int] = Counter()
    for event in events:
        if isinstance(event, PrefillFinished):
            tokens[event.request_id] += 1
        elif isinstance(event, Decoded):
            tokens.update(dict.fromkeys(event.request_ids, event.tokens))
    return tokens


def finished(events: list[SimEvent]) -> list[int]:
    return [event.request_id for event in events if isinstance(event, Finished)]


sizes = st.tuples(st.integers(1, 200), st.integers(1, 60))
arrivals = st.lists(st.tuples(st.floats(0, 0.5), sizes, st.booleans()), min_size=1, max_size=12)


@given(arrivals=arrivals, look_s=st.floats(0.001, 0.3))
def test_without_offline_requests_it_is_the_engine_to_the_last_bit(arrivals, look_s):
    def played(engine: EngineSim) -> list[object]:
        seen: list[object] = []
        now = 0.0
        for number, (gap_s, (prompt, output), aborted) in enumerate(arrivals):
            now += gap_s
            while engine.wake_at is not None and engine.wake_at <= now:
                seen += engine.step(engine.wake_at).events
            engine.submit(online(number, prompt, output), now)
            if aborted:
                seen += [engine.abort(number - 1, now), engine.stats(now + look_s)]
                now += look_s
        return [*seen, *drain(engine), engine.stats(1e6)]

    assert played(hygen(0.02, ROUGH)) == played(EngineSim(ROUGH))


@settings(max_examples=60, deadline=None)
@given(arrivals=arrivals, budget_s=st.sampled_from((0.02, 0.04, 0.09)), dense=st.booleans())
def test_everyone_ends_and_memory_is_whole(arrivals, budget_s, dense):
    profile = ROUGH if dense else EVEN
    offline_queue = queue(0.5)
    engine = TwoPhaseEngine(
        profile,
        offline_queue,
        predictor=LatencyPredictor(profiling_run(profile)),
        budget_s=budget_s,
    )
    events: list[SimEvent] = []
    now = 0.0
    for number, (gap_s, (prompt, output), is_offline) in enumerate(arrivals):
        now += gap_s
        events += drain(engine, now)
        engine.submit(request(number, prompt, output, offline=is_offline), now)
    events += drain(engine)
    assert sorted(finished(events)) == list(range(len(arrivals)))
    asked = {number: output for number, (_, (_, output), _) in enumerate(arrivals)}
    assert tokens_of(events) == asked
    assert engine.cache.used == engine.running == engine.offline_held == engine.offline_waiting == 0
    for number in asked:
        with pytest.raises(UnknownOffline):
            offline_queue.forget(number)


@settings(max_examples=40, deadline=None)
@given(arrivals=arrivals, budget_s=st.floats(0.012, 0.09))
def test_offline_work_keeps_every_iteration_to_the_budget(arrivals, budget_s):
    def watch(composition: Composition, seconds: float) -> None:
        chunks, decodes, _ = composition
        batch = engine._batch
        offline_tokens = sum(seq.request.offline for seq in batch.decoding) + sum(
            tokens for seq, tokens in engine._chunks if seq.request.offline
        )
        assert seconds == pytest.approx(EVEN.iteration_s(*composition))
        if offline_tokens:
            assert seconds <= budget_s * 1.0001
        assert decodes + sum(tokens for tokens, _ in chunks) <= EVEN.batch_tokens
        assert decodes + len(chunks) <= EVEN.max_seqs

    engine = hygen(budget_s, watch=watch)
    now = 0.0
    for number, (gap_s, (prompt, output), is_offline) in enumerate(arrivals):
        now += gap_s
        drain(engine, now)
        engine.submit(request(number, prompt, output, offline=is_offline), now)
    drain(engine, now + 60.0)


def test_an_arrival_waits_for_one_iteration_of_the_budget_at_most():
    def first_token_at(budget_s: float) -> float:
        engine = hygen(budget_s)
        for number in range(1, 5):
            engine.submit(offline(number, 200, 50), 0.0)
        drain(engine, 0.100)
        engine.submit(online(9, 20, 1), 0.101)
        event = next(
            event
            for event in drain(engine)
            if isinstance(event, PrefillFinished) and event.request_id == 9
        )
        return event.at - 0.101

    own_s = EVEN.iteration_s(((20, 20),), 0, 0)
    assert own_s <= first_token_at(0.020) <= own_s + 0.020
    assert first_token_at(0.020) < first_token_at(0.070)


def test_an_offline_request_runs_in_no_iteration_before_it_came():
    engine = hygen(0.05)
    engine.submit(offline(1, 20, 100), 0.0)
    engine.submit(offline(2, 20, 5), 0.5)  # nobody has stepped the engine since
    began = [e.at for e in drain(engine) if isinstance(e, PrefillFinished) and e.request_id == 2]
    assert began[0] >= 0.5 + EVEN.iteration_s(((20, 20),), 1, 50)


def test_what_does_not_fit_the_budget_pauses_with_its_memory_oldest_first():
    engine = hygen(0.05)
    for number in range(1, 5):
        engine.submit(offline(number, 31, 40), 0.0)
    drain(engine, 0.3)
    assert engine.offline_held == 4
    engine._budget_s = 0.0125  # room for two decodes
    used = engine.cache.used
    decoded = [event for event in drain(engine, 0.5) if isinstance(event, Decoded)][2:]
    assert decoded and {event.request_ids for event in decoded} == {(1, 2)}
    assert engine.offline_held == 4 and engine.cache.used >= used
    engine._budget_s = 0.05
    assert sorted(finished(drain(engine))) == [1, 2, 3, 4]


def test_paused_sequences_hold_a_quarter_of_the_memory():
    profile = replace(EVEN, token_s=0.0001, sequence_s=0.001)
    predictor = LatencyPredictor(profiling_run(profile))
    budget_s = 0.0127  # two decodes, and five tokens of prefill
    engine = TwoPhaseEngine(profile, queue(), predictor=predictor, budget_s=budget_s)
    for number in range(1, 30):
        engine.submit(offline(number, 28, 500), 0.0)
    held = []
    while engine.wake_at is not None and engine.wake_at < 2.0:
        engine.step(engine.wake_at)
        held.append(engine.offline_held)
    # Of 64 blocks, 16 may be paused, eight sequences. Then another is admitted; and one more
    # in the iteration in which its prefill ends, since it doesn't pause yet.
    assert max(held) == 2 + 8 + 2


def test_a_long_prefill_that_does_not_fit_lets_shorter_ones_go_on():
    profile = replace(EVEN, context_s=0.0001)
    predictor = LatencyPredictor(profiling_run(profile))
    budget_s = 0.030  # 10 ms and 20 ms: of 200 tokens of context, or 18 tokens of a new prompt
    engine = TwoPhaseEngine(profile, queue(), predictor=predictor, budget_s=budget_s)
    engine.submit(offline(1, 240, 2), 0.0)
    for number in (2, 3):
        engine.submit(offline(number, 30, 2), 0.0)
    assert finished(drain(engine)) == [2, 3]
    assert engine.offline_held == 1, "the long one waits for a larger budget"
    engine._budget_s = 1.0
    engine.submit(offline(4, 30, 2), 99.0)
    assert finished(drain(engine)) == [1, 4]


def test_online_requests_take_memory_from_offline_ones_newest_first():
    engine = hygen(1.0)
    for number in range(1, 4):
        engine.submit(offline(number, 300, 30), 0.0)
    before = drain(engine, 1.1)
    assert not [event for event in before if isinstance(event, Preempted)]
    assert engine.offline_held == 3
    engine.submit(online(9, 250, 2), 1.1)
    after = drain(engine)
    assert [event.request_id for event in after if isinstance(event, Preempted)] == [3]
    order = finished(after)
    assert order[0] == 9 and sorted(order) == [1, 2, 3, 9]
    assert tokens_of([*before, *after]) == {1: 30, 2: 30, 3: 30, 9: 2}


def test_online_requests_that_grow_take_memory_from_paused_offline_ones():
    engine = hygen(1.0)
    engine.submit(online(1, 100, 300), 0.0)
    for number in range(2, 5):
        engine.submit(offline(number, 260, 100), 0.0)
    events = drain(engine, 1.2)
    assert engine.offline_held == 3
    engine._budget_s = 0.0105
    events += drain(engine, 3.0)
    preempted = [event.request_id for event in events if isinstance(event, Preempted)]
    assert preempted and set(preempted) <= {2, 3, 4}
    engine._budget_s = 1.0
    assert sorted(finished(events + drain(engine))) == [1, 2, 3, 4]


def test_two_offline_sequences_that_need_the_last_block_share_by_age():
    engine = hygen(9.0, replace(EVEN, batch_tokens=2048), kv_tokens=65 * 16)
    engine.submit(offline(0, 1, 1), 0.0)  # while it runs, the others come
    for number in (1, 2):
        engine.submit(offline(number, 31 * 16, 40), 0.0)
    events = drain(engine)
    assert [event.request_id for event in events if isinstance(event, Preempted)] == [2]
    assert finished(events) == [0, 1, 2]
    assert tokens_of(events) == {0: 1, 1: 40, 2: 40}


def test_no_offline_request_is_admitted_while_an_online_one_waits_for_memory():
    engine = hygen(1.0)
    engine.submit(online(1, 600, 60), 0.0)
    engine.submit(online(2, 600, 1), 0.0)
    engine.submit(offline(3, 16, 1), 0.5)
    assert finished(drain(engine)) == [1, 2, 3], "there was room for the third beside the first"


def test_without_a_budget_offline_work_fills_every_token():
    seen: list[Composition] = []
    engine = TwoPhaseEngine(EVEN, queue(), watch=lambda composition, _: seen.append(composition))
    engine.submit(online(1, 10, 5), 0.0)
    for number in range(2, 6):
        engine.submit(offline(number, 150, 3), 0.0)
    drain(engine)
    assert all(composition.load.prefill_tokens >= 60 for composition in seen[1:8])


def test_requests_that_share_a_prefix_run_together_and_hit_the_cache():
    def hits(utility_ratio: float) -> int:
        engine = TwoPhaseEngine(EVEN, queue(utility_ratio))
        for number in range(40):
            family = number % 10
            shared = [family * 1000 + block for block in range(12)]
            own = [10_000 + number * 10, 10_001 + number * 10]
            engine.submit(SimRequest(number, 14 * 16, 1, [*shared, *own], offline=True), 0.0)
        drain(engine)
        return engine.stats(1e6).hit_tokens

    assert hits(1.0) > 2 * hits(0.0)


def test_a_budget_below_any_decode_leaves_offline_work_waiting_and_online_served():
    engine = hygen(0.009)
    engine.submit(offline(1, 20, 5), 0.0)
    engine.submit(online(2, 20, 5), 0.0)
    assert finished(drain(engine)) == [2]
    assert engine.offline_waiting == 1 and engine.wake_at is None


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.4])
def test_an_offline_request_can_be_aborted_wherever_it_is(after_s):
    engine = hygen(0.05)
    for number in range(1, 5):
        engine.submit(offline(number, 60, 30), 0.0)
    drain(engine, after_s)
    engine._budget_s = 0.0115  # some pause
    drain(engine, after_s + 0.05)
    for number in (4, 1):
        assert engine.abort(number, after_s + 0.05)
        assert not engine.abort(number, after_s + 0.05)
    engine._budget_s = 0.05
    assert sorted(finished(drain(engine))) == [2, 3]
    assert engine.cache.used == 0 and engine.stats(1e6).aborted == 2


def test_what_can_not_be_taken_is_refused_and_not_kept():
    engine = TwoPhaseEngine(EVEN, queue(requests_max=1))
    with pytest.raises(NeverFits, match="1030 tokens"):
        engine.submit(offline(1, 1000, 30), 0.0)
    engine.submit(offline(1, 100, 30), 0.0)
    with pytest.raises(DuplicateId):
        engine.submit(offline(1, 10, 3), 0.0)
    with pytest.raises(OfflineQueueFull):
        engine.submit(offline(2, 10, 3), 0.0)
    assert finished(drain(engine)) == [1]
    engine.submit(offline(2, 10, 3), 9.0)
    assert finished(drain(engine)) == [2]


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("nan")])
def test_a_budget_that_is_none_is_refused(budget_s):
    with pytest.raises(ValueError, match="above 0"):
        hygen(budget_s)
    with pytest.raises(ValueError, match="predictor"):
        TwoPhaseEngine(EVEN, queue(), budget_s=0.1)


def test_the_profiling_run_keeps_to_the_profiles_limits_and_reaches_them():
    grid = list(compositions(ROUGH))
    tokens = [each.decodes + each.load.prefill_tokens for each in grid]
    assert max(tokens) == ROUGH.batch_tokens and min(tokens) == 1
    assert max(each.decodes for each in grid) <= ROUGH.max_seqs
    assert max(each.context_tokens for each in grid) <= ROUGH.kv_tokens
    assert len(set(grid)) > 200
    assert {bool(each.chunks) for each in grid if each.decodes} == {True, False}


def test_a_composition_is_a_batch_load_with_all_its_context():
    composition = Composition(((10, 110), (5, 5)), 3, 700)
    assert composition.load == BatchLoad(15, 815, 2, 3, 10 * 110 + 5 * 5)
