"""A request's record: attempts are numbered, waiting adds up."""

from mesh.core.requests.inflight import Inflight
from schemas.ids import RegionId, ReplicaId
from tests.mesh.core.build import request


def test_a_life_with_two_holds():
    record = Inflight(request(1))
    record.hold(10.0)
    record.hold(11.0)  # it waits already: the first time counts
    assert (record.held_since, record.is_tried) == (10.0, False)
    record.release(12.0)
    assert (record.attempt, record.held_s, record.is_tried) == (1, 2.0, True)
    record.peer, record.replica = RegionId("eu"), ReplicaId("eu-0")
    record.hold(20.0)
    assert (record.peer, record.replica) == (None, None)
    record.release(21.0)
    assert (record.attempt, record.held_s, record.attempted_at, record.heard_at) == (2, 3, 21, 21)
    record.started = True
    assert not record.is_tried
