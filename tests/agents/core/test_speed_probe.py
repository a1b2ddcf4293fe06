"""A probe of an idle engine's prefill speed: when it is sent, how large, when it gives way."""

import random
import time

import pytest

from agents.core import effects, events
from agents.core.events import EngineReading, PromptMeasured, TokenUsage
from agents.core.known_speed import of_last_run
from agents.core.prefill_speed import PrefillLine
from agents.core.replica_config import KvPart
from agents.core.speed_probe import (
    AGAIN_S,
    CONTEXT_UNKNOWN,
    LONG_TOKENS,
    QUIET_S,
    SHARE,
    SHORT_TOKENS,
    STOPS_MAX,
    TIMES,
)
from schemas.http import EMBEDDINGS, MESSAGES, RERANK
from schemas.kv_transfer import KvRole, TransferKind
from schemas.state import ModelCard
from tests.agents.core.bench import IDLE, MODEL, Bench

BUSY = EngineReading(waiting=0, running=1)
LINE = PrefillLine(s_per_token=0.0005, base_s=0.03)
SCRAPE_S = 0.1
SENT_S = QUIET_S + 3 * SCRAPE_S  # until the first prompt is at the engine


class ProbedBench(Bench):
    """Its engine answers by LINE, `answer` by `answer`."""

    def __init__(self, **replica) -> None:
        super().__init__(**{"probes_speed": True, **replica})
        self.prompts: list[effects.MeasurePrompt] = []
        self.logs: list[effects.LogSpeedProbe] = []
        self.at_engine = self.stopped = False
        self.models, self.cards, self.paths = (MODEL,), {}, ()

    def feed(self, event) -> list:
        done = super().feed(event)
        for effect in done:
            if isinstance(effect, effects.MeasurePrompt):
                assert not self.at_engine, "one at a time"
                self.at_engine, self.stopped = True, False
                self.prompts.append(effect)
            elif isinstance(effect, effects.StopMeasuring):
                assert self.at_engine and not self.stopped
                self.stopped = True
            elif isinstance(effect, effects.LogSpeedProbe):
                self.logs.append(effect)
        return done

    def scrape(self, reading=IDLE) -> list:
        more = {"cards": self.cards, "paths": self.paths}
        return self.feed(events.EngineScraped(self.now, reading, self.models, **more))

    def idle(self, seconds: float, reading=IDLE) -> None:
        """So long, with scrapes that show that reading."""
        for _ in range(round(seconds / SCRAPE_S)):
            self.tick(SCRAPE_S)
            self.scrape(reading)

    def answer(self, **more) -> None:
        """The engine's, to the prompt that it has; a token is a word, and there are two besides."""
        tokens = 2 + len(self.prompts[-1].prompt.split())
        result = {"seconds": LINE.ttft_s(tokens), "usage": TokenUsage(tokens), **more}
        self.at_engine = False
        self.feed(PromptMeasured(**({} if self.stopped else result)))

    def be_stopped(self, number: int, **headers) -> None:
        """A request stops the next prompt, if there is one."""
        self.idle(2 * AGAIN_S + SENT_S)
        self.work(number, **headers)
        if self.at_engine:
            self.answer()
        self.end(number)

    def play(self, seconds: float = QUIET_S + 2.0) -> None:
        """Idle for so long; each prompt is answered after a scrape."""
        for _ in range(round(seconds / SCRAPE_S)):
            self.idle(SCRAPE_S)
            if self.at_engine:
                self.answer()

    @property
    def words(self) -> list[int]:
        return [len(each.prompt.split()) for each in self.prompts]

    @property
    def prior(self):
        """What heartbeats report from now on."""
        self.beats.clear()
        self.tick(1.5)
        return next((beat.prefill_prior for beat in self.beats if beat.prefill_prior), None)


def test_two_short_prompts_and_two_long_ones_make_the_prior():
    bench, other = ProbedBench(), ProbedBench(epoch=8)
    bench.play()
    other.play()
    assert len({each.prompt for each in bench.prompts + other.prompts}) == 4 * TIMES, "all differ"
    assert {each.model for each in bench.prompts} == {MODEL}
    prior = bench.prior
    assert prior.s_per_token == pytest.approx(LINE.s_per_token, rel=0.01)
    assert prior.base_s == pytest.approx(LINE.base_s, rel=0.01)
    assert [log.known for log in bench.logs] == [True]
    bench.play(60.0)
    assert len(bench.prompts) == 2 * TIMES
    assert bench.core.state.speed.known.prior == prior, "for the next run"


