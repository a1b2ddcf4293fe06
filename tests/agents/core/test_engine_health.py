"""Does the engine compute? By signs of work, and by what is usual for it."""

import pytest

from agents.core.engine_health import (
    ANSWERED_MODELS_MAX,
    BLIND_S,
    FIRST_S,
    FLOOR_S,
    HALF_LIFE_S,
    LOAD_S,
    LOADED_S,
    MARGIN,
    PROBE_GAP_S,
    PROMPT_TOKENS_MIN,
    S_PER_TOKEN,
    EngineBacklog,
    HangDetector,
)
from agents.core.prefill_speed import PrefillLine

NOTHING = EngineBacklog(0, 0)
EPSILON = 1e-6
FAST = PrefillLine(s_per_token=1e-7, base_s=0.0)


class Engine:
    """A watch, and scrapes at an engine every 50 ms."""

    def __init__(self, *, blind: bool = False, load_s: float | None = None) -> None:
        self.watch = HangDetector(load_s)
        self.now, self.steps, self.last_content_at = 0.0, 0, float("-inf")
        self.blind = blind
        self.line: PrefillLine | None = None

    def scrape(self, backlog: EngineBacklog) -> bool:
        progress = () if self.blind else (float(self.steps), 7.0)
        return self.watch.scraped(progress, self.last_content_at, backlog, self.line, self.now)

    def run(
        self, seconds: float, backlog: EngineBacklog, *, every_s: float | None = None
    ) -> float | None:
        """Let time pass, with a step each `every_s`; when it counts as hung, if it does."""
        began, stepped = self.now, self.now
        while self.now < began + seconds - EPSILON:
            self.now += 0.05
            if every_s is not None and self.now - stepped >= every_s - EPSILON:
                stepped, self.steps, self.last_content_at = self.now, self.steps + 1, self.now
            if self.scrape(backlog):
                return self.now - began
        return None


def one(tokens: int = 0) -> EngineBacklog:
    return EngineBacklog(1, tokens)


@pytest.fixture
def usual() -> Engine:
    """One that has worked for a while, with a sign every 0.1 s."""
    engine = Engine()
    engine.run(1.0, NOTHING)
    assert engine.run(2.0, one(), every_s=0.1) is None
    return engine


def test_an_idle_engine_never_hangs(usual) -> None:
    assert usual.run(100.0, NOTHING) is None
    assert usual.run(FLOOR_S, one()) is None, "the backlog is new"


def test_one_that_works_never_hangs(usual) -> None:
    assert usual.run(60.0, one(100), every_s=2.0) is None


def test_an_engine_without_progress_hangs_after_little_more_than_the_floor(usual) -> None:
    hung_s = usual.run(60.0, one(5))
    assert hung_s == pytest.approx(FLOOR_S + MARGIN * 0.1, abs=0.11)
    assert usual.watch.hung
    assert usual.watch.silent_s(usual.now) == pytest.approx(hung_s, abs=0.06)


@pytest.mark.parametrize("sign", ["step", "byte"])
def test_any_sign_is_enough(usual, sign) -> None:
    for _ in range(10):
        assert usual.run(FLOOR_S / 2, one()) is None
        if sign == "step":
            usual.steps += 1
        else:
            usual.last_content_at = usual.now


def test_numbers_that_fall_are_no_sign(usual) -> None:
    usual.run(FLOOR_S / 2, one())
    usual.steps -= 1  # a request that is aborted frees memory also where nobody computes
    assert usual.run(FLOOR_S, one()) is not None


def test_before_the_first_sign_it_has_more_time() -> None:
    engine = Engine()
    engine.scrape(NOTHING)
    assert engine.run(60.0, one(100)) == pytest.approx(FIRST_S + 2.0, abs=0.11)
    long = Engine()
    long.scrape(NOTHING)
    tokens = 2000
    assert long.run(60.0, one(tokens)) == pytest.approx(FIRST_S + 40.0, abs=0.11)
    assert tokens * S_PER_TOKEN == 40.0


def test_short_answers_between_two_scrapes_teach_too() -> None:
    engine = Engine()
    engine.scrape(NOTHING)
    engine.watch.begun(20, sent_at=0.01, now=0.03)
    assert engine.run(60.0, one(4)) == pytest.approx(FLOOR_S + MARGIN * 0.03, abs=0.11)


