"""Ports of tests: each process of a run has its own, in turn, and taken ones are passed over."""

import itertools
import socket

import pytest

from tests.support.ports import PORTS, Stretch, free_ports, free_row, stretch


def test_the_processes_of_a_run_share_no_port():
    stretches = [stretch(f"gw{number}", 4) for number in range(4)]
    for one, other in itertools.combinations(stretches, 2):
        assert not set(one) & set(other)
    assert all(set(own) <= set(PORTS) for own in stretches)
    assert stretch(None, 1) == PORTS


def test_no_port_is_given_twice_before_all_were():
    given = [*free_ports(20), *free_row(3), *free_ports(20)]
    assert len(set(given)) == 43


def test_a_taken_port_is_passed_over():
    [first, taken, *_] = free_row(4)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", taken))
        own = Stretch(range(first, first + 4), 0)
        assert list(own.row(2)) == [first + 2, first + 3]
        assert list(own.row(1)) == [first]  # from the start again


def test_a_stretch_without_room_says_so():
    [port] = free_ports(1)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        with pytest.raises(AssertionError, match="not 1 free ports in a row"):
            Stretch(range(port, port + 1), 0).row(1)