def test_it_waits_for_idleness():
    bench = ProbedBench()
    bench.idle(QUIET_S - 2 * SCRAPE_S)
    assert not bench.prompts
    bench.idle(10.0, BUSY)
    assert not bench.prompts, "the engine works for others"
    bench.idle(QUIET_S - SCRAPE_S)
    assert not bench.prompts
    bench.idle(4 * SCRAPE_S)
    assert len(bench.prompts) == 1
    bench.answer()
    assert len(bench.prompts) == 1, "the engine may still show the one before"
    bench.idle(2 * SCRAPE_S)
    assert len(bench.prompts) == 2


def test_an_engine_without_metrics_is_probed_by_what_the_agent_has():
    bench = ProbedBench(engine="openai", counts_own=True)
    for _ in range(40):
        bench.idle(SCRAPE_S, EngineReading())
        if bench.at_engine:
            bench.answer()
    assert bench.prior is not None


def test_a_request_stops_it_first():
    bench = ProbedBench()
    bench.idle(SENT_S)
    done = bench.work(1)
    assert [type(each) for each in done] == [effects.StopMeasuring, effects.StartRelay]
    bench.answer()
    bench.end(1)
    bench.idle(AGAIN_S - 2 * SCRAPE_S)
    assert len(bench.prompts) == 1
    bench.play(2 * AGAIN_S)
    assert bench.prior is not None


def test_work_of_others_stops_it():
    bench = ProbedBench()
    bench.idle(SENT_S)
    bench.idle(1.0, BUSY)
    assert not bench.stopped, "that is the probe itself"
    bench.idle(SCRAPE_S, EngineReading(waiting=1, running=1))
    assert bench.stopped


@pytest.mark.parametrize("event", [events.DrainRequested(), events.StopRequested()])
def test_an_agent_that_leaves_stops_it(event):
    bench = ProbedBench()
    bench.idle(SENT_S)
    bench.feed(event)
    assert bench.stopped
    bench.answer()
    bench.play(2 * AGAIN_S)
    assert len(bench.prompts) == 1


def test_an_engine_that_is_down_is_not_probed():
    bench = ProbedBench()
    bench.idle(SENT_S)
    bench.fail()
    assert bench.stopped


def test_after_some_stops_there_is_no_other_try():
    bench = ProbedBench()
    for number in range(1, 3 * STOPS_MAX):
        bench.be_stopped(number)
    assert len(bench.prompts) == STOPS_MAX
    assert [log.known for log in bench.logs] == [False]
    assert bench.prior is None


def test_clients_come_first_whatever_happens():
    seed = time.time_ns()
    print("seed", seed)
    dice = random.Random(seed)
    bench, open_now, number = ProbedBench(), [], 0
    readings = [IDLE] * 6 + [BUSY, EngineReading(waiting=2, running=3), EngineReading()]
    stopped_at = -AGAIN_S
    for _ in range(1000):
        before, was_stopped = len(bench.prompts), bench.stopped
        chance = dice.random()
        if chance < 0.02 and len(open_now) < 3:
            number += 1
            if any(isinstance(each, effects.StartRelay) for each in bench.work(number)):
                open_now.append(number)
        elif chance < 0.3 and open_now:
            bench.end(open_now.pop(dice.randrange(len(open_now))))
        elif chance < 0.4 and bench.at_engine:
            bench.answer(seconds=dice.uniform(0.01, 1.0))
        else:
            bench.idle(dice.choice([1, 1, 10]) * SCRAPE_S, dice.choice(readings))
        if open_now:
            assert not bench.at_engine or bench.stopped
        if len(bench.prompts) > before:
            assert bench.now - stopped_at >= AGAIN_S - 1.0, "seen up to a second late"
        if bench.stopped and not was_stopped:
            stopped_at = bench.now
    steps = 5  # in which 2,048 tokens are reached from 64, doubling at least
    assert len(bench.prompts) <= 2 * TIMES + STOPS_MAX + steps


@pytest.mark.parametrize("context", [None, 64 * SHARE, 1000, 8192, 10**6])
@pytest.mark.parametrize("kv", [None, 64 * SHARE, 3000, 10**6])
@pytest.mark.parametrize("tokens_a_word", [1, 4])
def test_no_prompt_takes_more_than_its_share(context, kv, tokens_a_word):
    bench = ProbedBench()
    bench.cards = {MODEL: ModelCard(max_model_len=context)}
    reading = EngineReading(waiting=0, running=0, kv_capacity_tokens=kv)
    for _ in range(60):
        bench.idle(SCRAPE_S, reading)
        if bench.at_engine:
            tokens = tokens_a_word * bench.words[-1]
            bench.answer(usage=TokenUsage(tokens), seconds=1e-5 * tokens)
    most = min([size for size in (context, kv) if size], default=CONTEXT_UNKNOWN) // SHARE
    sizes = [tokens_a_word * words for words in bench.words]
    assert len(sizes) == 2 * TIMES
    assert max(sizes) <= min(most, LONG_TOKENS)
    assert max(sizes) >= 0.9 * min(most, LONG_TOKENS)
    assert max(bench.words[:TIMES]) <= SHORT_TOKENS