def test_a_slow_engine_has_its_own_usual() -> None:
    engine = Engine()
    engine.scrape(NOTHING)
    assert engine.run(21.0, one(), every_s=3.0) is None
    assert engine.run(60.0, one()) == pytest.approx(FLOOR_S + MARGIN * 3.0, abs=0.2)


def test_a_longer_prompt_than_any_before_has_time_in_proportion(usual) -> None:
    tokens = 100 * PROMPT_TOKENS_MIN
    usual.line = FAST
    assert usual.run(200.0, one(tokens)) == pytest.approx(FLOOR_S + MARGIN * 10.0, abs=4.0)


def test_a_prompt_as_long_as_others_before_has_not(usual) -> None:
    tokens = 100 * PROMPT_TOKENS_MIN
    usual.line = FAST
    usual.watch.begun(tokens, usual.now, usual.now)
    assert usual.run(200.0, one(tokens)) == pytest.approx(FLOOR_S + MARGIN * 0.1, abs=0.11)


def test_patience_uses_the_learned_line_too(usual) -> None:
    usual.line = PrefillLine(s_per_token=0.001, base_s=0.5)
    usual.watch.begun(10_000, usual.now, usual.now)
    assert usual.run(200.0, one(10_000)) == pytest.approx(FLOOR_S + MARGIN * 10.5, abs=0.11)


def test_what_was_usual_is_forgotten() -> None:
    engine = Engine()
    engine.scrape(NOTHING)
    engine.run(10.0, one(), every_s=4.0)
    assert engine.watch.patience_s(True, one(), None, engine.now) > FLOOR_S + MARGIN * 3.9
    later = engine.now + 10 * HALF_LIFE_S
    assert engine.watch.patience_s(True, one(), None, later) < FLOOR_S + 0.1


def test_probes_go_one_at_a_time_until_one_is_answered(usual) -> None:
    watch = usual.watch
    assert not watch.probe((), usual.now)
    usual.run(60.0, one())
    assert watch.probe((), usual.now) and not watch.probe((), usual.now)
    assert not watch.probed(usual.now, answered=False)
    assert not watch.probe((), usual.now + PROBE_GAP_S / 2)
    assert watch.probe((), usual.now + PROBE_GAP_S)
    assert not watch.probed(usual.now + PROBE_GAP_S, answered=True)
    assert not watch.hung and not watch.probe((), usual.now + 100.0)


def test_begun_answers_have_the_same_time_once_more(usual) -> None:
    hung_s = usual.run(60.0, one())
    assert not usual.watch.is_given_up(usual.now + hung_s - 0.2)
    assert usual.watch.is_given_up(usual.now + hung_s)


def test_a_sign_ends_the_alarm_and_a_false_alarm_teaches_patience(usual) -> None:
    hung_s = usual.run(60.0, one())
    usual.run(2.0, NOTHING)
    usual.steps += 1
    usual.run(0.05, NOTHING)
    assert not usual.watch.hung
    again_s = usual.run(60.0, one())
    assert again_s == pytest.approx(FLOOR_S + MARGIN * (hung_s + 2.0), abs=0.3)


def test_a_long_hang_teaches_no_more_than_twice_the_patience(usual) -> None:
    """Nobody can tell it from a computation without signs, which would be alarmed of again."""
    hung_s = usual.run(60.0, one())
    usual.run(60.0, NOTHING)
    usual.watch.probed(usual.now, answered=True)
    assert not usual.watch.hung
    assert usual.run(60.0, one()) == pytest.approx(FLOOR_S + MARGIN * 2 * hung_s, abs=1.0)


@pytest.mark.parametrize("cached", [12, 2000])
def test_a_slow_engine_has_time_for_a_long_prompt_after_a_quick_one(cached) -> None:
    """As measured on llama.cpp at 58 tokens/s, whose numbers rise at the end of a prompt."""
    engine = Engine()
    engine.scrape(NOTHING)
    engine.watch.begun(cached, sent_at=0.0, now=0.3)
    assert engine.run(35.8, one(2000)) is None


