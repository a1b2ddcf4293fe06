"""Which models an agent may ask for by itself, and what a load takes."""

import random

import pytest

from agents.core import effects, events
from agents.core.engine_health import BLIND_S
from agents.core.loaded_models import LOAD_S_MAX, RECENT_S, LoadedModels, ModelState
from agents.core.speed_probe import QUIET_S
from schemas.exchange import Outcome
from schemas.state import ADAPTERS_MAX, ModelCard
from tests.agents.core.bench import IDLE, Bench, inbox
from tests.agents.core.test_offline_admission import LINEAR

A, B = "org/llama", "b"  # the bench's requests are for A
LOADED, LOADING, UNLOADED = ModelState.LOADED, ModelState.LOADING, ModelState.UNLOADED


def listed(names=(A, B), cards=None, now=0.0, **states) -> LoadedModels:
    loaded = LoadedModels()
    loaded.listed(names, cards or {}, {name: states[name] for name in states}, now)
    return loaded


def test_an_engine_of_one_model_has_it_loaded_unless_it_says_otherwise() -> None:
    assert listed((A,)).may_ask(A, 0.0)
    roots = {A: ModelCard(root="same"), B: ModelCard(root="same")}
    aliases = listed(cards=roots)
    assert aliases.may_ask(A, 0.0) and aliases.may_ask(B, 0.0) and not aliases.on_demand
    for state in (UNLOADED, LOADING, LOADED):
        loaded = LoadedModels()
        loaded.listed((A,), {}, {A: state}, 0.0)
        assert loaded.may_ask(A, 0.0) is (state is LOADED)


def test_an_engine_of_one_model_that_could_not_be_asked_for_its_state_may_have_to_load_it() -> None:
    loaded = LoadedModels()
    loaded.listed((A,), {}, {}, 0.0, unknown=True)
    assert loaded.on_demand and not loaded.may_ask(A, 0.0)
    loaded.listed((A,), {}, {}, 1.0)
    assert not loaded.on_demand and loaded.may_ask(A, 1.0)
    loaded.listed((A,), {}, {}, 2.0, unknown=True)
    assert not loaded.may_ask(A, 2.0), "another process may have its place"


def test_of_several_only_the_one_that_answered_a_client_last_may_be_asked() -> None:
    loaded = listed()
    assert not loaded.may_ask(A, 0.0) and not loaded.may_ask(B, 0.0)
    loaded.sent(A, 1.0)
    assert not loaded.may_ask(A, 1.0)  # it may be loading
    loaded.answered(A, 9.0)
    assert loaded.may_ask(A, 9.0) and not loaded.may_ask(B, 9.0)
    loaded.sent(B, 10.0)  # which may unload A
    assert not loaded.may_ask(A, 10.0) and not loaded.may_ask(B, 10.0)
    loaded.answered(B, 12.0)
    assert not loaded.may_ask(A, 12.0) and loaded.may_ask(B, 12.0)
    assert not loaded.may_ask(B, 12.0 + RECENT_S)  # it may have been unloaded since


def test_what_the_engine_says_counts_but_for_a_client_who_waits_for_another() -> None:
    loaded = LoadedModels()
    loaded.listed((A, B), {}, {A: LOADED, B: UNLOADED}, 0.0)
    assert loaded.may_ask(A, 0.0) and not loaded.may_ask(B, 0.0)
    loaded.sent(B, 1.0)
    assert not loaded.may_ask(A, 1.0), "the engine is about to change"
    loaded.failed(B, 2.0)
    assert loaded.may_ask(A, 2.0)


def test_a_load_is_measured_by_the_client_that_waited_for_it() -> None:
    loaded = LoadedModels()
    loaded.listed((A, B, "c"), {}, {A: UNLOADED, B: UNLOADED, "c": LOADED}, 0.0)
    assert loaded.loadable() == {A: None, B: None} and not loaded.loading
    loaded.sent(A, 10.0)
    assert loaded.loading and loaded.being_loaded(11.0) == {A: None}
    assert loaded.loadable() == {B: None}
    loaded.answered(A, 16.0)
    loaded.listed((A, B, "c"), {}, {A: UNLOADED, B: UNLOADED, "c": LOADED}, 17.0)
    assert loaded.loadable() == {A: 6.0, B: 6.0} and not loaded.loading
    loaded.sent(B, 20.0)
    assert loaded.being_loaded(22.0) == {B: 4.0} and loaded.loadable() == {A: 6.0}
    loaded.failed(B, 23.0)  # nothing is learned, and it is waited for no more
    assert loaded.loadable() == {A: 6.0, B: 6.0}
    loaded.sent(B, 30.0)
    loaded.listed((A, B, "c"), {}, {A: UNLOADED, B: LOADING, "c": LOADED}, 30.0 + LOAD_S_MAX)
    assert loaded.loading and loaded.being_loaded(30.0 + LOAD_S_MAX) == {B: 6.0}


