import contextlib
import socket
from pathlib import Path

from infra import topology
from mesh.demo import options
from mesh.demo.options import DemoOptions, FreeAddresses, fitted, port_problems

FREE = FreeAddresses()


def one_region(http: str) -> topology.Topology:
    return topology.parse(
        f"""
        [mesh]
        name = "test"
        [regions.us]
        http = "{http}"
        nats = "{FREE.first("127.0.0.1")}"
        leaf = "{FREE.first("127.0.0.1")}"
        replicas = 1
        """,
        "test",
    )


def test_free_ports_are_no_problem():
    assert port_problems(one_region(str(FREE.first("127.0.0.1")))) == []


def test_a_taken_port_is_named_with_its_key():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lines = port_problems(one_region(f"127.0.0.1:{port}"))
    assert lines == [
        f"regions.us.http: 127.0.0.1:{port} is taken; end what listens there, or give another port"
    ]


def test_an_address_of_another_machine_is_named():
    (line,) = port_problems(one_region("203.0.113.7:8101"))
    assert line.startswith("regions.us.http: 203.0.113.7:8101 can't be listened on")


def test_a_row_of_ports_is_free_and_no_outgoing_connection_takes_one():
    first = FreeAddresses().first("127.0.0.1", 3)
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert first.port + 2 < int(ephemeral[0])
    with contextlib.ExitStack() as held:
        for port in range(first.port, first.port + 3):
            held.enter_context(socket.create_server((first.host, port)))


def test_no_address_is_given_twice(monkeypatch):
    monkeypatch.setattr(options, "FREE_PORTS", range(10_000, 10_040))
    free = FreeAddresses()
    rows = [free.first("127.0.0.2", 3).port for _ in range(5)]
    ports = {port + number for port in rows for number in range(3)}
    assert len(ports) == 15


def test_a_mesh_has_as_many_nats_servers_as_the_option_says():
    """Those of the file keep their addresses; no two of the others have the same."""
    mesh = topology.load(topology.DEFAULT_FILE)
    there = Path("mesh.toml")
    three = fitted(mesh, DemoOptions(config=there, state=there, bus_servers=3))
    assert len({*three.addresses()}) == len(three.addresses()) == len(mesh.addresses()) + 3 * 7
    for name, region in three.regions.items():
        assert [each.suffix for each in region.servers] == ["-1", "-2", "-3"]
        assert region.servers[0].nats == mesh.regions[name].servers[0].nats
    assert fitted(three, DemoOptions(config=there, state=there, bus_servers=1)) == mesh
    assert fitted(three, DemoOptions(config=there, state=there, bus_servers=3)) == three
