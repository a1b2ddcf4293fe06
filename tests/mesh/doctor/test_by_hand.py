"""What an operator is told to run, by how the mesh was started."""

import shlex
from pathlib import Path

from infra.topology import DEFAULT_FILE, load
from mesh.doctor.by_hand import of_demo, on_machines
from mesh.doctor.reach import Silence

DOWN = Silence("nats://127.0.0.1:4223", "nobody listens there", listens=False)
HANGS = Silence("nats://127.0.0.1:4223", "says nothing", listens=True)
CONFIG, LOGS, SERVER = Path("/a b/config"), Path("/a b/logs"), Path("/bin/nats-server")


def demo(**pids):
    names = {f"nats-{region}": pid for region, pid in pids.items()}
    return of_demo(CONFIG, LOGS, names, lambda: SERVER)


def test_a_server_of_the_demo_that_hangs_is_ended_and_one_that_is_down_started():
    assert demo(eu=41)("eu", HANGS).command == "kill -KILL 41"
    down = demo(eu=41)("eu", DOWN)
    assert shlex.split(down.command) == ["/bin/nats-server", "-c", "/a b/config/eu/nats.conf"]
    assert "/a b/logs/nats-eu.log says why" in down.what


def test_a_process_that_nobody_knows_is_not_killed():
    assert "kill" not in demo(us=41)("eu", HANGS).command


def test_on_a_machine_it_is_the_unit_on_its_host():
    by_hand = on_machines(load(DEFAULT_FILE))
    for silence in (DOWN, HANGS):
        remedy = by_hand("eu", silence)
        assert "systemctl restart mesh-nats@eu" in remedy.command and "127.0.0.1" in remedy.what
    assert "hangs or is stopped" in remedy.what
