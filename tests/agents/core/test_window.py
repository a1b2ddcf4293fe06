"""The flow-control window."""

from agents.core.answer_stream import FlowWindow


def test_the_window_closes_and_opens() -> None:
    window = FlowWindow(100)
    window.send(99)
    assert window.open
    window.send(50)
    assert not window.open
    window.credit(49)
    assert not window.open
    window.credit(50)
    assert window.open


def test_old_and_false_credits_change_nothing() -> None:
    window = FlowWindow(100)
    window.send(150)
    window.credit(1_000_000)
    assert not window.open
    window.credit(120)
    window.credit(10)
    window.send(69)
    assert window.open
    assert window.sent == 219
