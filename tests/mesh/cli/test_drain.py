"""What `mesh drain` takes for idle, and what its record may hold."""

import getpass
import os

import pytest
from click.testing import CliRunner

from mesh.adapters.operator_orders import DrainTarget
from mesh.adapters.region_records import Numbered
from mesh.cli import drain
from mesh.cli.drain import FOLLOWED_S, SILENT_S, Idleness
from mesh.cli.main import main
from mesh.cli.unusable import Unusable
from mesh.runtime.mesh_file import load_mesh
from schemas.control import TEXT_MAX, RegionControl, decode_control, encode_control, nothing_ordered
from schemas.explain import RoutingInForce
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


def test_an_order_that_a_replica_never_hears_of_is_not_waited_for_for_ever():
    found = Idleness(["us-0", "us-1"], 0.0)
    found.receive(beat("us-0", READY), FOLLOWED_S)
    found.receive(beat("us-1", outstanding=1), FOLLOWED_S)
    assert found.unfollowed(FOLLOWED_S) == (), "us-1 has something to finish"
    found.receive(beat("us-1"), FOLLOWED_S)
    assert found.unfollowed(FOLLOWED_S - 0.1) == ()
    assert found.unfollowed(FOLLOWED_S) == ("us-0",)
    found.receive(beat("us-0"), FOLLOWED_S)
    assert found.unfollowed(FOLLOWED_S) == ()


def test_while_the_bus_is_away_nobody_is_silent():
    found = Idleness(["us-0"], 0.0)
    found.receive(beat("us-0", outstanding=3), 0.0)
    found.cut_off(60.0)
    assert found.busy(60.0 + SILENT_S) == {"us-0": "3 requests to finish"}


def test_orders_are_lost_only_where_no_router_reads_a_record():
    old, new = (RoutingInForce(orders=number, orders_lost=True) for number in (3, 5))
    started_since, reads = RoutingInForce(orders=0), RoutingInForce(orders=1)
    assert drain.last_kept([old, new, started_since]) == new
    assert drain.last_kept([new, reads]) is None
    assert drain.last_kept([started_since]) is None and drain.last_kept([]) is None


def test_a_record_is_shown_on_one_line_whatever_it_holds():
    orders = RegionControl(region="us", by="a\x1b[2J", reason="b\nus 9", at_unix_s=1e300)
    cells = drain._cells("us", Numbered(1, orders))
    assert all(cell.isprintable() for cell in cells)
    assert "a\\x1b[2J" in cells


def test_a_reason_that_is_no_text_and_a_user_without_a_name_are_written(monkeypatch):
    def nobody():
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nobody)
    orders = drain.signed(nothing_ordered("us"), "drain region us", "caf\udce9" + "x" * TEXT_MAX)
    assert decode_control(encode_control(orders)) == orders
    assert orders.by.startswith(f"uid {os.getuid()}@")
    assert orders.reason.startswith("caf\\udce9x")


def test_an_undrain_ends_what_a_drain_has_moved():
    one, two = DrainTarget("us", ("us-0",)), DrainTarget("us", ("us-1",))
    orders = two.drained(one.drained(nothing_ordered("us"), move=True))
    assert (orders.drained, orders.moved) == (("us-0", "us-1"), ("us-0",))
    assert one.drained(orders).moved == ("us-0",), "to drain it again takes nothing back"
    assert one.undrained(orders).moved == ()
    whole = DrainTarget("us", None)
    orders = whole.drained(orders, move=True)
    assert orders.all_moved and decode_control(encode_control(orders)) == orders
    assert whole.undrained(orders) == nothing_ordered("us")


MESH = """
[mesh]
name = "m"
[regions.us]
http = "127.0.0.1:8101"
nats = "127.0.0.1:4101"
leaf = "127.0.0.1:4201"
replicas = ["a", "b", "c"]
[regions.eu]
http = "127.0.0.1:8102"
nats = "127.0.0.1:4102"
leaf = "127.0.0.1:4202"
replicas = ["c", "d"]
[[links]]
between = ["us", "eu"]
rtt_ms = 80
"""


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a"], [("us", ("a",))]),
        (["b", "us/c", "b", "a"], [("us", ("b", "c", "a"))]),
        (["d", "a", "eu/c"], [("eu", ("d", "c")), ("us", ("a",))]),
        (["a", "us", "b"], [("us", None)]),
        (["us", "eu"], [("us", None), ("eu", None)]),
    ],
)
def test_names_are_grouped_by_region(tmp_path, names, expected):
    file = tmp_path / "mesh.toml"
    file.write_text(MESH)
    found = drain._find(load_mesh(file), names)
    assert [(one.region, one.replicas) for one in found] == expected


@pytest.mark.parametrize(
    ("names", "why"), [(["a", "c"], "name one of us/c, eu/c"), (["us/d"], "no replica 'us/d'")]
)
def test_an_unclear_name_orders_nothing(tmp_path, names, why):
    file = tmp_path / "mesh.toml"
    file.write_text(MESH)
    with pytest.raises(Unusable, match=why):
        drain._find(load_mesh(file), names)


def test_only_the_named_replicas_are_undrained():
    orders = RegionControl(region="us", drained=("a", "b", "c"))
    assert DrainTarget("us", ("a", "c")).undrained(orders).drained == ("b",)
    assert DrainTarget("us", ("d", "a")).drained(orders).drained == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("replicas", "drained", "all_drained", "lines"),
    [
        (("a",), ("a", "b"), False, ["replica a: work is sent there again"]),
        (("a",), ("b",), False, ["replica a: not drained, nothing changes"]),
        (
            ("a", "b", "c"), ("b",), False,
            ["replica b: work is sent there again", "replicas a, c: not drained, nothing changes"],
        ),
        (None, (), True, ["region us: work is sent there again"]),
        (None, ("a",), False, ["region us: work is sent there again"]),
        (None, (), False, ["region us: not drained, nothing changes"]),
    ],
)  # fmt: skip
def test_an_undrain_of_what_was_not_drained_says_so(replicas, drained, all_drained, lines):
    before = RegionControl(region="us", drained=drained, all_drained=all_drained)
    assert list(drain._undrained(DrainTarget("us", replicas), before)) == lines


@pytest.mark.parametrize("command", ["doctor", "drain", "explain", "top"])
def test_commands_that_ask_a_mesh_refuse_a_mesh_toml_as_a_router_does(tmp_path, command):
    """With a policy that this version has not."""
    file = tmp_path / "mesh.toml"
    file.write_text(MESH + '[routing]\npolicy = "fastest"\n')
    arguments = {"drain": ["us"], "explain": ["r"], "top": ["--once"]}.get(command, [])
    result = CliRunner().invoke(main, [command, *arguments, "--config", str(file)])
    assert result.exit_code == 2
    assert "routing.policy: " in result.output and "fastest" in result.output
