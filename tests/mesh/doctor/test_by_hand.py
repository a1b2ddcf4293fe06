"""What an operator is told to run, by how the mesh was started."""

import shlex
from pathlib import Path

from infra.topology import DEFAULT_FILE, load
from mesh.doctor.by_hand import OfDemo, OnMachines
from mesh.doctor.reach import Silence

DOWN = Silence("nats://127.0.0.1:4223", "nobody listens there", listens=False)
HANGS = Silence("nats://127.0.0.1:4223", "says nothing", listens=True)
CONFIG, LOGS, SERVER = Path("/a b/config"), Path("/a b/logs"), Path("/bin/nats-server")


def demo(**pids):
    names = {name.replace("_", "-"): pid for name, pid in pids.items()}
    return OfDemo(Path("/a b/mesh.toml"), CONFIG, LOGS, names, lambda: SERVER)


def test_a_server_of_the_demo_that_hangs_is_ended_and_one_that_is_down_started():
    for silence in (HANGS, DOWN):  # a server that has just begun to hang may refuse as well
        assert demo(nats_eu=41).server("eu", silence).command == "kill -KILL 41"
    down = demo(nats_us=41).server("eu", DOWN)
    assert shlex.split(down.command) == ["/bin/nats-server", "-c", "/a b/config/eu/nats.conf"]
    assert "/a b/logs/nats-eu.log says why" in down.what


def test_whom_nobody_knows_is_looked_at_before_it_is_ended_and_nothing_started_beside_it():
    remedy = demo(nats_us=41).server("eu", HANGS)
    assert shlex.split(remedy.command) == ["ss", "-Hltnp", "sport = :4223"]


def test_a_router_and_an_agent_of_the_demo_that_hang_are_ended():
    both = demo(router_eu_r1=42, agent_eu_0=43)
    assert both.part("router", "eu", "r1").command == "kill -KILL 42"
    assert both.part("agent", "eu", "eu-0").command == "kill -KILL 43"


def test_of_those_that_have_ended_the_last_words_are_shown():
    for kind, name, program in (("router", "r1", "router-eu-r1"), ("agent", "eu-0", "agent-eu-0")):
        remedy = demo().part(kind, "eu", name)
        assert shlex.split(remedy.command) == ["tail", "-n", "30", f"/a b/logs/{program}.log"]
        assert remedy.what.startswith(f"{program} is down")


def test_on_a_machine_it_is_the_unit_on_its_host():
    by_hand = OnMachines(load(DEFAULT_FILE), Path("mesh.toml"), Path("rendered"))
    for silence in (DOWN, HANGS):
        remedy = by_hand.server("eu", silence)
        assert "systemctl restart mesh-nats@eu" in remedy.command and "127.0.0.1" in remedy.what
    assert "hangs or is stopped" in remedy.what
    assert "systemctl restart mesh-router@r1" in by_hand.part("router", "eu", "r1").command
    assert "systemctl restart mesh-agent@eu-0" in by_hand.part("agent", "eu", "eu-0").command


def test_a_stream_is_made_as_it_should_be_by_the_setup_user():
    here = demo().stream("eu", "LEASES").command
    there = OnMachines(load(DEFAULT_FILE), Path("mesh.toml"), Path("rendered")).stream("eu", "X")
    command = "mesh infra streams --config mesh.toml --credentials rendered --region eu"
    assert there.command == command
    told = ["--config", "/a b/mesh.toml", "--credentials", "/a b/config", "--region", "eu"]
    assert shlex.split(here) == ["mesh", "infra", "streams", *told]
