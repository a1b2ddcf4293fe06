"""How many requests an engine without a page computes at once, as its streams show."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import pairwise
from random import Random

import pytest

from agents.core import events
from agents.core.effects import StartRelay
from agents.core.engine_results import ANSWERED
from agents.core.engine_width import HAND_OVERS, TRY_S, TRY_S_MAX
from agents.core.events import NOTHING_KNOWN
from schemas.exchange import Outcome
from tests.agents.core.bench import Bench, inbox

USUAL = 8
STREAM, PLAIN = b'{"stream": true}', b"{}"
LATEST = {"Mesh-Deadline-Ms": "86400000"}


class Engine(Bench):
    """An agent in front of an engine: it computes so many prompts and answers as `starts` lets."""

    def __init__(self, places: int, *, one_prompt_at_a_time: bool = False, **replica) -> None:
        values = {"engine": "openai", "counts_own": True, "outstanding_max": USUAL}
        super().__init__(**{**values, "heartbeat_s": 1e6, **replica})
        self.read(NOTHING_KNOWN)
        self.places, self.one_prompt_at_a_time = places, one_prompt_at_a_time
        self.prompt_s, self.answer_s = 0.3, 6.0
        self.number = 0
        self.queue: list[int] = []
        self.inside: set[int] = set()
        self.due: list[tuple[float, int, bool]] = []  # first tokens and ends
        self.prompts_done_at = 0.0
        self.ended: list[int] = []

    def ask(self, body: bytes = STREAM) -> bool:
        """Whether it was taken."""
        self.number += 1
        taken = [one for one in self.work(self.number, body, **LATEST) if type(one) is StartRelay]
        if taken:
            self.queue.append(self.number)
            self.starts()
        return bool(taken)

    def starts(self) -> None:
        while self.queue and len(self.inside) < self.places:
            number = self.queue.pop(0)
            self.inside.add(number)
            at = self.now + self.prompt_s
            if self.one_prompt_at_a_time:
                at = max(self.now, self.prompts_done_at) + self.prompt_s
                self.prompts_done_at = at
            heappush(self.due, (at, number, False))

    def step(self) -> None:
        """The next first token, or the next end."""
        at, number, ends = heappop(self.due)
        self.tick(max(0.0, at - self.now))
        if not ends:
            self.feed(events.RelayBegan(inbox(number)))
            heappush(self.due, (at + self.answer_s, number, True))
            return
        self.end(number, verdict=ANSWERED, streamed=True)
        self.inside.remove(number)
        self.ended.append(number)
        self.starts()

    def run(self, requests: int, sizes: Callable[[], tuple[float, float]], clients: int) -> None:
        """So many clients ask again and again, as far as they are taken."""
        while len(self.ended) < requests:
            self.prompt_s, self.answer_s = sizes()
            while len(self.core.state.requests) < clients and self.ask():
                self.prompt_s, self.answer_s = sizes()
            self.step()

    @property
    def known(self) -> int | None:
        return self.core.state.engine.width.known


def usual(dice: Random) -> Callable[[], tuple[float, float]]:
    return lambda: (dice.uniform(0.1, 0.5), dice.uniform(2.0, 10.0))


@pytest.mark.parametrize("places", [1, 2, 4])
def test_one_that_is_narrow_is_given_what_it_computes(places) -> None:
    engine = Engine(places)
    engine.run(60, usual(Random(1)), clients=USUAL)
    assert engine.known == places
    assert (engine.beat.outstanding_max, engine.beat.batch_max) == (places, places)


def test_one_after_the_other_is_noticed_with_few_requests() -> None:
    engine = Engine(1)
    engine.run(HAND_OVERS + 1, lambda: (0.3, 6.0), clients=USUAL)
    assert engine.known == 1
    while engine.due:
        engine.step()
    assert engine.ask() and not engine.ask()
    assert engine.beat.full


@pytest.mark.parametrize("one_prompt_at_a_time", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_one_that_batches_is_never_narrowed(part, one_prompt_at_a_time) -> None:
    for seed in range(part * 8, part * 8 + 8):
        dice = Random(seed)
        prompt_s = 10.0 ** dice.uniform(-2.0, 1.0)
        answer_s = prompt_s * 10.0 ** dice.choice(
            (dice.uniform(-0.3, 0.3), dice.uniform(-1.5, 1.5))
        )
        spread = dice.choice((0.0, 0.2, 0.5, 1.0))

        def sizes(dice=dice, spread=spread, means=(prompt_s, answer_s)) -> tuple[float, float]:
            first, then = (mean * dice.lognormvariate(0.0, spread) for mean in means)
            return min(first, 1e3), min(then, 1e3)

        engine = Engine(USUAL, one_prompt_at_a_time=one_prompt_at_a_time)
        engine.run(60, sizes, clients=dice.randint(2, USUAL))
        assert engine.known is None, f"seed {seed}"
        assert engine.beat.outstanding_max == USUAL


def test_now_and_then_it_is_given_one_more_and_less_often_each_time() -> None:
    engine, tried = Engine(1), []
    engine.run(HAND_OVERS + 1, lambda: (0.3, 6.0), clients=USUAL)
    before = 1
    while engine.now < 100.0 + 20 * TRY_S_MAX and len(tried) < 8:
        engine.run(len(engine.ended) + 1, lambda: (0.3, 6.0), clients=USUAL)
        most = engine.beat.outstanding_max
        if most > before:
            tried.append(engine.now)
        before = most
        assert engine.known == 1 and most <= 2
    gaps = [later - one for one, later in pairwise(tried)]
    assert gaps[0] >= TRY_S and gaps[-1] >= TRY_S_MAX
    assert all(later > 1.5 * gap for gap, later in pairwise(gaps[:4]))


def test_one_more_that_leaves_before_its_turn_has_waited_too() -> None:
    engine = Engine(1)
    engine.run(HAND_OVERS + 1, lambda: (0.3, 600.0), clients=USUAL)
    while engine.due:
        engine.step()
    assert engine.ask()
    engine.step()
    engine.tick(TRY_S)
    assert engine.beat.outstanding_max == 2 and engine.ask()
    engine.tick(2.0)
    assert engine.beat.full
    engine.feed(events.CancelArrived(inbox(engine.number)))
    engine.end(engine.number, Outcome.CANCELLED)
    assert engine.beat.outstanding_max == 1


def test_one_that_has_become_wider_is_given_all_again() -> None:
    engine = Engine(1)
    engine.run(HAND_OVERS + 1, lambda: (0.3, 6.0), clients=USUAL)
    engine.places = USUAL
    engine.run(40, lambda: (0.3, 6.0), clients=USUAL)
    assert engine.known is None
    assert (engine.beat.outstanding_max, engine.beat.batch_max) == (USUAL, None)


def test_another_engine_in_its_place_is_not_known() -> None:
    engine = Engine(1)
    engine.run(HAND_OVERS + 1, lambda: (0.3, 6.0), clients=USUAL)
    engine.fail()
    assert engine.known is None
    assert engine.beat.outstanding_max == USUAL


def test_what_is_not_streamed_counts_as_taking_a_place() -> None:
    engine = Engine(1)
    for body in (STREAM, PLAIN, PLAIN):
        assert engine.ask(body)
    engine.queue.clear()  # these are never computed
    engine.run(HAND_OVERS + 1, lambda: (0.3, 6.0), clients=USUAL)
    assert engine.known == 3


@pytest.mark.parametrize(
    "replica", [{"batch_max": 4}, {"engine": "vllm", "counts_own": False}], ids=["told", "a page"]
)
def test_nothing_is_learned_where_it_is_known(replica) -> None:
    engine = Engine(1, **replica)
    engine.run(3 * HAND_OVERS, lambda: (0.3, 6.0), clients=4)
    assert engine.core.state.engine.width is None
    assert engine.beat.outstanding_max == USUAL
