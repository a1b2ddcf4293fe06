"""Samples from the times of tokens: each is an iteration that the engine computed, with its time.

The engine is the simulated one in virtual time, with a model of time that is a function of a
sample's own numbers; so each sample can be checked against it.
"""

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.core.iteration_samples import (
    STALLS_MAX,
    Prefill,
    Recording,
    StreamTimes,
    chunk_seen,
    without_stalls,
)
from agents.core.latency_predictor import BatchLoad, LatencyPredictor, Sample, mean_error
from agents.sim.engine import EngineSim
from agents.sim.events import Decoded, PrefillFinished, SimRequest
from agents.sim.profiles import A100_MISTRAL, L4_LLAMA, Profile

CHUNK = 512
PROFILES = (L4_LLAMA, replace(A100_MISTRAL, batch_tokens=CHUNK))


@dataclass(frozen=True)
class Newcomer:
    at_s: float
    prompt_tokens: int
    output_tokens: int = 400


def played(
    profile: Profile,
    newcomers: list[Newcomer],
    jitter_s: float = 0.0,
    seed: int = 0,
    marker_tokens: int = 2000,
):
    """The streams of a run, the marker first; tokens come up to `jitter_s` late."""
    dice = random.Random(seed)
    engine = EngineSim(profile, watch_tokens=True)
    requests = [Newcomer(0.0, 64, marker_tokens), *sorted(newcomers, key=lambda each: each.at_s)]
    tokens: dict[int, list[float]] = {number: [] for number in range(len(requests))}
    ended: dict[int, float] = {}
    due = list(enumerate(requests))
    now = 0.0
    while due or engine.wake_at is not None:
        wakes = engine.wake_at
        if due and (wakes is None or due[0][1].at_s <= wakes):
            number, each = due.pop(0)
            now = each.at_s
            engine.submit(SimRequest(number, each.prompt_tokens, each.output_tokens), now)
            continue
        assert wakes is not None
        now = wakes
        for event in engine.step(now).events:
            if isinstance(event, PrefillFinished):
                tokens[event.request_id].append(event.at)
            elif isinstance(event, Decoded):
                for request in event.request_ids:
                    tokens[request].append(event.at)
        if tokens[0] and len(tokens[0]) >= requests[0].output_tokens - 1:
            break
    for number, each in enumerate(requests):
        if len(tokens[number]) >= each.output_tokens:
            ended[number] = tokens[number][-1]
    return [
        StreamTimes(
            each.at_s,
            each.prompt_tokens,
            tuple(at + jitter_s * dice.random() for at in tokens[number]),
            ended.get(number, now),
        )
        for number, each in enumerate(requests)
    ]


def one_by_one(profile: Profile, sizes: list[int]) -> list[Newcomer]:
    """Each comes when the one before has decoded for a while."""
    found, at_s = [], 1.0
    for size in sizes:
        found.append(Newcomer(at_s, size, 1500))
        at_s += 0.4 + 1.2 * profile.linear_s(size) + 30 * profile.decode_s(1, 4000)
    return found


def true_s(profile: Profile, load: BatchLoad) -> float:
    """These profiles price sums of tokens, sequences and contexts: which is whose is no matter."""
    chunks = ((load.prefill_tokens, 0),) if load.prefills else ()
    return profile.iteration_s(chunks, load.decodes, load.context_tokens)


newcomers = st.lists(
    st.builds(Newcomer, st.floats(0.3, 12.0), st.integers(1, 2500), st.integers(1, 200)),
    max_size=6,
)


@settings(max_examples=60)
@given(profile=st.sampled_from(PROFILES), newcomers=newcomers)
def test_each_sample_is_an_iteration_with_its_time(profile, newcomers):
    for sample in Recording(played(profile, newcomers, marker_tokens=400)).samples(CHUNK):
        assert sample.seconds == pytest.approx(true_s(profile, sample.load), rel=0.01), sample


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("seed", range(3))
def test_newcomers_one_by_one_give_what_predicts_other_iterations(profile, seed):
    dice = random.Random(seed)
    sizes = [dice.choice([40, 150, 300, 450, 900, 1800]) for _ in range(20)]
    arrivals = one_by_one(profile, sizes)
    found = Recording(played(profile, arrivals, jitter_s=0.0005, seed=seed)).samples(CHUNK)
    with_prefill = [sample for sample in found if sample.load.prefills]
    assert len(with_prefill) >= sum(-(-size // CHUNK) for size in sizes) - 4
    assert len(found) - len(with_prefill) >= 100
    assert {sample.load.decodes for sample in found} >= set(range(2, 20))
    predictor = LatencyPredictor(found)
    unseen = [
        BatchLoad(0, context * decodes, 0, decodes, 0).with_prefill(tokens, 0)
        for context in (100, 1000)
        for decodes in (3, 10, 20)
        for tokens in (50, 200, 480)
    ]
    error = mean_error(predictor, [Sample(load, true_s(profile, load)) for load in unseen])
    print(f"{profile.name}, seed {seed}: {len(found)} samples, mean error {error:.2%}")
    assert error < 0.05


@pytest.mark.parametrize("size", [256, 512, 1000, 2048])
@pytest.mark.parametrize("profile", PROFILES)
def test_the_chunk_is_seen(profile, size):
    sizes = [100, 200, 400, 700, 900, 1500, 2100, 2500]
    arrivals = one_by_one(profile, sizes)
    streams = played(replace(profile, batch_tokens=size), arrivals, jitter_s=0.001)
    seen = chunk_seen(list(Recording(streams).prefills()))
    assert seen == size if size & (size - 1) == 0 else abs(seen - size) <= 0.3 * size


def test_where_no_prompt_was_cut_the_longest_is_what_is_known():
    assert chunk_seen([Prefill(100, 1, 1), Prefill(900, 3, 1)]) == 900
    assert chunk_seen([]) == 0


def test_one_stalled_iteration_is_left_out_and_many_are_not():
    usual = [Sample(BatchLoad(0, 100 * n, 0, n, 0), 0.02 + 0.001 * n) for n in range(1, 41)]
    stalled = [sample._replace(seconds=2.0) for sample in usual]
    assert without_stalls([*usual, stalled[20]]) == usual
    many = int(len(usual) * STALLS_MAX * 2)
    assert len(without_stalls([*usual, *stalled[:many]])) == len(usual) + many
    assert without_stalls([]) == []


@pytest.mark.parametrize(
    "streams",
    [
        [],
        [StreamTimes(0.0, 10, ())],
        [StreamTimes(0.0, 10, (1.0,)), StreamTimes(0.5, 10, (1.0, 1.1))],
        [StreamTimes(0.0, 10, (1.0,) * 50)],
    ],
)
def test_too_little_gives_no_sample(streams):
    assert Recording(streams).samples(512) == []
    assert list(Recording(streams).prefills()) == []


def test_tokens_that_come_several_at_once_give_the_mean_of_their_iterations():
    times = tuple(1.0 + 0.08 * (number // 4) for number in range(80))
    found = Recording([StreamTimes(0.0, 10, times)]).samples(512)
    assert found
    assert all(sample.seconds == pytest.approx(0.02) for sample in found)
