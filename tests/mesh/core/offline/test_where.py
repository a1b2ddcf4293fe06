"""Where a job's lines go and when: regions, prices, slack, deadlines; and peers that lie."""

from collections import Counter

import pytest

from mesh.core.model import events as ev
from mesh.core.model.request import Served
from mesh.core.model.served_names import served_name
from mesh.core.offline import events as oev
from mesh.core.offline.forecast import DAY, HOUR_S, ForecastState, ModelHistory
from mesh.core.offline.line_regions import BACKOFF_S_MAX, SILENT_S_MAX, UNDER_WAY_TOKENS
from schemas.exchange import Priority, Refusal
from schemas.http import EMBEDDINGS
from schemas.ids import RegionId, ReplicaId
from schemas.residency import ground
from tests.mesh.core.build import AP, EU, MODEL, US
from tests.mesh.core.offline.world import EUROPE, World, offline_state

UNIX_AT_ZERO = 1_000_000_000.0
BUSY, IDLE = (0,) * 24, (10**6,) * 24  # tokens of slack in each of the next hours


def forecast(world: World, idle: float, tokens_per_s: float = 100.0) -> None:
    """Of home: so many idle replicas in every hour of the last day."""
    hour = int((world.now + UNIX_AT_ZERO) // HOUR_S)
    hours = tuple((hour - back, idle) for back in range(1, DAY + 1))
    state = ForecastState({MODEL: ModelHistory(hours, tokens_per_s)})
    world.feed(oev.ForecastRestored(state))


class Mesh(World):
    """Peers that say the same every second."""

    def __init__(self, seed: int = 1, **settings: object) -> None:
        super().__init__(seed, **settings)
        self.peers: dict[RegionId, dict[str, object]] = {}
        self.seq = 0

    def peer(self, region: RegionId, **fields: object) -> None:
        self.peers[region] = fields
        self.peer_labels[region] = fields.get("residency") or ()  # type: ignore[assignment]

    def say(self) -> None:
        self.seq += 1
        for region, fields in self.peers.items():
            self.feed(oev.OfflineStateSeen(offline_state(region, self.seq, **fields)))

    def second(self) -> None:
        self.say()
        self.run(1.0)

    def where(self) -> Counter[str]:
        return Counter(one.replica or one.peer for one in self.open.values())


@pytest.mark.parametrize(
    ("what", "home_room", "peers", "expected"),
    [
        ("home while it has room", 1000, {EU: {"slack": IDLE}}, {"us-0": 10}),
        ("then the night side", 500, {EU: {"slack": BUSY}, AP: {"slack": IDLE}},
         {"us-0": 5, AP: 5}),
        ("night side first", 0, {EU: {"slack": IDLE}, AP: {"slack": BUSY}}, {EU: 10}),
        ("a peer that knows nothing of its night", 0, {EU: {}}, {EU: 10}),
        ("room now counts", 0, {EU: {"slack": IDLE, "room": 0}, AP: {"slack": BUSY}}, {AP: 10}),
        ("as far as it goes", 0, {EU: {"slack": IDLE, "room": 300}, AP: {}}, {EU: 3, AP: 7}),
        ("nobody", 0, {EU: {"accepting": False}, AP: {"model": "other"}}, {}),
        ("what its own jobs wait for is no slack", 0,
         {EU: {"slack": (500,) * 24}, AP: {"slack": (100,) * 24}}, {EU: 10}),
    ],
)  # fmt: skip
def test_where(what: str, home_room: int, peers: dict, expected: dict):
    world = Mesh()
    world.replica("us-0", room_max=home_room)
    for region, fields in peers.items():
        world.peer(region, **fields)
    world.submit(lines=10)
    world.second()
    assert world.where() == expected, what


@pytest.mark.parametrize(
    ("what", "home_price", "home_idle", "peers", "expected"),
    [
        ("no price here: prices say nothing", None, 1.0, {EU: {"price": 0.1}}, {"us-0": 10}),
        ("cheaper with room now", 1.0, 1.0, {EU: {"price": 0.5, "slack": IDLE}}, {EU: 10}),
        ("equally dear", 1.0, 1.0, {EU: {"price": 1.0, "slack": IDLE}}, {"us-0": 10}),
        ("dearer", 1.0, 1.0, {EU: {"price": 2.0, "slack": IDLE}}, {"us-0": 10}),
        ("cheaper later: it waits", 1.0, 1.0,
         {EU: {"price": 0.5, "slack": IDLE, "room": 0}}, {}),
        ("cheaper later, but home could not catch up", 1.0, 1e-4,
         {EU: {"price": 0.5, "slack": IDLE, "room": 0}}, {"us-0": 10}),
        ("cheaper later, but too little", 1.0, 1.0,
         {EU: {"price": 0.5, "slack": (5,) * 24, "room": 0}}, {"us-0": 10}),
        ("cheaper later, and nothing known of home", 1.0, None,
         {EU: {"price": 0.5, "slack": IDLE, "room": 0}}, {"us-0": 10}),
        ("the cheapest of two", 1.0, 1.0,
         {EU: {"price": 0.5, "slack": IDLE}, AP: {"price": 0.4, "slack": IDLE}}, {AP: 10}),
        ("no price there: as dear as here", 1.0, 1.0, {EU: {"slack": IDLE}}, {"us-0": 10}),
    ],
)  # fmt: skip
def test_when_by_price(
    what: str, home_price: float | None, home_idle: float | None, peers: dict, expected: dict
):
    world = Mesh(price=home_price)
    world.tick()
    if home_idle is not None:
        forecast(world, home_idle)
    for region, fields in peers.items():
        world.peer(region, **fields | {"room": 0})
    world.submit(lines=10, window_s=20 * 3600.0)
    for _ in range(4):  # until the job's work is known
        world.second()
    for region, fields in peers.items():
        world.peer(region, **fields)
    world.replica("us-0", room_max=1000, fields={"kv_used_ratio": 1.0 - (home_idle or 0.0)})
    world.beats()
    world.second()
    assert world.where() == expected, what


def test_a_job_that_waits_for_a_cheaper_region_goes_home_before_it_would_be_late():
    """The peer promises for ever and never has room."""
    world = Mesh(price=1.0)
    world.tick()
    forecast(world, 1.0, tokens_per_s=6.0)
    world.peer(EU, price=0.5, slack=IDLE, room=0)
    world.replica("us-0", room_max=1000)
    world.submit(lines=30, window_s=1200.0)
    while world.now < 1200 and len(world.results) < 30:
        world.say()
        world.run(4.0, step_s=0.25)
        assert all(one.request.offline for one in world.open.values())
        for key in list(world.open):
            world.end(key)
        world.stored()
        world.feed(oev.JobSeen(world.jobs["j"]))
        if world.now < 300:
            assert not world.results
    assert len(world.results) == 30
    assert world.now < 1000
    assert world.where() == {}


@pytest.mark.parametrize(
    ("wanted", "named", "confined", "expected"),
    [
        ((), (), {}, {EU: 5}),
        ((EUROPE,), (EUROPE,), {}, {EU: 5}),
        ((EUROPE,), (), {}, {}),
        ((EUROPE,), None, {}, {}),
        (("mars", EUROPE), (EUROPE,), {}, {EU: 5}),
        (("usa",), (EUROPE, "usa"), {}, {}),
        ((), (EUROPE,), {US: ("usa",)}, {}),
        ((), (EUROPE,), {US: (EUROPE, "usa")}, {EU: 5}),
        ((), (), {US: (EUROPE, "usa")}, {}),
    ],
)
def test_residency_is_never_violated(wanted: tuple, named: tuple, confined: dict, expected: dict):
    """A label counts if the map gives it to the region and the region's state names it."""
    carried = {US: ("usa",), EU: (EUROPE,), AP: ("mars",)}
    world = Mesh(ground=ground(carried, confined))
    world.peer(EU, slack=IDLE, residency=named)
    world.peer(RegionId("nowhere"), slack=IDLE, residency=(EUROPE,), room=0)
    world.submit(lines=5, residency=wanted)
    world.second()
    assert world.where() == expected


def test_a_peer_is_silent_after_some_seconds():
    world = Mesh()
    world.peer(EU)
    world.say()
    world.run(SILENT_S_MAX + 2)
    world.submit(lines=5)
    world.run(1.0)
    assert not world.open


def test_a_state_that_is_older_than_the_last_one_is_ignored():
    world = Mesh()
    world.feed(oev.OfflineStateSeen(offline_state(EU, 5, room=0)))
    world.feed(oev.OfflineStateSeen(offline_state(EU, 4, room=10**6)))
    world.submit(lines=5)
    world.run(1.0)
    assert not world.open
    world.feed(oev.OfflineStateSeen(offline_state(EU, 1, room=10**6, epoch=2)))
    world.run(1.0)
    assert len(world.open) == 5


def test_two_runners_of_a_peer_speak_of_the_same_replicas():
    world = Mesh()
    world.feed(oev.OfflineStateSeen(offline_state(EU, 1, room=300)))
    world.feed(oev.OfflineStateSeen(offline_state(EU, 1, room=300, router="batch-1")))
    world.submit(lines=9)
    world.run(1.0)
    assert world.where() == {EU: 3}


def test_a_liar_gets_a_few_lines_that_bounce_and_rests_longer_each_time():
    """It claims endless room and refuses everything; an honest peer has some room."""
    world = Mesh()
    world.peer(EU, room=2**62, slack=(2**62,) * 24)
    world.peer(AP, room=300)
    world.submit(lines=2000)
    bounced, honest = [], 0
    while world.now < 300:
        world.second()
        for key in world.keys_at(EU):
            bounced.append(world.now)
            world.refuse(key)
        for key in world.keys_at(AP):
            honest += 1
            world.end(key)
        world.stored()
        world.feed(oev.JobSeen(world.jobs["j"]))
    bursts = sorted(set(bounced))
    assert len(bursts) < 15, "each rest is twice as long as the one before"
    assert bursts[-1] - bursts[-2] > BACKOFF_S_MAX / 2
    assert max(Counter(bounced).values()) <= UNDER_WAY_TOKENS / 100 + 1
    assert Counter(bounced)[bursts[-1]] <= 100
    assert honest > 300, "the others' lines went elsewhere meanwhile"


def test_what_a_peer_may_have_under_way_grows_with_its_answers():
    world = Mesh()
    world.peer(EU, room=2**40)
    world.submit(lines=4000, tokens=1000)
    under_way = []
    for _ in range(8):
        world.second()
        keys = world.keys_at(EU)
        under_way.append(len(keys))
        for key in keys:
            world.end(key)
        world.stored()
        world.feed(oev.JobSeen(world.jobs["j"]))
    assert under_way[0] <= UNDER_WAY_TOKENS / 1000 + 1
    assert max(under_way) > 4 * under_way[0]


@pytest.mark.parametrize("claimed", [10**6, 2**63])
def test_what_a_peer_claims_to_have_computed_costs_no_more_than_the_line_may(claimed: int):
    mesh = Mesh()
    mesh.peer(EU)
    made = mesh.submit(lines=2)
    mesh.second()
    mesh.end(next(iter(mesh.open)), Served(claimed, None, claimed))
    record = mesh.core.state.jobs.get(made.id)
    assert record is not None and record.line_tokens == 100
    assert mesh.core.state.regions.peers[EU].allowed_tokens == UNDER_WAY_TOKENS + 100
    assert mesh.core.counts.tokens == 100


def test_what_was_sent_since_a_peers_state_counts():
    world = Mesh()
    world.peer(EU, room=1000)
    world.submit(lines=500)
    world.say()
    for _ in range(15):
        world.run(0.1)
    assert world.where() == {EU: 10}


def test_a_line_that_a_peer_refuses_goes_to_the_next_one():
    world = Mesh()
    world.peer(EU, slack=IDLE)
    world.peer(AP, slack=BUSY)
    world.submit(lines=1)
    world.second()
    (key,) = world.keys_at(EU)
    world.refuse(key, Refusal.RESIDENCY)
    world.second()
    assert world.where() == {AP: 1}


def test_near_its_deadline_a_job_becomes_online_work():
    """No room anywhere: half the window waits, then low, then normal priority; reported late."""
    world = Mesh()
    world.peer(EU, room=0)
    world.replica("us-0", room_max=0)
    world.submit(lines=40, window_s=1000.0)
    seen: list[tuple[float, Priority]] = []
    while world.now < 999:
        world.say()
        world.run(2.0, step_s=0.2)
        for key in list(world.open):
            one = world.open[key]
            assert not one.request.offline
            seen.append((world.now, one.request.priority))
            world.fail(key, preempted=True)
    first_low = min(at for at, priority in seen if priority is Priority.LOW)
    first_normal = min(at for at, priority in seen if priority is Priority.NORMAL)
    assert 500 <= first_low < 600
    assert 900 <= first_normal < 910
    assert world.paced["j"].late


def test_a_job_in_time_is_never_online_work():
    world = Mesh()
    world.replica("us-0", room_max=500)
    world.submit(lines=200, window_s=1000.0)
    while world.core.state.jobs.get("j").left:  # type: ignore[union-attr]
        world.run(1.0, step_s=0.2)
        assert all(one.request.offline for one in world.open.values())
        assert all(one.request.priority is Priority.LOW for one in world.open.values())
        for key in list(world.open):
            world.end(key)
        world.stored()
        world.feed(oev.JobSeen(world.jobs["j"]))
    assert world.now < 500
    assert not world.paced["j"].late


def test_online_work_goes_to_a_peers_routers_where_home_serves_nothing():
    world = Mesh()
    world.peer(EU, room=0)
    world.submit(lines=5, window_s=100.0)
    while world.now < 98:
        world.second()
        for key, one in list(world.open.items()):
            if world.now > one.request.arrived_at:
                world.feed(ev.AttemptProgressed(key, one.attempt))
    assert world.where() == {EU: 5}
    assert not any(one.request.offline for one in world.open.values())


def test_embeddings_wait_for_a_replica_that_makes_them():
    world = World()
    world.replica(ReplicaId("us-0"))
    world.submit(lines=3, model=served_name(MODEL, EMBEDDINGS))
    world.run(100.0, step_s=1.0)
    assert not world.results
    world.run(30.0, step_s=1.0)
    assert {(one.settlement, one.code) for one in world.results.values()} == {
        ("error", "path_not_served")
    }
