"""When a router asks again for what was lost, and when it gives it up."""

from mesh.session.bus_receiver import REQUESTS_MAX, RetransmitRequests

INBOX, OTHER = "_INBOX.us.r1.7-1-x", "_INBOX.us.r1.8-1-y"


def asked_at(
    frames: RetransmitRequests, from_s: float, until_s: float
) -> tuple[list[float], float]:
    """When the one frame is asked for, looked at every 50 ms; and when it counts as lost."""
    asked = []
    for tick in range(round(from_s * 20), round(until_s * 20) + 1):
        for missing in frames.due(tick / 20, bus_is_there=True):
            if missing.is_lost:
                return asked, tick / 20
            missing.was_requested(tick / 20)
            asked.append(tick / 20)
    return asked, float("inf")


def test_it_is_asked_for_three_times_and_given_up_after_three_and_a_half_seconds() -> None:
    frames = RetransmitRequests()
    frames.enter(INBOX, 3, 10.0)
    assert asked_at(frames, 10.0, 20.0) == ([10.0, 10.5, 11.5], 13.5)


def test_without_the_bus_nobody_is_asked_and_nothing_given_up() -> None:
    frames = RetransmitRequests()
    frames.enter(INBOX, 3, 10.0)
    assert frames.due(15.0, bus_is_there=False) == []
    assert asked_at(frames, 15.0, 18.0) == ([15.0, 15.5, 16.5], float("inf"))
    assert frames.due(30.0, bus_is_there=False) == []


def test_after_the_bus_was_away_the_asking_begins_anew() -> None:
    frames = RetransmitRequests()
    frames.enter(INBOX, 3, 10.0)
    assert asked_at(frames, 10.0, 12.0) == ([10.0, 10.5, 11.5], float("inf"))
    frames.requested_after_outage(OTHER, 20.0)
    frames.requested_after_outage(INBOX, 20.0)
    assert asked_at(frames, 20.0, 30.0) == ([20.5, 21.5], 23.5)


def test_a_later_frame_of_the_same_answer_takes_its_place() -> None:
    frames = RetransmitRequests()
    first = frames.enter(INBOX, 3, 10.0)
    for _ in range(REQUESTS_MAX):
        first.was_requested(10.0)
    frames.enter(OTHER, 5, 10.0)
    again = frames.enter(INBOX, 9, 11.0)
    assert len(frames) == 2
    assert not again.is_lost
    frames.drop(first)
    assert len(frames) == 2, "it was gone already"
    frames.drop(again)
    assert [missing.inbox for missing in frames.due(12.0, bus_is_there=True)] == [OTHER]
