"""Which line goes to which replica: room, deadlines, fairness, prefixes together."""

from collections import Counter
from random import Random

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.offline import events as oev
from mesh.core.offline.offline_queue import OfflineQueue
from mesh.core.offline.prefixes import LOOKED_PAST, PrefixRanges
from schemas.ids import ReplicaId
from schemas.state import EngineResults, Lease, ReplicaState
from tests.mesh.core.build import EU, ROUTER, US
from tests.mesh.core.offline.world import World

US_0, US_1 = ReplicaId("us-0"), ReplicaId("us-1")
FAILS = EngineResults(failed=5, of=5, in_a_row=5, what="HTTP 500")


def test_a_replica_at_rest_gets_lines_before_its_next_heartbeat():
    world = World()
    world.replica("us-0", room_max=250, fields={"next_within_s": 1.0})
    world.tick()
    world.beats()
    world.submit(lines=10)
    for _ in range(8):
        world.tick()
        world.answer_fetches()
    assert len(world.keys_at(US_0)) == 2, "as many as fit into the room that it named"


def family(number: int, size: int) -> tuple[int, ...]:
    """Lines of one family share two blocks, and families nothing; each line has one of its own."""
    head = number // size + 1
    return (head * 1000, head * 1000 + 1, 10**6 + number)


def placed(world: World, seconds: float) -> dict[tuple[str, int], str]:
    """Which replica answered which line."""
    places: dict[tuple[str, int], str] = {}
    until = world.now + seconds
    while world.now < until:
        world.tick(0.1)
        world.answer_fetches()
        for one in world.replicas.values():
            world.feed(ev.HeartbeatSeen(one.beat()))
            for key in world.keys_at(one.name):
                line = world.out[key]
                places[line.job, line.number] = one.name
                world.end(key)
        world.stored()
        if not world.out and world.now > 2:
            break
    return places


@pytest.mark.parametrize(("families", "size", "replicas"), [(40, 10, 4), (12, 30, 3), (3, 100, 8)])
def test_a_family_of_prompts_goes_to_one_replica(families: int, size: int, replicas: int):
    """Each replica cuts a family at most about twice: where its range begins and ends."""
    world = World(utility_ratio=1.0)
    for number in range(replicas):
        world.replica(f"us-{number}", room_max=300)
    world.submit(lines=families * size, shape=lambda number: family(number - 1, size))
    places = placed(world, 300.0)
    assert len(places) == families * size
    holders: dict[int, set[str]] = {}
    for (_, number), place in places.items():
        holders.setdefault((number - 1) // size, set()).add(place)
    computed_twice = sum(len(one) - 1 for one in holders.values())
    at_random = families * (replicas - 1)
    assert computed_twice <= 3 * replicas, (computed_twice, at_random)
    shares = Counter(places.values())
    assert max(shares.values()) <= 1.5 * min(shares.values()), "and all of them work"


def test_one_family_alone_goes_to_all_replicas_with_room():
    world = World()
    for number in range(5):
        world.replica(f"us-{number}", room_max=300)
    world.submit(lines=100, shape=lambda number: (1, 2, number + 10))
    world.run(1.0)
    assert all(world.attempted(f"us-{number}") for number in range(5))


def test_a_line_that_comes_back_goes_to_its_replica_again():
    world = World(utility_ratio=1.0)
    world.replica("us-0", room_max=300)
    world.replica("us-1", room_max=300)
    world.submit(lines=40, shape=lambda number: family(number - 1, 20))
    world.run(1.0)
    given = world.attempted("us-0")
    for key in world.keys_at("us-0"):
        world.fail(key, preempted=True)
    world.run(0.3)
    assert set(world.attempted("us-0")) == set(given)


@pytest.mark.parametrize("room", [0, 99, 100, 250, 1000, 10_000])
def test_no_more_is_handed_out_than_the_heartbeat_has_room_for(room: int):
    """The world checks each hand-out; here that room is used as well."""
    world = World()
    one = world.replica("us-0", room_max=room)
    world.submit(lines=50, tokens=100)
    world.run(0.2)
    world.beats()
    assert sum(one.inside.values()) == min(room, 5000) // 100 * 100


def test_what_was_handed_out_takes_room_until_a_heartbeat_counts_it():
    world = World()
    one = world.replica("us-0", room_max=500)
    world.submit(lines=50, tokens=100)
    world.tick()
    world.answer_fetches()
    first = one.beat()
    world.feed(ev.HeartbeatSeen(first))
    assert len(world.open) == 5
    one.given_since, one.seq = 500, one.seq + 1  # a heartbeat that left before the work arrived
    late = dict.fromkeys(first.__dataclass_fields__)
    stale = type(first)(
        **{name: getattr(first, name) for name in late} | {"seq": one.seq, "taken": {}}
    )
    world.feed(ev.HeartbeatSeen(stale))
    assert len(world.open) == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"offline_room_tokens": None},
        {"state": ReplicaState.DRAINING},
        {"state": ReplicaState.DOWN},
        {"state": ReplicaState.STARTING},
    ],
)
def test_a_replica_that_takes_no_offline_work_gets_none(fields: dict[str, object]):
    world = World()
    world.replica("us-0", fields=fields)
    world.submit(lines=5)
    world.run(2.0)
    assert not world.open


def test_replicas_that_a_peer_has_adopted_get_nothing_and_the_term_of_our_lease_goes_along():
    world = World()
    world.replica("us-0", room_max=300)
    world.submit(lines=20)

    def lease(owner: str, term: int) -> None:
        written = Lease(region=US, owner=owner, router=ROUTER, term=term, lease_s=1.0)
        world.feed(ev.LeaseHeard(written, term))

    lease(EU, 4)
    world.run(1.0)
    assert not world.open
    lease(US, 5)
    lease(EU, 3)  # an old one
    world.tick()
    one = world.replicas[ReplicaId("us-0")]
    effects = world.feed(ev.HeartbeatSeen(one.beat()))
    terms = [effect.term for effect in effects if isinstance(effect, fx.Dispatch)]
    assert terms == [5, 5, 5]


