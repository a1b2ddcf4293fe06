"""What `mesh drain` takes for idle, and what its record may hold."""

import getpass
import os

import pytest

from mesh.adapters.operator_orders import NumberedOrders
from mesh.cli import drain
from mesh.cli.drain import SILENT_S, Idleness
from schemas.control import TEXT_MAX, RegionControl, decode_control, encode_control, nothing_ordered
from schemas.state import Heartbeat, ReplicaState

DRAINING, READY = ReplicaState.DRAINING, ReplicaState.READY


def beat(name: str, state: ReplicaState = DRAINING, **counts: int) -> Heartbeat:
    required = {"region": "us", "replica": name, "epoch": 1, "seq": 1, "state": state}
    load = {"full": False, "pending": 0, "running": 0, "outstanding": 0}
    return Heartbeat(**required, engine="e", models=("tiny",), **(load | counts))


def test_a_replica_is_idle_when_it_drains_and_has_nothing_left():
    found = Idleness(["us-0"], 0.0)
    assert found.busy(0.1) == {"us-0": "no heartbeat yet"}
    found.receive(beat("us-0", READY), 0.2)
    assert found.busy(0.3) == {"us-0": "not yet draining"}
    found.receive(beat("us-0", outstanding=2, offline_waiting=1, offline_running=1), 0.4)
    found.receive(beat("us-1", outstanding=7), 0.4)
    assert found.busy(0.5) == {"us-0": "4 requests to finish"}
    found.receive(beat("us-0"), 0.6)
    assert (found.busy(0.7), found.silent(0.7)) == ({}, ())


@pytest.mark.parametrize("last", [None, beat("us-0", outstanding=3), beat("us-0", READY)])
def test_a_replica_that_falls_silent_is_not_waited_for_and_is_named(last):
    found = Idleness(["us-0"], 0.0)
    if last is not None:
        found.receive(last, 0.0)
    assert "us-0" in found.busy(SILENT_S)
    later = SILENT_S + 0.1
    assert (found.busy(later), found.silent(later)) == ({}, ("us-0",))


def test_while_the_bus_is_away_nobody_is_silent():
    found = Idleness(["us-0"], 0.0)
    found.receive(beat("us-0", outstanding=3), 0.0)
    found.cut_off(60.0)
    assert found.busy(60.0 + SILENT_S) == {"us-0": "3 requests to finish"}


def test_a_record_is_shown_on_one_line_whatever_it_holds():
    orders = RegionControl(region="us", by="a\x1b[2J", reason="b\nus 9", at_unix_s=1e300)
    line = drain._line("us", NumberedOrders(1, orders))
    assert line.isprintable()
    assert "a\\x1b[2J" in line


def test_a_reason_that_is_no_text_and_a_user_without_a_name_are_written(monkeypatch):
    def nobody():
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nobody)
    orders = drain.signed(nothing_ordered("us"), "drain region us", "caf\udce9" + "x" * TEXT_MAX)
    assert decode_control(encode_control(orders)) == orders
    assert orders.by.startswith(f"uid {os.getuid()}@")
    assert orders.reason.startswith("caf\\udce9x")
