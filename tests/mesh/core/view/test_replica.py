"""What is read of a replica for every request: computed from heartbeats and hand-offs."""

from random import Random

import pytest

from mesh.core.model.settings import RouterSettings
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import ReplicaTable
from schemas.ids import ReplicaId
from schemas.state import ReplicaState
from tests.mesh.core.build import ROUTER, beat


@pytest.mark.parametrize(
    ("said", "room"),
    [
        ({"outstanding": 3, "outstanding_max": 8}, 5),
        ({"outstanding": 9, "outstanding_max": 8}, -1),
        ({"outstanding_max": None}, 0),
        ({"state": ReplicaState.DRAINING}, 0),
    ],
)
def test_it_takes_as_many_as_its_agent_reports_if_it_is_ready(said, room):
    one, _ = replica(**said)
    assert (one.room, one.takes) == (room, room > 0)


def replica(**fields):
    """The only one of a table."""
    table = ReplicaTable(ROUTER, RouterSettings())
    table.see(beat("a", **fields), 0.0)
    return table.get(ReplicaId("a")), table


def test_hand_offs_take_room_and_a_refusal_takes_all_until_the_next_heartbeat():
    one, table = replica(outstanding_max=2)
    first = table.hand_off("a", 10, 10, 0.0)
    assert one.takes
    table.hand_off("a", 10, 10, 0.0)
    assert not one.takes
    table.over("a", first)
    assert one.takes
    table.refused("a", 0.1)
    assert not one.takes
    table.see(beat("a", 2, outstanding_max=2), 0.2)
    assert one.takes


def test_a_replica_without_work_is_idle_if_it_is_ready():
    one, table = replica()
    assert one.is_idle
    number = table.hand_off("a", 10, 10, 0.0)
    assert not one.is_idle
    table.over("a", number)
    assert one.is_idle
    table.see(beat("a", 2, models=("m", "n")), 0.1)
    assert one.is_idle and [*table.sample_serving("n", [], Random(1))] == [one]
    table.see(beat("a", 3, state=ReplicaState.DRAINING), 0.2)
    assert not one.is_idle


def test_a_load_is_the_larger_count_and_what_is_on_its_way():
    one = Replica(beat("a", outstanding=2, running=3, pending=1), 0.0)
    one.on_the_way.add(1, 10, 10, 0.0)
    assert (one.inside, one.load, one.pending) == (4, 5, 2)
