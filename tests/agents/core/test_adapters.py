"""Which LoRA adapters an agent loads for requests, instead of which, and who waits for them."""

import random

import pytest

from agents.core import effects, events
from agents.core.adapters import BACKOFF_S, LEFT_S_MIN, WAITING_MAX
from agents.core.events import AdapterLoadEnded, EngineScraped
from agents.core.known_speed import of_last_run
from agents.core.prefill_speed import PrefillLine
from agents.core.replica_config import AdapterSource
from schemas.exchange import Outcome, Refusal
from schemas.state import CARDS_MAX
from tests.agents.core.bench import IDLE, MODEL, Bench, inbox

KNOWN = {name: AdapterSource(f"/adapters/{name}") for name in ("a", "b", "c")}


def bench(most=2, known=KNOWN, **replica) -> Bench:
    made = Bench(
        adapters=known, adapters_max=most, **{"outstanding_max": 2 * WAITING_MAX, **replica}
    )
    listed(made)
    return made


def listed(bench: Bench, *adapters: str, models=(MODEL,), began_at=None) -> list:
    """A scrape that read the list of models."""
    began_at = bench.now if began_at is None else began_at
    names = (*models, *adapters)
    return bench.feed(EngineScraped(began_at, IDLE, names, adapters=frozenset(adapters)))


def ask(bench: Bench, number: int, adapter: str, **headers) -> list:
    return bench.work(number, **{"Mesh-Model": adapter, **headers})


def ended(bench: Bench, adapter: str, *, good=True, load_s=1.0) -> list:
    bench.now += load_s
    return bench.feed(AdapterLoadEnded(adapter, good, load_s))


def load(bench: Bench, adapter: str, number: int) -> None:
    """Have it loaded, and the request that wanted it answered."""
    ask(bench, number, adapter)
    ended(bench, adapter)
    bench.end(number)
    bench.now += 0.1


def reason(done: list) -> Refusal:
    [refused] = done
    return refused.message.reason


def test_a_request_waits_for_its_adapter_and_is_sent_when_it_is_loaded() -> None:
    one = bench()
    assert one.beat.loadable == {"a": None, "b": None, "c": None}
    assert ask(one, 1, "a") == [
        effects.HoldWork(inbox(1)), effects.LoadAdapter("a", "/adapters/a", None)
    ]  # fmt: skip
    assert one.beat.loading == {"a": None} and "a" not in one.beat.loadable
    assert one.beat.models == (MODEL,) and one.beat.outstanding == 1
    start, scrape = ended(one, "a", load_s=1.5)
    assert (start.inbox, start.work.path) == (inbox(1), "/v1/completions")
    assert scrape == effects.ScrapeNow()
    assert one.beat.models == (MODEL, "a") and one.core.adapter_of(start.work) == "a"
    assert one.beat.loadable == {"b": 1.5, "c": 1.5}, "as long as the one before took"


def test_one_load_of_a_name_serves_all_who_wait_for_it() -> None:
    one = bench()
    first = ask(one, 1, "a")
    assert [type(each) for each in first] == [effects.HoldWork, effects.LoadAdapter]
    assert ask(one, 2, "a") == [effects.HoldWork(inbox(2))]
    started = [each.inbox for each in ended(one, "a")[:-1]]
    assert started == [inbox(1), inbox(2)]


def test_no_more_wait_for_one_adapter_than_its_limit() -> None:
    one = bench()
    for number in range(WAITING_MAX):
        assert ask(one, number, "a")[0] == effects.HoldWork(inbox(number))
    assert reason(ask(one, WAITING_MAX, "a")) is Refusal.FULL


def test_the_least_recently_used_idle_adapter_makes_room() -> None:
    one = bench()
    load(one, "a", 1)
    load(one, "b", 2)
    ask(one, 3, "a")
    one.end(3)
    loads = ask(one, 4, "c")[1]
    assert loads == effects.LoadAdapter("c", "/adapters/c", "b")
    assert one.beat.models == (MODEL, "a"), "no new work for what is being unloaded"


def test_no_adapter_with_requests_is_unloaded() -> None:
    one = bench()
    ask(one, 1, "a")
    ended(one, "a")
    ask(one, 2, "b")  # being loaded: its request waits
    assert one.beat.adapters_busy
    assert reason(ask(one, 3, "c")) is Refusal.FULL
    one.end(1)
    assert not one.beat.adapters_busy
    assert ask(one, 4, "c")[1].instead_of == "a"


