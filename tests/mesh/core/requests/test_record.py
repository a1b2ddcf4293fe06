"""A request's record: its states and transitions, its attempts, when another is worth it."""

from itertools import product

import pytest

from mesh.core.model.effects import KvPair
from mesh.core.requests.record import (
    TRANSITIONS,
    Cause,
    ImpossibleTransition,
    PrefillStage,
    RequestRecord,
    RequestState,
    Transition,
)
from schemas.decision import CandidateKind
from schemas.ids import RegionId, ReplicaId
from schemas.kv_transfer import TransferKind
from tests.mesh.core.build import request, spot

LOCAL, PEER = spot("a"), spot("eu", CandidateKind.PEER)
LOST = None


def test_a_life_with_two_holds():
    record = RequestRecord(request(1))
    record.hold(10.0)
    assert (record.held_since, record.state) == (10.0, RequestState.HELD)
    record.dispatch(PEER, None, 12.0)
    assert (record.attempt, record.held_s, record.state) == (1, 2.0, RequestState.TRIED)
    assert (record.peer, record.replica) == (RegionId("eu"), None)
    record.placed_by_peer(ReplicaId("eu-0"), 13.0)
    record.hold(20.0)
    assert (record.peer, record.replica) == (None, None)
    record.dispatch(LOCAL, 7, 21.0)
    times = record.held_s, record.attempted_at, record.last_frame_at
    assert (record.attempt, *times, record.replica) == (2, 3, 21, 21, "a")
    record.start(22.0)
    assert (record.state, record.last_frame_at) == (RequestState.STARTED, 22.0)
    record.end()
    assert record.state is RequestState.ENDED


def test_time_in_queues_adds_up_over_holds_peers_and_the_region_it_came_from():
    record = RequestRecord(request(1, held_before_s=5.0))
    record.hold(10.0)
    record.dispatch(PEER, None, 12.0)
    record.hold(13.0)
    assert record.queued_s(13.0) == 7.0, "a peer that refused at once did not hold it"
    record.dispatch(PEER, None, 14.0)
    record.progressed(15.0)
    assert record.queued_s(16.0) == 8.0, "it is counted when the peer has it no more"
    record.placed_by_peer(ReplicaId("eu-0"), 17.0)
    record.progressed(30.0)
    record.hold(50.0)
    assert record.queued_s(51.0) == 5.0 + 2.0 + 1.0 + 3.0 + 1.0, "not while a replica had it"


STAGE = PrefillStage(ReplicaId("p"), 6, 0.0, KvPair(TransferKind.NIXL), reserved=7)
STEPS = {
    Transition.HOLD: lambda record: record.hold(1.0),
    Transition.DISPATCH: lambda record: record.dispatch(LOCAL, 7, 1.0),
    Transition.DECODE: lambda record: record.decode(8, 1.0),
    Transition.START: lambda record: record.start(1.0),
    Transition.BREAK: lambda record: record.broke("cut", avoid_place=True),
    Transition.END: lambda record: record.end(),
}


@pytest.mark.parametrize(("state", "transition"), list(product(RequestState, Transition)))
def test_every_transition_is_in_the_table_or_refused(state, transition):
    record = RequestRecord(request(1), state=state, prefill=STAGE)
    if (state, transition) in TRANSITIONS:
        STEPS[transition](record)
        assert record.state is TRANSITIONS[state, transition]
    else:
        with pytest.raises(ImpossibleTransition, match=f"{transition.name} .* {state.name}"):
            STEPS[transition](record)
        assert (record.state, record.attempt, record.held_since) == (state, 0, None)


def test_what_has_ended_stays_so_and_every_state_can_end():
    assert not [step for state, step in TRANSITIONS if state is RequestState.ENDED]
    for state in set(RequestState) - {RequestState.ENDED}:
        assert TRANSITIONS[state, Transition.END] is RequestState.ENDED


@pytest.mark.parametrize(
    ("failures", "again"),
    [
        ([LOST], True),
        ([LOST, LOST], True),
        ([LOST, LOST, LOST], False),
        ([500], True),
        ([500, 500], False),
        ([500, 503], False),
        ([501], False),
        ([LOST, 501], False),
        ([LOST, 500], True),
        ([500, LOST], True),
        ([500, LOST, 500], False),
        ([429], True),
        ([429, 429], True),
        ([429, 429, 429], False),
        ([500, 429], True),
    ],
)
def test_another_attempt(failures, again) -> None:
    record = RequestRecord(request(1))
    for status in failures:
        if record.state is RequestState.TRIED:
            record.hold(0.0)
        record.dispatch(LOCAL, 7, 0.0)
        record.engine_answered(status)
        record.failed(Cause.PLACE)
    assert record.is_worth_another(failures_max=3) is again
    assert record.avoid == {"a"}


@pytest.mark.parametrize(
    ("at", "cause", "counts", "avoided", "maybe_innocent"),
    [
        (LOCAL, Cause.PLACE, True, {"a"}, set()),
        (LOCAL, Cause.RESTART, True, set(), set()),
        (LOCAL, Cause.PREFILL, True, {"p"}, set()),
        (PEER, Cause.PLACE, True, {"eu"}, set()),
        (PEER, Cause.LINK, False, {"eu"}, {"eu"}),
        (PEER, Cause.PEERS_REPLICA, True, {"eu"}, {"eu"}),
    ],
)
def test_what_ended_an_attempt_says_what_of_its_place(
    at, cause, counts, avoided, maybe_innocent
) -> None:
    record = RequestRecord(request(1))
    record.dispatch(at, None, 0.0, STAGE if cause is Cause.PREFILL else None)
    record.failed(cause)
    assert (record.failures, record.avoid) == (counts, avoided)
    assert record.maybe_innocent == maybe_innocent


def test_what_an_engine_answered_is_of_its_attempt_alone() -> None:
    record = RequestRecord(request(1))
    record.dispatch(LOCAL, 7, 0.0)
    record.engine_answered(500)
    record.failed(Cause.PLACE)
    record.hold(1.0)
    record.dispatch(PEER, None, 2.0)
    assert record.engine_status is None, "which falls silent says nothing of the engine before"