def test_a_false_alarm_is_not_repeated_for_ever() -> None:
    """A prompt that takes far longer than its number of tokens lets expect."""
    engine = Engine()
    engine.scrape(NOTHING)
    engine.watch.begun(12, sent_at=0.0, now=0.3)
    alarms = []
    for _ in range(4):
        began = engine.now
        alarms.append(engine.run(60.0, one(12)) is not None)
        engine.run(began + 60.0 - engine.now, NOTHING)
        engine.steps += 1
        engine.run(0.05, NOTHING)
    assert alarms[2:] == [False, False]


def test_a_standstill_of_this_process_is_not_the_engines(usual) -> None:
    usual.run(FLOOR_S / 2, one())
    usual.now += 100.0
    usual.watch.restart_clock(usual.now)
    assert usual.run(FLOOR_S, one()) is None


def test_an_engine_without_metrics_hangs_if_its_probe_fails_too() -> None:
    """It may answer one request after the other, and show nothing of it until the end."""
    engine = Engine(blind=True, load_s=BLIND_S)
    engine.scrape(NOTHING)
    assert engine.run(BLIND_S - 1.0, one()) is None
    assert not engine.watch.probe((), engine.now)
    assert engine.run(2.0, one()) is None
    assert engine.watch.probe((), engine.now)
    assert engine.watch.probed(engine.now, answered=False) and engine.watch.hung


def test_one_without_numbers_that_answers_a_probe_works() -> None:
    engine = Engine(blind=True, load_s=BLIND_S)
    engine.scrape(NOTHING)
    engine.run(BLIND_S + 1.0, one())
    assert engine.watch.probe((), engine.now)
    assert not engine.watch.probed(engine.now, answered=True)
    assert engine.run(BLIND_S, one()) is None


@pytest.mark.parametrize(
    ("blind", "load_s", "is_loading", "patience_s"),
    [
        (True, None, False, LOAD_S),
        (True, 400.0, False, 400.0),
        (True, 30.0, False, 30.0),
        (False, None, False, FIRST_S),
        (False, 90.0, False, 90.0),
        (False, None, True, LOAD_S),
    ],
)
def test_before_the_first_answer_there_is_time_to_load(blind, load_s, is_loading, patience_s):
    engine = Engine(blind=blind, load_s=load_s)
    backlog = EngineBacklog(1, 0, is_loading)
    shown = not blind
    assert engine.watch.patience_s(shown, backlog, None, 0.0) == patience_s


@pytest.mark.parametrize("blind", [True, False])
def test_a_model_that_is_being_loaded_has_time_later_too(blind) -> None:
    engine = Engine(blind=blind)
    engine.scrape(NOTHING)
    assert engine.run(5.0, one(), every_s=0.5) is None
    shown, now = not blind, engine.now
    floor_s = FLOOR_S if shown else BLIND_S
    assert engine.watch.patience_s(shown, one(), FAST, now) < floor_s + 2.0
    loading = EngineBacklog(1, 0, is_loading=True)
    assert engine.watch.patience_s(shown, loading, FAST, now) == LOAD_S


def test_a_model_is_taken_for_loaded_for_a_minute_after_its_last_answer() -> None:
    watch = HangDetector()
    assert watch.may_load("a", 1.0)
    watch.answered("a", 1.0)
    assert not watch.may_load("a", 1.0 + LOADED_S)
    assert watch.may_load("a", 1.1 + LOADED_S)
    assert watch.may_load("b", 1.0)


def test_of_models_that_have_answered_the_last_ones_are_kept() -> None:
    watch = HangDetector()
    for number in range(ANSWERED_MODELS_MAX + 1):
        watch.answered("first", 1.0)
        watch.answered(f"m{number}", 1.0)
    assert not watch.may_load("first", 2.0)
    assert watch.may_load("m0", 2.0)
    assert len(watch._answered_at) == ANSWERED_MODELS_MAX


def test_a_page_that_breaks_or_comes_back_is_no_sign_of_work(usual) -> None:
    assert usual.run(60.0, one()) is not None
    for usual.blind in (True, False):
        usual.run(1.0, one())
        assert usual.watch.hung
    usual.steps += 1
    usual.run(0.1, one())
    assert not usual.watch.hung