def test_what_the_operator_loaded_is_counted_and_never_unloaded() -> None:
    one = bench(most=1)
    listed(one, "theirs")
    assert one.beat.models == (MODEL, "theirs") and one.beat.adapters_busy
    assert reason(ask(one, 1, "a")) is Refusal.FULL


@pytest.mark.parametrize(
    ("adapter", "headers"),
    [
        ("other", {}),
        ("a", {"Mesh-Path": "/v1/embeddings"}),
        ("a", {"Mesh-Offline": "1"}),
        ("/etc/passwd", {}),
    ],
)
def test_nothing_else_is_loaded(adapter, headers) -> None:
    assert reason(ask(bench(), 1, adapter.replace("/", "=2F"), **headers)) is Refusal.WRONG_MODEL


def test_an_agent_without_adapters_loads_none_and_says_nothing_of_them() -> None:
    one = Bench()
    listed(one, "theirs")
    assert one.beat.models == (MODEL, "theirs")
    assert (one.beat.loadable, one.beat.loading, one.beat.adapters_busy) == ({}, {}, False)
    assert reason(ask(one, 1, "a")) is Refusal.WRONG_MODEL


def test_an_adapter_of_a_model_that_the_engine_lacks_is_not_loaded() -> None:
    one = bench(known={"a": AdapterSource("/a", MODEL), "b": AdapterSource("/b", "other")})
    assert list(one.beat.loadable) == ["a"]
    assert reason(ask(one, 1, "b")) is Refusal.WRONG_MODEL


def test_after_a_failed_load_requests_go_elsewhere_until_the_back_off_is_over() -> None:
    one = bench()
    ask(one, 1, "a")
    ask(one, 2, "a")
    first, second, _ = ended(one, "a", good=False)
    assert [each.message.reason for each in (first, second)] == [Refusal.WRONG_MODEL] * 2
    assert one.core.outstanding == 0
    assert "a" not in one.beat.loadable and one.beat.loading == {}
    assert reason(ask(one, 3, "a")) is Refusal.WRONG_MODEL
    one.tick(BACKOFF_S)
    assert "a" in one.beat.loadable and len(ask(one, 4, "a")) == 2


def test_another_engine_process_is_asked_at_once() -> None:
    one = bench()
    ask(one, 1, "a")
    ended(one, "a", good=False)
    one.fail()
    listed(one)
    assert "a" in one.beat.loadable


def test_after_a_restart_of_the_engine_its_list_counts() -> None:
    one = bench()
    load(one, "a", 1)
    assert "a" in one.beat.models
    listed(one)
    assert one.beat.models == (MODEL,) and "a" in one.beat.loadable


def test_a_list_that_was_read_before_a_load_ended_takes_nothing_away() -> None:
    one = bench()
    ask(one, 1, "a")
    before = one.now
    ended(one, "a")
    listed(one, began_at=before)
    assert one.beat.models == (MODEL, "a")
    one.now += 0.1
    listed(one)
    assert one.beat.models == (MODEL,)


def test_what_an_operator_unloads_is_loaded_again_for_the_next_request() -> None:
    one = bench()
    load(one, "a", 1)
    listed(one, "b")
    assert len(ask(one, 2, "a")) == 2


def test_what_was_learned_of_the_model_holds_with_any_adapters_beside_it() -> None:
    speed = of_last_run("vllm", (MODEL,), PrefillLine(1e-4, 0.02))
    one = bench(speeds=(speed,))
    listed(one, "a")
    for _ in range(11):
        one.tick(0.1)
    assert any(beat.prefill_prior == speed.prior for beat in one.beats[-11:])


@pytest.mark.parametrize("how", ["cancel", "deadline", "stop"])
def test_who_waits_may_end_while_the_load_goes_on(how) -> None:
    one = bench()
    ask(one, 1, "a", **{"Mesh-Deadline-Ms": "500"})
    if how == "cancel":
        done = one.feed(events.CancelArrived(inbox(1)))
    elif how == "stop":
        done = one.feed(events.StopRequested())
    else:
        done = one.tick(0.6)
    [end] = [each for each in done if isinstance(each, effects.SendEnd)]
    assert end.inbox == inbox(1)
    assert ended(one, "a") == [effects.ScrapeNow()]
    assert one.core.outstanding == 0


