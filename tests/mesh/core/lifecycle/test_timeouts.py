"""Timeouts: when an attempt is given up, and whether another place may serve it."""

import pytest

from mesh.core.lifecycle import timeouts
from mesh.core.lifecycle.timeouts import RETURN_S, UNHEARD_S
from mesh.core.model.settings import RouterSettings
from mesh.core.requests.hold_queue import need_of
from mesh.core.requests.record import RequestRecord, RequestState
from schemas.exchange import SILENCE_S_MAX, WORKING_S
from schemas.ids import ModelId, ReplicaId
from schemas.state import ReplicaState
from tests.mesh.core.build import EU, beat, digest, foreign, request, state

A = ReplicaId("a")


class View:
    """An outlook on one replica and one peer, both seen at 0."""

    def __init__(self, **fields):
        self.state = state(**fields)
        self.replicas, self.peers = self.state.replicas, self.state.peers
        self.replicas.see(beat("a", pending=5, full=True), 0.0)
        self.peers.see(digest("eu", free=0), 0.0)
        self.peers.measured(EU, 0.5)


@pytest.fixture
def view():
    return View()


def tried(replica=A, peer=None, heard_at=0.0, started=False):
    life = RequestState.STARTED if started else RequestState.TRIED
    record = RequestRecord(
        request(1), life, attempt=1, replica=replica, peer=peer, last_frame_at=heard_at
    )
    record.given_at = heard_at - 0.1  # its agent has sent a frame since
    return record


def due(view, records, now):
    view.state.inflight = dict(enumerate(records))
    return timeouts.due_for_check(view.state, now)


@pytest.mark.parametrize(
    ("asked", "avoid", "expected"),
    [
        (request(1), (), True),  # full is not gone
        (request(1), ("a",), True),
        (request(1), ("eu",), True),
        (request(1), ("a", "eu"), False),
        (foreign(1), (), True),
        (foreign(1), ("a",), False),
        (request(1, model=ModelId("other")), (), False),
    ],
)
def test_who_else_serves(view, asked, avoid, expected):
    assert (
        timeouts.others_serve(view.state, RequestRecord(asked, avoid=frozenset(avoid))) is expected
    )


def test_a_replica_that_is_not_ready_serves_no_request(view):
    view.replicas.see(beat("a", 2, state=ReplicaState.DOWN), 0.0)
    assert not timeouts.others_serve(view.state, RequestRecord(request(1), avoid=frozenset(["eu"])))


@pytest.mark.parametrize("record", [tried(), tried(started=True), tried(ReplicaId("x"), EU)])
def test_silence_has_a_limit_everywhere(view, record):
    record.last_frame_at = 10.0
    assert timeouts.lost_because(view.state, record, 10.0 + SILENCE_S_MAX) is None
    assert "has been silent for" in timeouts.lost_because(view.state, record, 10.1 + SILENCE_S_MAX)


def test_work_of_which_nothing_is_heard_is_soon_lost_unless_it_may_wait_in_a_busy_link(view):
    """Another nats-server of the region may have had it."""
    here, away = tried(heard_at=10.0), tried(ReplicaId("x"), EU, heard_at=10.0)
    for record in (here, away):
        record.given_at = 10.0
        assert timeouts.lost_because(view.state, record, 10.0 + UNHEARD_S) is None
        assert "has been silent for" in timeouts.lost_because(view.state, record, 10.1 + UNHEARD_S)
    view.peers.measured(EU, 0.5, 10.0)
    assert timeouts.lost_because(view.state, away, 10.1 + UNHEARD_S) is None
    assert WORKING_S < UNHEARD_S < SILENCE_S_MAX


def test_an_answer_that_does_not_go_on_after_the_bus_came_back_is_lost(view):
    record = tried(started=True, heard_at=10.0)
    view.replicas.bus.returned(11.0)
    assert timeouts.lost_because(view.state, record, 11.0 + RETURN_S) is None
    assert "lost with the bus" in timeouts.lost_because(view.state, record, 11.1 + RETURN_S)
    record.last_frame_at = 11.2
    assert timeouts.lost_because(view.state, record, 11.1 + RETURN_S) is None
    assert WORKING_S < RETURN_S < SILENCE_S_MAX


def test_a_bus_that_comes_and_goes_counts_with_what_it_was_there(view):
    record = tried(started=True, heard_at=10.0)
    view.replicas.bus.lost(10.5)
    view.replicas.bus.returned(11.0)
    view.replicas.bus.lost(12.0)
    assert timeouts.lost_because(view.state, record, 12.0 + RETURN_S) is None
    view.replicas.bus.returned(30.0)
    assert timeouts.lost_because(view.state, record, 30.0 + RETURN_S) is None
    assert "lost with the bus" in timeouts.lost_because(view.state, record, 30.1 + RETURN_S)


def test_a_bus_that_stays_away_is_named(view):
    record = tried(started=True, heard_at=10.0)
    view.replicas.bus.lost(10.0)
    assert timeouts.lost_because(view.state, record, 40.0) is None
    why = timeouts.lost_because(view.state, record, 41.0)
    assert why == "the bus can't be reached: the replica has been silent for 31 s"
    assert timeouts.unserved_because(view.state, record) == "the bus can't be reached"
    view.replicas.bus.returned(42.0)
    assert timeouts.unserved_because(view.state, record) is None


