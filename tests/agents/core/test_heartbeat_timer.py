"""When heartbeats are due."""

from agents.core.heartbeat import GAP_MIN_S, HeartbeatTimer


def test_on_the_beat_and_sooner_when_in_a_hurry() -> None:
    cadence = HeartbeatTimer(0.1)
    assert cadence.due_at == float("-inf")
    cadence.sent(5.0)
    assert cadence.due_at == 5.1
    cadence.hurry()
    assert cadence.due_at == 5.0 + GAP_MIN_S
