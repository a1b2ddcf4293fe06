"""Replicas that were handed back while their answers were awaited."""

import pytest

from mesh.core.membership.handed_back import (
    WATCH_S_MAX,
    AdoptedAttempt,
    HandedBack,
    LostWatch,
)
from mesh.core.model.settings import RouterSettings
from mesh.core.view.replica import ForwardedAnswer, Replica
from schemas.ids import ReplicaId
from schemas.state import ReplicaState
from tests.mesh.core.build import EU, US, beat

NAME, BACK_AT = ReplicaId("eu/g0"), 100.0
OURS = (AdoptedAttempt(7, 2),)


def said(epoch=1, **fields):
    """On the bus, where its name is the plain one."""
    return beat("g0", region=EU, epoch=epoch, **({"outstanding": 1} | fields))


def back(*, owed=True, ours=OURS):
    table = HandedBack(US, RouterSettings())
    replica = Replica(beat(NAME, region=EU), BACK_AT)
    if owed:
        replica.relayed.append(ForwardedAnswer("inbox-1", BACK_AT + 30.0))
        replica.relayed.append(ForwardedAnswer("inbox-2", BACK_AT + 5.0))
    table.keep(replica, ours, BACK_AT)
    return table


def expire(table, now, *, living=True, waits=True):
    ours = [attempt for watch in table.watched.values() for attempt in watch.ours]
    return table.expire(now, [EU] if living else [], ours if waits else [])


def test_a_replica_without_awaited_answers_is_not_watched():
    assert not back(owed=False, ours=()).regions
    assert back(ours=()).regions == back(owed=False).regions == {EU}


@pytest.mark.parametrize("last", [said(2), said(state=ReplicaState.GONE)])
def test_who_restarts_or_leaves_is_lost_at_once(last):
    table = back()
    assert table.seen(said(), BACK_AT + 6.0) is None
    gone = table.seen(last, BACK_AT + 6.1)
    assert gone == LostWatch(NAME, ("inbox-1",), OURS, "the agent restarted or left")
    assert table.seen(said(3), BACK_AT + 6.2) is None
    assert not table.regions


@pytest.mark.parametrize(
    ("epoch", "orphans", "ours"),
    [
        (1, ("inbox-1", "inbox-3"), (*OURS, AdoptedAttempt(8, 1))),
        (2, ("inbox-3",), (AdoptedAttempt(8, 1),)),
    ],
)
def test_who_waits_since_an_earlier_time_still_does(epoch, orphans, ours):
    table = back()
    again = Replica(beat(NAME, region=EU, epoch=epoch), BACK_AT + 9.0)
    again.relayed.append(ForwardedAnswer("inbox-3", BACK_AT + 30.0))
    table.keep(again, (AdoptedAttempt(8, 1),), BACK_AT + 10.0)
    gone = table.seen(said(3), BACK_AT + 11.0)
    assert gone == LostWatch(NAME, orphans, ours, "the agent restarted or left")


def test_of_too_many_awaited_answers_the_latest_are_kept():
    table = HandedBack(US, RouterSettings(relayed_max=2))
    for number in range(3):
        replica = Replica(beat(NAME, region=EU), BACK_AT)
        replica.relayed.append(ForwardedAnswer(f"inbox-{number}", BACK_AT + 30.0))
        table.keep(replica, (AdoptedAttempt(number, 1),), BACK_AT + number)
    gone = table.seen(said(2), BACK_AT + 4.0)
    assert (gone.orphans, gone.ours) == (
        ("inbox-1", "inbox-2"),
        (AdoptedAttempt(1, 1), AdoptedAttempt(2, 1)),
    )


def test_who_falls_silent_is_lost_as_an_adopted_one_would_be():
    table = back()
    table.seen(said(), BACK_AT + 1.0)
    assert expire(table, BACK_AT + 3.0) == []
    [gone] = expire(table, BACK_AT + 3.1)
    assert (gone.name, gone.orphans, gone.ours) == (NAME, ("inbox-1", "inbox-2"), OURS)
    assert not table.regions


def test_a_silent_region_is_a_cut_link_and_no_loss():
    table = back()
    for tenth in range(1, 100):
        assert expire(table, BACK_AT + tenth / 10, living=False) == []
    assert expire(table, BACK_AT + 11.8) == [], "the routers may return first"
    assert len(expire(table, BACK_AT + 12.0)) == 1


def test_it_is_watched_until_nothing_is_left():
    table = back()
    table.seen(said(outstanding=0), BACK_AT + 0.5)
    assert table.regions == {EU}, "work may have been on its way"
    table.seen(said(outstanding=0), BACK_AT + 1.1)
    assert not table.regions


def test_it_is_watched_until_no_answer_is_awaited():
    table = back(ours=())
    table.seen(said(), BACK_AT + 29.9)
    assert expire(table, BACK_AT + 29.9) == [] and table.regions
    assert expire(table, BACK_AT + 30.1) == [] and not table.regions
    table = back(owed=False)
    assert expire(table, BACK_AT + 9.0, waits=False) == [] and not table.regions


def test_it_is_not_watched_for_ever():
    table = back(owed=False)
    table.seen(said(), BACK_AT + WATCH_S_MAX)
    assert expire(table, BACK_AT + WATCH_S_MAX) == [] and table.regions
    assert expire(table, BACK_AT + WATCH_S_MAX + 0.1) == [] and not table.regions
