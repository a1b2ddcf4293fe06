"""Limits: what is fetched, what one event costs, how much is kept of others."""

import sys
from collections.abc import Callable

import pytest

from mesh.core.model import events as ev
from mesh.core.offline import events as oev
from mesh.core.offline import jobs, line_regions, prefixes
from mesh.core.offline.backoff import PLACES_MAX, Backoff
from mesh.core.offline.events import ANSWER_TOKENS_DEFAULT, ANSWER_TOKENS_MAX, answer_tokens_max
from mesh.core.offline.jobs import EMPTY_S_MAX, FETCH_LINES_MAX, JOBS_MAX, UnservedModels
from mesh.core.offline.prefixes import PrefixMemory
from mesh.core.offline.settings import OfflineSettings
from schemas.batch import LINE_BYTES_MAX
from schemas.ids import ModelId, ReplicaId, RouterId
from tests.mesh.core.offline.world import World, job, offline_state

CALLS_MAX = 1500  # of functions, for one heartbeat that takes 32 lines or one tick


def calls(work: Callable[[], object]) -> int:
    """How many functions are called, Python's own included."""
    count = 0

    def watch(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def busy_world(lines: int, replicas: int) -> World:
    """So many lines in the window, in families of prompts, and replicas without room."""
    world = World(window_lines=lines)
    for number in range(replicas):
        world.replica(f"us-{number}", room_max=0)
    for number in range(8):
        name = f"j{number}"
        world.submit(
            name, lines // 8, shape=lambda line: (line % 40, 1000 + line % 40, 10**6 + line)
        )
    for _ in range(12):
        world.tick(0.3)
        world.answer_fetches()
    world.beats()
    assert sum(world.core.state.window.waiting_lines.values()) == lines
    return world


def most_calls_of_each_kind(world: World) -> dict[str, int]:
    """While replicas take lines and end them."""
    most: dict[str, int] = {}

    def feed(event: ev.Event) -> None:
        effects: list[object] = []
        needed = calls(lambda: effects.extend(world.core.handle(event, world.now)))
        name = type(event).__name__
        most[name] = max(most.get(name, 0), needed)
        for effect in effects:
            world.performers[type(effect)](effect)

    for one in list(world.replicas.values()):
        one.room_max = 300
    for _ in range(3):
        world.now += 0.1
        for one in world.replicas.values():
            feed(ev.HeartbeatSeen(one.beat()))
        for key in list(world.open)[::2]:
            attempt = world.open[key].attempt
            world.leave_replica(key)
            feed(ev.AnswerEnded(key, attempt))
        for key in list(world.open)[::7]:
            attempt = world.open[key].attempt
            world.leave_replica(key)
            feed(ev.AttemptFailed(key, attempt, "preempted", preempted=True))
        feed(ev.Tick())
    return most


def test_one_event_costs_the_same_whatever_waits():
    few = most_calls_of_each_kind(busy_world(512, 200))
    many = most_calls_of_each_kind(busy_world(4096, 200))
    print(few, many)
    assert many["AnswerEnded"] < 200 and many["AttemptFailed"] < 200
    assert many["HeartbeatSeen"] < CALLS_MAX
    for kind in few:
        assert many[kind] <= 2 * few[kind] + 100, (kind, few, many)
    assert many["Tick"] < 60 * 200, "a few for each replica"


def test_only_what_the_window_takes_is_fetched():
    """The world checks that no fetch goes beyond; here that the window is filled."""
    world = World(window_lines=700)
    world.submit(lines=5000)
    for _ in range(40):
        world.tick(0.3)
        world.answer_fetches()
    assert len(world.core.state.window) == 700
    assert not world.fetches


def test_a_fetch_asks_for_no_more_than_one_message_may_bring():
    world = World()
    world.submit(lines=50_000)
    world.tick()
    (fetch,) = world.fetches
    assert fetch.lines_max == FETCH_LINES_MAX
    assert LINE_BYTES_MAX <= fetch.bytes_max <= 2 * LINE_BYTES_MAX


def test_bytes_bound_the_window_too():
    size = 1_000_000
    world = World(window_bytes=LINE_BYTES_MAX + 10 * size)
    world.submit(lines=100, tokens=size // 4)
    for _ in range(40):
        world.tick(0.3)
        world.answer_fetches()
    assert len(world.core.state.window) == 43
    assert world.core.state.window.body_bytes <= world.settings.window_bytes
    for key in list(world.out)[:9]:
        world.core.state.window.release(world.core.state.window.get(key))
        del world.out[key]
    world.tick(0.3)
    assert not world.fetches, "9 MB are free: a line of any size might not fit"


def test_lines_beyond_what_was_asked_for_are_put_back():
    world = World(window_lines=3)
    world.submit(lines=10)
    world.tick()
    fetch = world.fetches.pop()
    lines = tuple(world.line("j", number, 100, ()) for number in range(1, 6))
    world.out.update({line.key: line for line in lines})
    world.feed(oev.LinesFetched("j", lines, fetch.number))
    assert len(world.out) == len(world.core.state.window) == 3


def test_each_job_has_its_part_of_the_window():
    world = World(window_lines=400, fair_share=0.25)
    world.submit("soon", lines=5000, window_s=600.0)
    for number in range(4):
        world.submit(f"late-{number}", lines=5000, window_s=86_400.0)
    for _ in range(40):
        world.tick(0.3)
        world.answer_fetches()
    held = {name: world.core.state.window.held(name) for name in world.jobs}
    assert sum(held.values()) == 400
    assert min(held.values()) >= 20
    assert held["soon"] >= 290


def test_a_store_that_is_full_stops_the_fetching():
    world = World(window_lines=50)
    world.replica("us-0", room_max=100_000)
    world.submit(lines=500)
    for _ in range(60):
        world.run(0.3, answer=True)
        world.feed(oev.JobSeen(world.jobs["j"]))
    assert len(world.results) == len(world.storing) == 50
    world.stored()
    world.run(2.0, answer=True)
    assert len(world.results) > 50


def test_a_job_without_lines_in_the_store_is_asked_less_and_less():
    world = World()
    world.submit(lines=10)
    world.store["j"].clear()  # another runner has them
    asked = 0
    while world.now < 600:
        world.tick(0.25)
        asked += len(world.fetches)
        world.answer_fetches()
    assert 600 / EMPTY_S_MAX <= asked <= 600 / EMPTY_S_MAX + 8


def test_an_answer_to_a_fetch_that_was_given_up_moves_no_other():
    world = World(window_lines=100)
    world.submit(lines=100)
    world.tick()
    lost = world.fetches.pop()
    while not world.fetches:
        world.tick(0.3)
    assert world.now >= 30
    world.feed(oev.LinesFetched("j", (), lost.number))
    assert world.core.state.window.is_fetching
    world.answer_fetches()
    assert len(world.core.state.window) == 100


def test_jobs_are_bounded():
    world = World()
    for number in range(JOBS_MAX + 1):
        world.feed(oev.JobSeen(job(f"j{number}", 1)))
    assert len(world.core.state.jobs) == JOBS_MAX
    world.feed(oev.JobEnded("j0"))
    world.feed(oev.JobSeen(job("another", 1)))
    assert world.core.state.jobs.get("another") is not None


def test_peers_and_their_runners_are_bounded():
    world = World()
    for number in range(line_regions.REGIONS_MAX + 5):
        world.feed(oev.OfflineStateSeen(offline_state(f"r{number}")))
    assert len(world.core.state.regions.peers) == line_regions.REGIONS_MAX
    for number in range(line_regions.RUNNERS_MAX + 5):
        world.feed(oev.OfflineStateSeen(offline_state("r0", router=RouterId(f"b{number}"))))
    assert len(world.core.state.regions.peers["r0"].states) == line_regions.RUNNERS_MAX  # type: ignore[index]


def test_tables_forget_the_oldest():
    rests = Backoff(1.0, 8.0)
    for number in range(PLACES_MAX + 3):
        rests.penalize(f"p{number}", 0.0)
    assert len(rests) == PLACES_MAX
    memory = PrefixMemory()
    for number in range(200):
        hashes = range(number * 512, (number + 1) * 512)
        memory.given(ReplicaId("us-0"), hashes)
    assert len(memory) == prefixes.BLOCKS_MAX
    models = UnservedModels(1.0)
    for number in range(jobs.UNSERVED_MODELS_MAX + 3):
        models.overdue([ModelId(f"m{number}")], (), 0.0)
    assert len(models) == jobs.UNSERVED_MODELS_MAX


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, ANSWER_TOKENS_DEFAULT),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9, "max_tokens": 7}, 9),
        ({"max_tokens": 7, "n": 3}, 21),
        ({"max_tokens": 7, "best_of": 4, "n": 2}, 28),
        ({"max_tokens": 7, "prompt": ["a", "b"]}, 14),
        ({"max_tokens": 7, "prompt": [1, 2, 3]}, 7),
        ({"max_tokens": 0}, ANSWER_TOKENS_DEFAULT),
        ({"max_tokens": True}, ANSWER_TOKENS_DEFAULT),
        ({"max_tokens": "7"}, ANSWER_TOKENS_DEFAULT),
        ({"max_tokens": 10**15}, ANSWER_TOKENS_MAX),
        ({"max_tokens": 7, "n": 10**9}, 7 * 128),
        ({"max_tokens": 7, "prompt": ["a"] * 1000}, 7000),
    ],
)
def test_the_longest_answer(body: dict[str, object], tokens: int):
    assert answer_tokens_max(body) == tokens


@pytest.mark.parametrize(
    "wrong",
    [{"window_lines": 0}, {"utility_ratio": 1.5}, {"price": -1.0}, {"failures_max": 0}, {"x": 1}],
)
def test_settings_out_of_range_are_errors(wrong: dict[str, object]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OfflineSettings(**wrong)