@pytest.mark.parametrize("context", [64 * SHARE - 1, 1])
def test_too_small_a_context_is_not_probed(context):
    bench = ProbedBench()
    bench.cards = {MODEL: ModelCard(max_model_len=context)}
    bench.play(20.0)
    assert not bench.prompts


def test_a_slow_engine_gets_a_shorter_long_prompt():
    bench = ProbedBench()
    for _ in range(60):
        bench.idle(SCRAPE_S)
        if bench.at_engine:
            bench.answer(seconds=bench.words[-1] / 50)
    assert bench.words == [32, 32, 4 * 32, 4 * 32]


def test_where_a_base_hides_the_pace_the_long_prompt_is_reached_in_steps():
    bench = ProbedBench()
    bench.cards = {MODEL: ModelCard(max_model_len=100_000)}
    slow = PrefillLine(s_per_token=1e-4, base_s=0.15)
    for _ in range(80):
        bench.idle(SCRAPE_S)
        if bench.at_engine:
            words = bench.words[-1]
            bench.answer(usage=TokenUsage(words), seconds=slow.ttft_s(words))
    assert bench.words[:2] == [32, 32] and bench.words[3:] == [2048, 2048]
    assert 300 < bench.words[2] < 500
    assert bench.prior.s_per_token == pytest.approx(slow.s_per_token, rel=0.01)


def test_an_engine_that_cuts_prompts_short_is_not_sent_ever_longer_ones():
    bench = ProbedBench()
    for _ in range(200):
        bench.idle(SCRAPE_S)
        if bench.at_engine:
            bench.answer(usage=TokenUsage(min(100, bench.words[-1])), seconds=0.1)
    assert len(bench.prompts) <= 3 * TIMES
    assert bench.prior is None and len(bench.logs) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"problem": "HTTP 500"},
        {"usage": TokenUsage()},
        {"usage": TokenUsage(30, cached_tokens=30)},
    ],
)
def test_an_engine_that_gives_no_measure_is_not_probed_again(answer):
    bench = ProbedBench()
    bench.idle(SENT_S)
    bench.answer(**answer)
    bench.play(5 * AGAIN_S)
    assert len(bench.prompts) == 1
    [log] = bench.logs
    assert not log.known and log.text.endswith("from clients' answers alone")
    assert bench.prior is None
    bench.models = ("another",)
    bench.play()
    assert bench.prior is not None and len(bench.prompts) == 1 + 2 * TIMES


@pytest.mark.parametrize("seconds", [0.05, 1e-9, 3000.0])
def test_times_that_no_engine_has_make_no_prior(seconds):
    bench = ProbedBench()
    for _ in range(60):
        bench.idle(SCRAPE_S)
        if bench.at_engine:
            is_long = len(bench.prompts) > TIMES
            bench.answer(seconds=seconds if is_long or seconds < 1.0 else 0.05)
    assert len(bench.prompts) == 2 * TIMES
    assert bench.prior is None and [log.known for log in bench.logs] == [False]


def test_cached_tokens_are_not_counted():
    bench = ProbedBench()
    for _ in range(60):
        bench.idle(SCRAPE_S)
        if bench.at_engine:
            words = bench.words[-1]
            usage = TokenUsage(words + 100, cached_tokens=100)
            bench.answer(usage=usage, seconds=LINE.ttft_s(words))
    assert bench.prior.s_per_token == pytest.approx(LINE.s_per_token, rel=0.01)
    assert bench.prior.short_tokens == SHORT_TOKENS


def test_long_prompts_that_disagree_make_a_larger_error():
    errors = []
    for times in (1.0, 3.0):
        bench = ProbedBench()
        for _ in range(60):
            bench.idle(SCRAPE_S)
            if bench.at_engine:
                slow = times if len(bench.prompts) == 2 * TIMES else 1.0
                bench.answer(seconds=slow * LINE.ttft_s(bench.words[-1]))
        errors.append(bench.prior.error)
    assert errors[0] == 0.3 < errors[1] == pytest.approx(2.0, rel=0.2)


def kv(role: KvRole, kind: TransferKind) -> dict:
    return {"kv": KvPart(kind, role)}


