"""Peers' lines: placed where there is room, or refused with the reason."""

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Request
from schemas.exchange import Refusal
from schemas.ids import ModelId, ReplicaId
from schemas.state import ReplicaState
from tests.mesh.core.build import beat
from tests.mesh.core.offline.world import EUROPE, World, peer_line


def arrives(world: World, request: Request) -> fx.Dispatch | fx.RefusePeer:
    world.peer_lines[request.key] = []
    world.feed(ev.RequestArrived(request))
    (outcome,) = world.peer_lines[request.key]
    return outcome


@pytest.mark.parametrize(
    ("what", "settings", "fields", "beats", "outcome"),
    [
        ("room", {}, {}, {}, "us-0"),
        ("too long", {}, {"answer_tokens": 10_000}, {}, Refusal.NO_OFFLINE_ROOM),
        ("of unknown length", {}, {"answer_tokens": None}, {}, Refusal.NO_OFFLINE_ROOM),
        ("no room", {}, {}, {"offline_room_tokens": 0}, Refusal.NO_OFFLINE_ROOM),
        ("takes none", {}, {}, {"offline_room_tokens": None}, Refusal.NO_OFFLINE_ROOM),
        ("drains", {}, {}, {"state": ReplicaState.DRAINING}, Refusal.NO_OFFLINE_ROOM),
        ("another model", {}, {"model": ModelId("m2")}, {}, Refusal.NO_REPLICA),
        ("a label that is not here", {}, {"residency": (EUROPE,)}, {}, Refusal.RESIDENCY),
        ("no offline work", {}, {"offline": False}, {}, Refusal.NO_OFFLINE_ROOM),
        ("takes no peers", {"takes_peers": False}, {}, {}, Refusal.NO_OFFLINE_ROOM),
    ],
)
def test_a_peers_line_is_placed_or_refused(
    what: str, settings: dict, fields: dict, beats: dict, outcome: str
):
    world = World(**settings)
    world.replica("us-0", room_max=1000, fields=beats)
    world.beats()
    found = arrives(world, peer_line(-1, **fields))
    if isinstance(found, fx.Dispatch):
        assert (found.replica, found.answer_inbox, found.attempt) == (outcome, "inbox--1", 1)
    else:
        assert (found.reason, found.answer_inbox, found.fresh) == (outcome, "inbox--1", None), what


def test_no_more_are_taken_than_there_is_room_for():
    world = World()
    world.replica("us-0", room_max=500)
    world.replica("us-1", room_max=300)
    world.beats()
    found = [arrives(world, peer_line(-number)) for number in range(1, 10)]
    placed = [one.replica for one in found if isinstance(one, fx.Dispatch)]
    assert sorted(placed) == ["us-0"] * 4 + ["us-1"] * 2
    assert placed[0] == "us-0", "the most room"
    assert len({one.handoff for one in found if isinstance(one, fx.Dispatch)}) == 6
    world.tick()
    world.beats()
    assert isinstance(arrives(world, peer_line(-20)), fx.Dispatch)


def test_prompts_with_one_beginning_go_to_one_replica():
    world = World()
    for number in range(4):
        world.replica(f"us-{number}", room_max=1000)
    world.beats()
    placed = {}
    for number in range(1, 17):
        family = number % 4
        prompt = Prompt(100, (family, 100 + family, 10_000 + number))
        found = arrives(world, peer_line(-number, prompt=prompt))
        assert isinstance(found, fx.Dispatch)
        placed.setdefault(family, set()).add(found.replica)
        assert found.prefill_tokens == (100 if number <= 4 else 1)
    assert all(len(places) == 1 for places in placed.values())
    assert len(set().union(*placed.values())) == 4


def test_nothing_is_taken_while_draining_and_without_heartbeats():
    world = World()
    world.replica("us-0")
    world.beats()
    world.tick(1.0)
    found = arrives(world, peer_line(-1))
    assert isinstance(found, fx.RefusePeer) and found.reason == Refusal.NO_OFFLINE_ROOM
    world.beats()
    world.feed(ev.Drain())
    found = arrives(world, peer_line(-2))
    assert isinstance(found, fx.RefusePeer) and found.reason == Refusal.DRAINING


def test_the_asking_runner_learns_that_its_replica_is_lost():
    world = World()
    world.replica("us-0", room_max=1000)
    world.beats()
    arrives(world, peer_line(-2, deadline=0.05))
    arrives(world, peer_line(-1))
    world.tick()
    world.tick()
    world.feed(ev.HeartbeatSeen(beat("us-0", 99, epoch=1, state=ReplicaState.GONE)))
    assert world.lost_reports == [fx.TellLost("inbox--1", ReplicaId("us-0"))]


def test_own_lines_go_first():
    world = World()
    world.replica("us-0", room_max=500)
    world.submit(lines=20)
    world.run(1.0)
    found = arrives(world, peer_line(-1))
    assert isinstance(found, fx.RefusePeer) and found.reason == Refusal.NO_OFFLINE_ROOM


def test_the_peer_is_told_of_a_lost_replica_that_has_no_online_work():
    world = World()
    replica = world.replica("us-0")
    world.beats()
    placed = arrives(world, peer_line(-1))
    assert isinstance(placed, fx.Dispatch)
    replica.fields = {"offline_running": 1}
    world.beats()
    world.restart(replica.name)
    effects = world.feed(ev.HeartbeatSeen(replica.beat()))
    assert [one.answer_inbox for one in effects if isinstance(one, fx.TellLost)] == ["inbox--1"]


def test_a_peer_line_that_comes_again_is_taken_to_be_computed_whole():
    """Else a peer that sends and cancels would have long prompts computed as if they were short."""
    world = World()
    world.replica("us-0")
    world.beats()
    prompt = Prompt(640, tuple(range(10)))
    for key in (-1, -2):
        placed = arrives(world, peer_line(key, prompt=prompt))
        assert isinstance(placed, fx.Dispatch)
        assert placed.prefill_tokens == 640
        world.beats()


def test_a_peer_line_is_computed_whole_by_a_replica_that_was_restarted():
    world = World()
    replica = world.replica("us-0", room_max=10_000)
    world.beats()
    found = []
    for key in (-1, -2, -3):
        if key == -3:
            world.restart(replica.name)
            world.beats()
        found.append(arrives(world, peer_line(key, prompt=Prompt(100, (1, 2, key)))))
        world.beats()
    placed = [one for one in found if isinstance(one, fx.Dispatch)]
    assert [one.prefill_tokens for one in placed] == [100, 1, 100]