def test_no_more_models_are_told_than_a_heartbeat_holds() -> None:
    names = tuple(f"m{number:03}" for number in range(3 * ADAPTERS_MAX))
    loaded = LoadedModels()
    loaded.listed(names, {}, dict.fromkeys(names, UNLOADED), 0.0)
    assert tuple(loaded.loadable()) == names[:ADAPTERS_MAX]
    for number, name in enumerate(names):
        loaded.sent(name, float(number))
    assert len(loaded.being_loaded(1.0)) == ADAPTERS_MAX


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_asked_that_the_engine_would_have_to_load(seed) -> None:
    """An engine that holds one model and loads at once what a client asks for."""
    dice, now = random.Random(seed), 0.0
    names = (A, B, "c")
    tells = dice.random() < 0.5
    loaded, holds = LoadedModels(), None
    for _ in range(300):
        now += dice.expovariate(1.0)
        states = {name: LOADED if name == holds else UNLOADED for name in names} if tells else {}
        loaded.listed(names, {}, states, now)
        allowed = [name for name in names if loaded.may_ask(name, now)]
        assert set(allowed) <= {holds}, f"seed {seed}"
        if dice.random() < 0.5:
            holds = dice.choice(names)
            loaded.sent(holds, now)
            if dice.random() < 0.8:
                loaded.answered(holds, now)
            assert loaded.to_probe(names) == (holds,)


SOON_S = 0.05  # less than from one heartbeat to the next


class OnDemandBench(Bench):
    """An engine without a page, of two models; `states`: what it says of them."""

    def __init__(self, **replica) -> None:
        super().__init__(**{"engine": "openai", "counts_own": True, "epoch": 1, **replica})
        self.states: dict = {}

    def scrape(self) -> list:
        return self.feed(
            events.EngineScraped(self.now, events.NOTHING_KNOWN, (B, A), states=self.states)
        )


def test_an_engine_that_may_hang_is_probed_with_the_model_that_a_client_waits_for() -> None:
    bench = OnDemandBench(load_s=BLIND_S)
    bench.scrape()
    bench.work(1, **{"Mesh-Deadline-Ms": "600000"})
    probes = []
    for _ in range(int(BLIND_S) + 30):
        bench.feed(events.AliveArrived("us", "r1", 1))
        probes += [one for one in bench.tick(1.0) if isinstance(one, effects.ProbeEngine)]
        bench.scrape()
    assert {probe.model for probe in probes} == {A}, "the first one listed is B"


@pytest.mark.parametrize(
    ("states", "after_s", "is_asked"),
    [
        ({A: UNLOADED, B: UNLOADED}, 600.0, False),
        ({A: UNLOADED, B: LOADED}, 600.0, False),  # A answered last: it would be asked for
        ({A: LOADED, B: UNLOADED}, 600.0, True),
        ({}, 600.0, False),
        ({}, RECENT_S / 2, True),
    ],
)
def test_no_model_is_loaded_for_a_proof_that_the_engine_is_up(states, after_s, is_asked) -> None:
    bench = OnDemandBench()
    bench.scrape()
    bench.work(1)
    bench.feed(events.RelayBegan(inbox(1)))
    bench.end(1)
    bench.now += after_s
    bench.states = states
    bench.scrape()
    failed = events.ScrapeFailed(
        began_at=bench.now,
        last_content_at=float("-inf"),
        timed_out=False,
        detail="HTTP 503",
        wants_proof=True,
    )
    done = [*bench.feed(failed), *bench.tick(1.0)]
    probes = [one for one in done if isinstance(one, effects.ProbeEngine)]
    assert [probe.model for probe in probes] == [A] * is_asked


def test_speed_is_measured_only_when_a_client_has_loaded_the_model() -> None:
    bench = Bench(engine="openai", probes_speed=True, counts_own=True)

    def prompts(state) -> list:
        done = []
        for _ in range(int(QUIET_S * 20)):
            scraped = events.EngineScraped(bench.now, IDLE, (A,), states={A: state})
            done += [*bench.feed(scraped), *bench.tick(0.1)]
        return [one for one in done if isinstance(one, effects.MeasurePrompt)]

    assert prompts(UNLOADED) == []
    assert [one.model for one in prompts(LOADED)] == [A]


def test_routers_learn_at_once_what_is_loaded_and_what_a_load_takes() -> None:
    bench = OnDemandBench()
    bench.states = {A: UNLOADED, B: LOADED}
    bench.scrape()
    assert bench.beats[-1].loadable == {A: None} and bench.beats[-1].models == (B, A)
    bench.work(1)
    bench.tick(SOON_S)
    assert bench.beats[-1].loading == {A: None} and bench.beats[-1].loadable == {}
    bench.now += 6.0 - SOON_S
    bench.feed(events.RelayBegan(inbox(1)))
    bench.end(1)
    bench.scrape()
    bench.tick(SOON_S)
    assert bench.beats[-1].loadable == {A: 6.0}
    bench.states = {A: LOADED, B: UNLOADED}
    bench.scrape()
    bench.tick(SOON_S)
    assert bench.beats[-1].loadable == {B: 6.0}


def test_a_failed_request_teaches_nothing_of_loads() -> None:
    bench = OnDemandBench()
    bench.states = {A: UNLOADED, B: LOADED}
    bench.scrape()
    for number, good in ((1, False), (2, None)):
        bench.work(number)
        bench.now += 6.0
        if good is not None:
            bench.feed(events.RelayBegan(inbox(number), good))
        bench.end(number, Outcome.DONE if good is False else Outcome.ENGINE_LOST)
        bench.scrape()
        assert bench.beat.loadable == {A: None}


def test_the_good_end_of_a_batch_job_s_request_is_no_failed_load() -> None:
    bench = OnDemandBench(offline=LINEAR)
    bench.states = {A: LOADED, B: LOADED}
    bench.scrape()
    assert effects.StartRelay in map(type, bench.offline(1, b'{"max_tokens":5}'))
    bench.feed(events.RelayBegan(inbox(1)))
    bench.states = {A: UNLOADED, B: LOADED}
    bench.scrape()
    bench.work(2)
    assert A in bench.beat.loading
    bench.end(1)
    assert A in bench.beat.loading