def test_a_body_in_parts_waits_for_the_adapter_when_it_is_whole() -> None:
    one = bench()
    ask(one, 1, "a", **{"Mesh-Body-Bytes": "4"})
    done = one.feed(events.BodyPartArrived(inbox(1), 0, b"{  }"))
    assert [type(each) for each in done] == [effects.HoldWork, effects.LoadAdapter]
    assert ended(one, "a")[0].body == b"{  }"


def test_a_body_that_becomes_whole_when_there_is_no_room_any_more_is_refused() -> None:
    one = bench(most=1)
    ask(one, 1, "a", **{"Mesh-Body-Bytes": "4"})
    ask(one, 2, "b")
    assert reason(one.feed(events.BodyPartArrived(inbox(1), 0, b"{  }"))) is Refusal.FULL
    assert one.core.outstanding == 1


def test_a_load_that_takes_long_is_not_called_over() -> None:
    one = bench()
    load(one, "a", 1)
    listed(one)
    ask(one, 2, "a")
    assert one.beat.loading == {"a": 1.0}
    one.now += 0.25
    assert one.beat.loading == {"a": 0.75}
    one.now += 9.0
    assert one.beat.loading == {"a": LEFT_S_MIN}


def test_changes_are_published_at_once() -> None:
    one = bench()
    seen = len(one.beats)
    one.now += 0.02
    ask(one, 1, "a")
    one.tick(0.02)
    assert len(one.beats) > seen and one.beats[-1].loading == {"a": None}


def test_cards_of_adapters_name_their_model() -> None:
    many = {f"a{number}": AdapterSource("/x") for number in range(2 * CARDS_MAX)}
    one = bench(known=many)
    cards = {}
    for _ in range(11):
        one.tick(0.1)
        cards |= one.beats[-1].cards
    assert len(cards) == CARDS_MAX and {card.parent for card in cards.values()} == {MODEL}


class RandomDay:
    """Requests for adapters, their ends, loads and lists of models, at random; what the engine has
    and does is kept beside the core."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.names = "abcde"
        self.most = self.dice.randint(1, 3)
        self.bench = bench(self.most, {name: AdapterSource(f"/{name}") for name in self.names})
        self.at_engine: set[str] = set()  # adapters
        self.under_way: dict[str, effects.LoadAdapter] = {}
        self.sent: set[str] = set()  # requests at the engine
        self.wanted: dict[str, str] = {}  # adapter of each request that was taken
        self.loads = self.full = 0

    def step(self, number: int) -> None:
        self.bench.now += self.dice.random() * 0.2
        kind = self.dice.random()
        if kind < 0.5:
            self.wanted[inbox(number)] = name = self.dice.choice(self.names)
            done = ask(self.bench, number, name)
        elif kind < 0.75 and self.sent:
            key = self.dice.choice(sorted(self.sent))
            self.sent.discard(key)
            del self.wanted[key]
            done = self.bench.feed(events.RelayEnded(inbox=key, outcome=Outcome.DONE))
        elif self.under_way:
            done = self.load_over(self.under_way.pop(self.dice.choice(sorted(self.under_way))))
        else:
            self.bench.now += 1.0
            done = listed(self.bench, *sorted(self.at_engine))
        for effect in done:
            self.check(effect)

    def load_over(self, change: effects.LoadAdapter) -> list:
        self.at_engine.discard(change.instead_of or "")
        if good := self.dice.random() < 0.8:
            self.at_engine.add(change.adapter)
        return self.bench.feed(AdapterLoadEnded(change.adapter, good, 1.0))

    def check(self, effect) -> None:
        if isinstance(effect, effects.LoadAdapter):
            needed = {self.wanted[key] for key in self.sent} | set(self.under_way)
            assert effect.instead_of not in needed and effect.adapter not in self.under_way
            self.under_way[effect.adapter] = effect
            leaving = {each.instead_of for each in self.under_way.values()}
            assert len(self.at_engine - leaving) + len(self.under_way) <= self.most
            self.loads += 1
        elif isinstance(effect, effects.StartRelay):
            assert self.wanted[effect.inbox] in self.at_engine
            self.sent.add(effect.inbox)
        elif isinstance(effect, effects.Refuse):
            del self.wanted[effect.inbox]
            self.full += effect.message.reason is Refusal.FULL


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_adapter_in_use_is_unloaded_and_the_maximum_holds(seed) -> None:
    day = RandomDay(seed)
    for number in range(400):
        day.step(number)
    assert day.bench.core.outstanding == len(day.wanted) >= len(day.sent)
    assert day.loads > 3 and day.full
