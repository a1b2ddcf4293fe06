"""Fault switches: read strictly, and thrown at the rate that was asked for."""

import random

import pytest

from agents.simserver.faults import (
    Break,
    Faults,
    FaultsInvalid,
    FaultSwitchboard,
    Hang,
    parse_switches,
)


def test_switches_are_read_from_words():
    faults = parse_switches(("slow=3", "hang=engine", "error_rate=0.5", "stream=cut"))
    assert faults == Faults(slow=3.0, hang=Hang.ENGINE, error_rate=0.5, stream=Break.CUT)


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (("slow",), "name=value"),
        (("slwo=3",), 'unknown key; did you mean "slow"'),
        (("slow=0.5",), "slow: must be at least 1"),
        (("slow=nan",), "slow"),
        (("error_rate=2",), "error_rate"),
        (("error_status=200",), "error_status"),
        (("hang=yes",), "'off', 'engine' or 'server'"),
        (("crash_after_tokens=-1",), "crash_after_tokens"),
    ],
)
def test_the_error_of_a_bad_switch_names_the_correction(switches, message):
    with pytest.raises(FaultsInvalid, match=message):
        parse_switches(switches)


def test_rates_are_kept_and_repeat_with_the_seed():
    def strikes(seed: int) -> list[bool]:
        board = FaultSwitchboard(Faults(error_rate=0.3), random.Random(seed))
        return [board.request_fails() for _ in range(1000)]

    assert strikes(1) == strikes(1)
    assert strikes(1) != strikes(2)
    assert 250 < sum(strikes(1)) < 350


def test_a_crash_counts_tokens_from_when_it_was_set():
    board = FaultSwitchboard(Faults(), random.Random(0))
    assert not board.crash_is_due(1000)
    board.set(Faults(crash_after_tokens=5))
    assert not board.crash_is_due(4)
    assert board.crash_is_due(1)
    board.set(Faults(crash_after_tokens=0))
    assert board.crash_is_due()


def test_a_hang_is_an_endless_slowdown():
    board = FaultSwitchboard(Faults(slow=3), random.Random(0))
    assert board.slowdown == 3
    board.set(Faults(slow=3, hang=Hang.ENGINE))
    assert board.slowdown == float("inf")
