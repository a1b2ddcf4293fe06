"""What is read of a replica for every request: worked out by hearing it, and by what is sent."""

import pytest

from mesh.core.view.replica import Replica
from schemas.state import ReplicaState
from tests.mesh.core.build import beat


@pytest.mark.parametrize(
    ("said", "room"),
    [
        ({"outstanding": 3, "outstanding_max": 8}, 5),
        ({"outstanding": 9, "outstanding_max": 8}, -1),
        ({"outstanding_max": None}, 0),
        ({"state": ReplicaState.DRAINING}, 0),
    ],
)
def test_it_takes_as_many_as_its_agent_says_if_it_is_ready(said, room):
    one = Replica(beat("a", **said), 0.0)
    assert (one.room, one.takes) == (room, room > 0)


def test_what_is_on_its_way_takes_room_and_a_refusal_all_of_it_until_it_speaks():
    one = Replica(beat("a", outstanding_max=2), 0.0)
    one.on_the_way.add(1, 10, 10, 0.0)
    assert one.takes
    one.on_the_way.add(2, 10, 10, 0.0)
    assert not one.takes
    one.on_the_way.over(1)
    one.refused_at = 0.1
    assert not one.takes
    one.hear(beat("a", 2, outstanding_max=2), 0.2)
    assert one.takes


def test_a_load_is_the_larger_count_and_what_is_on_its_way():
    one = Replica(beat("a", outstanding=2, running=3, pending=1), 0.0)
    one.on_the_way.add(1, 10, 10, 0.0)
    assert (one.inside, one.load, one.pending) == (4, 5, 2)