def test_labels_of_a_replica_count():
    world = World()
    world.replica("us-0")
    world.submit(lines=3, residency=("eu",))
    world.run(1.0)
    assert not world.open


def test_small_lines_go_past_one_that_does_not_fit_but_not_past_many():
    world = World(utility_ratio=1.0)
    world.replica("us-0", room_max=300)
    sizes = [1000] * LOOKED_PAST + [100] * 5
    made = world.submit(lines=len(sizes))
    for number, tokens in enumerate(sizes, 1):
        world.store["j"][number] = world.line("j", number, tokens, (number,))
    world.run(1.0)
    assert not world.open, "the first ones wait for room"
    world.feed(oev.JobEnded("j"))
    del world.jobs["j"]
    world.submit("k", lines=made.total)
    for number, tokens in enumerate(sizes[1:], 1):
        world.store["k"][number] = world.line("k", number, tokens, (number,))
    world.run(1.0)
    assert world.attempted("us-0")[0] == LOOKED_PAST


def test_the_earliest_deadline_goes_first():
    world = World(fair_share=0.0)
    world.submit("late", lines=50, window_s=7200.0)
    world.submit("soon", lines=50, window_s=3600.0)
    world.run(1.0)
    world.replica("us-0", room_max=1000)
    world.beats()
    assert {world.out[key].job for key in world.open} == {"soon"}
    assert len(world.open) == 10


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_share_of_the_work_goes_to_each_job_in_turn(seed: int):
    world = World(seed, fair_share=0.25)
    for number in range(5):
        world.submit(f"j{number}", lines=400, window_s=3600.0 + number)
    world.replica("us-0", room_max=1000)
    jobs: Counter[str] = Counter()
    for _ in range(40):
        world.run(0.2)
        for key in list(world.open):
            jobs[world.out[key].job] += 1
            world.end(key)
        world.stored()
    total = sum(jobs.values())
    assert total > 300
    assert jobs["j0"] > 0.7 * total, "most by deadline"
    assert all(jobs[f"j{number}"] >= 0.03 * total for number in range(1, 5)), jobs


def test_a_place_gets_the_oldest_line_now_and_then():
    def first_of(utility_ratio: float) -> int:
        queue = OfflineQueue(Random(3), utility_ratio=utility_ratio)
        for key, prompt in enumerate([(9,), (5, 1), (5, 2), (9, 3)]):
            queue.add(key, prompt)
        queue.take(0)
        return PrefixRanges(queue).next_for("a", lambda key: True) or 0

    assert first_of(1.0) == 3, "beside the first one"
    assert first_of(0.0) == 1


def test_ranges_are_cut_where_few_blocks_are_shared():
    queue = OfflineQueue(Random(3), utility_ratio=1.0)
    prompts = [(1, 2, 3), (1, 2, 4), (1, 2, 5), (1, 2, 6), (7, 1), (7, 2), (7, 3), (7, 4)]
    for key, prompt in enumerate(prompts):
        chained = [hash(prompt[: end + 1]) for end in range(len(prompt))]
        queue.add(key, chained)
    ranges = PrefixRanges(queue)

    def takes(owner: str) -> int | None:
        key = ranges.next_for(owner, lambda key: True)
        if key is not None:
            queue.take(key)
        return key

    assert [takes("a"), takes("b"), takes("a"), takes("b"), takes("b")] == [0, 4, 1, 5, 6]
    assert takes("c") == 3, "the second half of what a has left"
    queue.put_back(1)
    queue.put_back(0)
    ranges.came_back("a", 1)
    ranges.came_back("a", 0)
    assert [takes("a"), takes("a"), takes("a")] == [0, 1, 2]
    ranges.leave("b")
    assert [takes("c"), takes("a")] == [7, None]


def test_a_replica_whose_engine_fails_gets_no_lines_while_another_serves():
    world = World()
    world.replica(US_0, fields={"results": FAILS})
    world.replica(US_1)
    world.submit(lines=20)
    world.run(1.0)
    assert {one.replica for one in world.open.values()} == {US_1}


def test_a_failing_replica_that_is_alone_gets_lines():
    world = World()
    world.replica(US_0, fields={"results": FAILS})
    world.submit(lines=20)
    world.run(1.0)
    assert {one.replica for one in world.open.values()} == {US_0}


def test_one_that_brings_no_answers_is_left_out_then_tried_with_one_line():
    world = World(failures_max=1000)
    world.replica(US_0)
    world.replica(US_1, room_max=100)
    world.submit(lines=200)
    most = 0
    for _ in range(180):
        world.run(0.1)
        here = [key for key, one in world.open.items() if one.replica == US_0]
        most = max(most, len(here) if world.now > 3.0 else 0)
        for key, one in list(world.open.items()):
            if one.replica == US_0:
                world.fail(key)
            else:
                world.end(key)
        world.stored()
    assert most == 1, "it is tried again"
    assert world.core.counts.answered > 50


def test_failures_that_tell_nothing_of_a_replica_leave_it_in():
    world = World(failures_max=1000)
    world.replica(US_0)
    world.replica(US_1)
    world.submit(lines=20)
    world.run(1.0)
    for key, one in list(world.open.items()):
        if one.replica == US_0:
            world.fail(key, blameless=True)
    assert not world.core.state.replicas.failing.places