@pytest.mark.parametrize(
    ("replica", "models", "paths", "probed"),
    [
        ({}, (MODEL,), (), True),
        ({"probes_speed": False}, (MODEL,), (), False),
        ({"speeds": (of_last_run("vllm", (MODEL,), LINE),)}, (MODEL,), (), False),
        ({"speeds": (of_last_run("vllm", ("other",), LINE),)}, (MODEL,), (), True),
        ({"speeds": (of_last_run("sglang", (MODEL,), LINE),)}, (MODEL,), (), True),
        ({}, (MODEL,), (EMBEDDINGS,), False),
        ({}, (MODEL,), (RERANK,), False),
        ({}, (MODEL,), (EMBEDDINGS, MESSAGES), True),
        ({}, (MODEL, "another"), (), False),
        (kv(KvRole.PREFILL, TransferKind.NIXL), (MODEL,), (), False),
        (kv(KvRole.DECODE, TransferKind.P2P), (MODEL,), (), False),
        (kv(KvRole.DECODE, TransferKind.NIXL), (MODEL,), (), True),
    ],
)
def test_who_is_probed(replica, models, paths, probed):
    bench = ProbedBench(**replica)
    bench.models, bench.paths = models, paths
    bench.play()
    assert bool(bench.prompts) is probed


def test_other_models_are_probed_from_the_beginning():
    bench = ProbedBench()
    for number in range(1, STOPS_MAX):
        bench.be_stopped(number)
    bench.idle(2 * AGAIN_S + SENT_S)
    assert bench.at_engine and len(bench.prompts) == STOPS_MAX
    bench.models = ("another", "one")
    bench.cards = {name: ModelCard(root="/models/a") for name in bench.models}
    bench.scrape()
    bench.answer(seconds=1e-6)  # of which model, nobody knows
    for number in range(1, STOPS_MAX):
        bench.be_stopped(number, **{"Mesh-Model": "another"})
    bench.play(2 * AGAIN_S + QUIET_S + 2.0)
    assert bench.prior.s_per_token == pytest.approx(LINE.s_per_token, rel=0.01)
    sent, bench.models = len(bench.prompts), ("one", "another")
    bench.play()
    assert bench.prior is not None and len(bench.prompts) == sent, "the same in another order"


def test_one_model_of_several_names_is_probed_without_its_adapters():
    bench = ProbedBench()
    card = ModelCard(root="/models/llama")
    cards = {MODEL: card, "alias": card}
    names = ("sql", MODEL, "alias")
    for _ in range(40):
        bench.tick(SCRAPE_S)
        bench.feed(events.EngineScraped(bench.now, IDLE, names, cards, adapters=frozenset({"sql"})))
        if bench.at_engine:
            bench.answer()
    assert {each.model for each in bench.prompts} == {MODEL}
    assert bench.prior is not None


def test_an_engine_whose_speed_was_learned_is_not_probed():
    bench = ProbedBench()
    for number in range(1, 12):
        bench.scrape()
        bench.work(number)
        bench.now += LINE.ttft_s(100 * number)
        bench.feed(events.RelayBegan(f"_INBOX.us.r1.{number}"))
        bench.end(number, usage=TokenUsage(100 * number, 0, 1), streamed=True)
    assert bench.beat.prefill_s_per_token is not None
    bench.play()
    assert not bench.prompts


@pytest.mark.parametrize(
    "reading", [BUSY, EngineReading(waiting=1, running=0)], ids=["running", "waiting"]
)
def test_its_prompt_is_in_no_count(reading):
    bench = ProbedBench()
    bench.idle(SENT_S)
    before = bench.beat
    bench.idle(1.0, reading)
    assert bench.at_engine and not bench.stopped
    beat = bench.beat
    assert (beat.running, beat.pending, beat.full, beat.outstanding) == (0, 0, False, 0)
    assert beat.served_total == before.served_total == 0
    bench.answer()
    assert bench.core.totals.ended == 0
    bench.scrape(reading)
    assert bench.beat.running == bench.beat.pending == 0, "it began while the prompt was there"
    bench.idle(SCRAPE_S, BUSY)
    assert bench.beat.running == 1, "whatever it shows later is of others"


def test_a_long_silence_of_the_probe_is_no_hang():
    bench = ProbedBench()
    bench.idle(SENT_S)
    bench.idle(25.0, EngineReading(waiting=0, running=1, progress=(5.0,)))
    assert bench.at_engine and bench.beat.down_reason is None


def test_what_is_measured_while_the_process_stood_still_does_not_count():
    bench = ProbedBench()
    bench.idle(SENT_S)
    bench.stand_still(20.0)
    bench.answer(seconds=20.0)
    bench.idle(AGAIN_S - 1.0)
    assert len(bench.prompts) == 1, "as after a stop"
    bench.play(2 * AGAIN_S)
    assert bench.prior.s_per_token == pytest.approx(LINE.s_per_token, rel=0.01)
