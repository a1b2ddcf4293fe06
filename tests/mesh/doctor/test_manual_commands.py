"""What an operator is told to run, by how the mesh was started."""

import shlex
from pathlib import Path

from infra.topology import DEFAULT_FILE, load
from mesh.doctor.connectivity import ServerUnreachable
from mesh.doctor.manual_commands import DemoCommands, SystemdCommands

DOWN = ServerUnreachable("nats://127.0.0.1:4223", "nobody listens there", listens=False)
HANGS = ServerUnreachable("nats://127.0.0.1:4223", "says nothing", listens=True)
CONFIG, LOGS, SERVER = Path("/a b/config"), Path("/a b/logs"), Path("/bin/nats-server")


def demo(**pids):
    names = {name.replace("_", "-"): pid for name, pid in pids.items()}
    return DemoCommands(Path("/a b/mesh.toml"), CONFIG, LOGS, names, lambda: SERVER)


def test_a_server_of_the_demo_that_hangs_is_ended_and_one_that_is_down_started():
    for silence in (HANGS, DOWN):  # a server that has just begun to hang may refuse as well
        assert demo(nats_eu=41).server("eu", silence).command == "kill -KILL 41"
    down = demo(nats_us=41).server("eu", DOWN)
    assert shlex.split(down.command) == ["/bin/nats-server", "-c", "/a b/config/eu/nats.conf"]
    assert "/a b/logs/nats-eu.log says why" in down.what


def test_an_unknown_process_on_the_port_is_identified_first():
    remedy = demo(nats_us=41).server("eu", HANGS)
    assert shlex.split(remedy.command) == ["ss", "-Hltnp", "sport = :4223"]


def test_a_router_and_an_agent_of_the_demo_that_hang_are_ended():
    both = demo(router_eu_r1=42, agent_eu_0=43)
    router = both.program("router", "eu", "r1")
    assert router.command == "kill -KILL 42"
    assert "unless this machine is short of CPU, kill it" in router.what
    assert both.program("agent", "eu", "eu-0").command == "kill -KILL 43"
    runner = demo(batch_runner_eu_batch_0=44).program("batch-runner", "eu", "batch-0")
    assert runner.command == "kill -KILL 44"


def test_an_engine_that_is_down_is_ended_or_its_agents_log_is_shown():
    assert demo(engine_eu_0=44).engine("eu-0").command == "kill -KILL 44"
    ended = demo(engine_eu_1=44).engine("eu-0")
    assert shlex.split(ended.command) == ["tail", "-n", "30", "/a b/logs/agent-eu-0.log"]
    assert "`mesh up` restarts it" in ended.what and "as you start it" not in ended.what
    given = DemoCommands(DEFAULT_FILE, CONFIG, LOGS, {}, lambda: SERVER, engines_given=True)
    yours = given.engine("eu-0")
    assert yours.command == ended.command
    assert "restart it as you start it" in yours.what and "`mesh up`" not in yours.what
    there = SystemdCommands(load(DEFAULT_FILE), Path("mesh.toml"), Path("rendered")).engine("eu-0")
    for remedy in (yours, there):  # of an engine that loads its model, too
        assert "unless it loads its model or was put to sleep, restart it" in remedy.what
    assert there.command == "journalctl -n 30 -u mesh-agent@eu-0"


def test_only_an_engine_that_fails_is_to_be_restarted():
    there = SystemdCommands(load(DEFAULT_FILE), Path("mesh.toml"), Path("rendered"))
    for commands in (demo(), demo(engine_eu_0=44), there):
        for detail in (
            "failing: 3 of its last 3, HTTP 500",
            "fails: its last 3 requests, HTTP 500",
        ):
            assert "and restart it" in commands.engine_results("eu-0", detail).what
        for detail in ("slow: tokens 7.0× its like", "late: 1 of its last 1, nothing in 1.2 s"):
            what = commands.engine_results("eu-0", detail).what
            assert "and restart it" not in what
        assert "--batch-max 1 (mesh up: batch-max=1)" in what


def test_of_ended_programs_the_end_of_the_log_is_shown():
    for kind, name, program in (("router", "r1", "router-eu-r1"), ("agent", "eu-0", "agent-eu-0")):
        remedy = demo().program(kind, "eu", name)
        assert shlex.split(remedy.command) == ["tail", "-n", "30", f"/a b/logs/{program}.log"]
        assert remedy.what.startswith(f"{program} is down")


def test_with_systemd_the_unit_on_its_host_is_restarted():
    commands = SystemdCommands(load(DEFAULT_FILE), Path("mesh.toml"), Path("rendered"))
    for silence in (DOWN, HANGS):
        remedy = commands.server("eu", silence)
        assert "systemctl restart mesh-nats@eu" in remedy.command and "127.0.0.1" in remedy.what
    assert "hangs or is stopped" in remedy.what
    assert "systemctl restart mesh-router@r1" in commands.program("router", "eu", "r1").command
    assert "systemctl restart mesh-agent@eu-0" in commands.program("agent", "eu", "eu-0").command


def test_a_stream_is_repaired_by_the_setup_user():
    here = demo().stream("eu").command
    there = SystemdCommands(load(DEFAULT_FILE), Path("mesh.toml"), Path("rendered")).stream("eu")
    command = "mesh infra streams --config mesh.toml --credentials rendered --region eu"
    assert there.command == command
    told = ["--config", "/a b/mesh.toml", "--credentials", "/a b/config", "--region", "eu"]
    assert shlex.split(here) == ["mesh", "infra", "streams", *told]