def test_a_replica_without_heartbeats_is_lost_unless_its_answer_comes(view):
    assert timeouts.lost_because(view.state, tried(), 9.0) is None
    view.replicas.expire(9.0)
    assert "replica a was lost" in timeouts.lost_because(view.state, tried(heard_at=6.9), 9.0)
    assert timeouts.lost_because(view.state, tried(heard_at=7.1), 9.0) is None


def test_a_peer_must_say_where_within_its_time_and_a_round_trip(view):
    assert timeouts.lost_because(view.state, tried(None, EU), 2.5) is None
    assert "did not report where" in timeouts.lost_because(view.state, tried(None, EU), 2.6)
    assert timeouts.lost_because(view.state, tried(None, EU, started=True), 2.6) is None
    assert timeouts.lost_because(view.state, tried(ReplicaId("eu-0"), EU), 2.6) is None


def test_a_word_that_may_wait_in_a_busy_link_is_waited_for(view):
    """Pings, one a second, stop being answered at 1.0 and are answered again at 6.0."""
    view.peers.measured(EU, 0.5, 1.0)
    record = tried(None, EU, heard_at=1.2)
    for now in (4.0, 5.0, 6.0):
        view.peers.see(digest("eu", seq=int(now), free=0), now)
        view.peers.expire(now)
        assert timeouts.lost_because(view.state, record, now) is None
    for now in (6.0, 7.0, 8.0):
        view.peers.measured(EU, 0.5, now)
    view.peers.see(digest("eu", seq=9, free=0), 8.0)
    assert timeouts.lost_because(view.state, record, 8.4) is None, "the word may be right behind"
    assert "did not report where" in timeouts.lost_because(view.state, record, 8.6)


def test_a_peer_whose_digests_are_missing_too_is_not_waited_for(view):
    view.peers.measured(EU, 0.5, 1.0)
    record = tried(None, EU, heard_at=1.2)
    view.peers.expire(4.0)
    assert "did not report where" in timeouts.lost_because(view.state, record, 4.0)


def test_a_busy_link_does_not_lengthen_the_limit_of_any_silence(view):
    view.peers.measured(EU, 0.5, 1.0)
    record = tried(None, EU, heard_at=1.2)
    assert "has been silent for" in timeouts.lost_because(view.state, record, 1.3 + SILENCE_S_MAX)


def test_a_peer_that_sends_held_for_ever_counts_up_to_the_limit(view):
    last = 60.0 + 2.0 + 0.5  # hold_s_max, and the time of a reply
    record = tried(None, EU)
    assert not timeouts.is_kept_too_long(view.state, record, 99.0), "no frame came at all"
    for now, expected in ((last - 0.1, False), (last + 0.1, True)):
        record.last_frame_at = now - 0.1
        assert timeouts.is_kept_too_long(view.state, record, now) is expected
        assert timeouts.is_left_waiting(view.state, record, now) is not expected
        assert bool(due(view, [record], now)) is expected
    assert "kept the request waiting" in timeouts.lost_because(view.state, record, last + 0.1)
    record.replica = ReplicaId("eu-0")
    assert not timeouts.is_kept_too_long(view.state, record, last + 0.1)


def test_a_cut_off_peer_is_given_up_when_even_its_agents_fall_silent(view):
    # Its routers alone may restart: then the agent's WORKING still comes every 5 s.
    record = tried(ReplicaId("eu-0"), EU, heard_at=1.0, started=True)
    view.peers.expire(8.1)
    assert "can't be reached" in timeouts.lost_because(view.state, record, 8.1)
    record.last_frame_at = 1.2
    assert timeouts.lost_because(view.state, record, 8.1) is None


def test_only_the_doubtful_are_looked_at(view):
    """Held, past its deadline, or silent with its replica gone; no other of many."""
    fine, quiet = tried(heard_at=9.0), tried(heard_at=5.0)
    late = RequestRecord(request(2, arrived_at=-600.0), attempt=1, replica=A, last_frame_at=9.0)
    held = RequestRecord(request(3), held_since=1.0)
    lost = tried(replica=ReplicaId("gone"), heard_at=5.0)
    view.replicas.see(beat("a", 2), 10.0)
    found = due(view, [fine, quiet, late, held, lost], 10.0)
    assert [id(one) for one in found] == [id(late), id(held), id(lost)]


def test_replicas_here_and_elsewhere_that_serve_a_kind_are_counted_as_far_as_asked():
    view = View()
    ours, foreign_ones = need_of(request(1)), need_of(foreign(1))
    assert [timeouts.serving(view.state, ours, 0.1, enough) for enough in (1, 9)] == [1, 1 + 4]
    assert timeouts.serving(view.state, foreign_ones, 0.1, 9) == 1, "it goes no further"
    assert timeouts.serving(view.state, need_of(request(1, model=ModelId("other"))), 0.1) == 0
    view.replicas.see(beat("a", 2, state=ReplicaState.DRAINING), 0.1)
    assert timeouts.serving(view.state, foreign_ones, 0.1) == 0
    view.replicas.bus.lost(0.2)
    assert timeouts.serving(view.state, ours, 0.2) == 0


def test_replicas_without_heartbeats_are_not_counted():
    view = View()
    view.replicas.see(beat("b"), 0.0)
    kind, late_s = need_of(foreign(1)), RouterSettings().heartbeat_late_s
    assert timeouts.serving(view.state, kind, late_s, 9) == 2
    assert timeouts.serving(view.state, kind, late_s + 0.1, 9) == 0
