"""docs/install.md on a real systemd: its blocks as written, and what the units do about failures.

`make test-systemd` runs it, as root on Debian or Ubuntu with mmdebstrap and systemd-container.
"""

import json
import re
import time
from collections.abc import Iterator

import pytest

from tests.booted.machine import ROOT, Machine, booted_machine, wait_until

pytestmark = [pytest.mark.booted, pytest.mark.timeout(600)]

MESH_TOML = """
[mesh]
name = "test"
[regions.us]
http = "127.0.0.1:8101"
nats = "127.0.0.1:4101"
leaf = "127.0.0.1:4201"
replicas = 1
routers = ["r1"]
"""
UNITS = ("mesh-nats@us", "mesh-router@r1", "mesh-agent@us-0")
KEY = "sk-of-the-engine"
BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}


def blocks() -> dict[str, str]:
    """The `sh` blocks of docs/install.md, by their first line."""
    text = (ROOT / "docs" / "install.md").read_text()
    found = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return {block.splitlines()[0]: block for block in found}


def block(begins: str) -> str:
    [found] = [text for first, text in blocks().items() if first.startswith(begins)]
    return found


def ask(tokens: int) -> str:
    """A curl of one streamed answer."""
    body = json.dumps({**BODY, "max_tokens": tokens})
    url = "http://127.0.0.1:8101/v1/chat/completions"
    return f"curl -sSN --fail-with-body {url} -H 'content-type: application/json' -d '{body}'"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Installed as docs/install.md says, with a simulated engine where it has vLLM's."""
    with booted_machine(tmp_path_factory.mktemp("booted")) as machine:
        machine.run(f"cat > mesh.toml <<'END'\n{MESH_TOML}END")
        began = time.monotonic()
        machine.run(block("python3 -m venv"))
        machine.run(block("mesh infra nats"))
        engine = "/opt/mesh/bin/mesh-agent engine-sim --port 8000 --model m --metrics vllm"
        machine.run(f"systemd-run --quiet --unit=engine {engine}")
        machine.run(block("# the region's server"))
        print(f"installed and started in {time.monotonic() - began:.1f} s")
        machine.run(f"echo MESH_ENGINE_KEY={KEY} >> /etc/mesh/agents/us-0.env")
        machine.run("systemctl restart mesh-agent@us-0")
        serves(machine)
        yield machine


def serves(machine: Machine) -> float:
    """Wait until an answer comes whole; seconds."""
    return wait_until(lambda: "[DONE]" in machine.result(ask(2)).stdout, journal(machine))


def journal(machine: Machine) -> str:
    return machine.run("journalctl --no-pager --lines=60 --output=cat")


def status(machine: Machine, unit: str) -> str:
    return machine.property(unit, "StatusText")


def restarted(machine: Machine, unit: str, old: str) -> bool:
    now = machine.property(unit, "MainPID")
    return now not in ("0", old) and machine.property(unit, "ActiveState") == "active"


def test_units_are_up_and_say_what_they_do(machine: Machine):
    for unit in UNITS:
        assert machine.run(f"systemctl is-active {unit}") == "active\n"
        assert machine.run(f"systemctl is-enabled {unit}") == "enabled\n"
    idle = "1 of 1 replicas ready, 0 requests open"
    wait_until(lambda: status(machine, UNITS[1]) == idle, "router's status")
    wait_until(lambda: status(machine, UNITS[2]).startswith("ready"), "agent's status")
    shown = machine.run(f"systemctl status --no-pager {UNITS[1]} {UNITS[2]}")
    print(shown)
    assert f'Status: "{idle}"' in shown
    assert 'Status: "ready' in shown


def test_no_password_and_no_key_is_in_an_environment(machine: Machine):
    for unit in UNITS[1:]:
        pid = machine.property(unit, "MainPID")
        environment = machine.run(f"tr '\\0' '\\n' < /proc/{pid}/environ")
        assert "CREDENTIALS_DIRECTORY=" in environment
        assert KEY not in environment
        assert "NATS_PASSWORD" not in environment and "MESH_PREFIX_KEY" not in environment


def test_a_memory_limit_is_in_force(machine: Machine):
    for unit in UNITS:
        assert int(machine.property(unit, "MemoryMax")) >= 4 << 30


@pytest.mark.parametrize("unit", UNITS)
def test_a_killed_process_is_back(machine: Machine, unit: str):
    old = machine.property(unit, "MainPID")
    machine.run(f"kill -KILL {old}")
    wait_until(lambda: restarted(machine, unit, old), f"{unit} restarted")
    print(f"{unit} was killed; an answer came after {serves(machine):.1f} s more")


@pytest.mark.parametrize("unit", UNITS[1:])
def test_a_process_that_stands_still_is_restarted(machine: Machine, unit: str):
    old = machine.property(unit, "MainPID")
    machine.run(f"kill -STOP {old}")
    took_s = wait_until(lambda: restarted(machine, unit, old), f"{unit} restarted")
    print(f"{unit} stood still and was restarted after {took_s:.1f} s")
    assert "Watchdog timeout" in journal(machine)
    serves(machine)


def test_a_stop_lets_an_open_stream_end(machine: Machine):
    begun = "grep -q data: /tmp/stream && pgrep curl"
    draining = "this router is shutting down; 1 of 1 replicas ready, 1 requests open"
    with machine.begin(f"{ask(800)} > /tmp/stream") as stream:
        wait_until(lambda: machine.result(begun).returncode == 0, "a stream")
        with machine.begin(f"systemctl stop {UNITS[1]}") as stopping:
            wait_until(lambda: status(machine, UNITS[1]) == draining, "the status of a drain")
            assert "data: [DONE]" not in machine.run("cat /tmp/stream")
            assert (stream.wait(60), stopping.wait(60)) == (0, 0)
    said = machine.run("cat /tmp/stream")
    assert said.rstrip().endswith("data: [DONE]"), said[-500:]
    assert machine.property(UNITS[1], "Result") == "success"
    machine.run(f"systemctl start {UNITS[1]}")
    serves(machine)


def test_a_worker_that_stands_still_is_restarted_alone(machine: Machine):
    more = 'workers = 2\\nmetrics = "127.0.0.1:9101"'
    machine.run(f"sed 's/^routers.*/&\\n{more}/' mesh.toml > /etc/mesh/mesh.toml")
    machine.run(f"systemctl restart {UNITS[1]}")
    two = "r1-1: 1 of 1 replicas ready"
    wait_until(lambda: two in status(machine, UNITS[1]), "two workers")
    main = machine.property(UNITS[1], "MainPID")
    first, second = machine.run(f"pgrep --parent {main}").split()
    machine.run(f"kill -STOP {second}")
    wait_until(lambda: second not in machine.run(f"pgrep --parent {main}").split(), "its end")
    wait_until(lambda: len(machine.run(f"pgrep --parent {main}").split()) == 2, "another one")
    assert machine.run(f"pgrep --parent {main}").split()[0] == first
    assert machine.property(UNITS[1], "MainPID") == main
    assert "worker r1-1 hangs: it reported nothing" in journal(machine)
    machine.run("cp mesh.toml /etc/mesh/mesh.toml")
    machine.run(f"systemctl restart {UNITS[1]}")
    serves(machine)


def test_the_drop_ins_of_the_page_work(machine: Machine):
    """One records a router's decisions, the other gives an engine's key in a file of its own."""
    text = (ROOT / "docs" / "install.md").read_text()
    found = re.findall(r"^```ini\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    key, recording = sorted(found, key=lambda drop_in: "--record" in drop_in)
    machine.run(f"install -d -m 700 /etc/mesh/engine-keys; echo {KEY} > /etc/mesh/engine-keys/us-0")
    for unit, drop_in in ((UNITS[1], recording), (UNITS[2], key)):
        machine.run(f"install -d /etc/systemd/system/{unit}.service.d")
        machine.run(f"cat > /etc/systemd/system/{unit}.service.d/page.conf <<'END'\n{drop_in}END")
        machine.run(f"systemctl daemon-reload; systemctl restart {unit}")
    serves(machine)
    assert machine.run("stat --format='%a %U %s' /var/lib/mesh/r1.jsonl").startswith("600 mesh ")
    pid = machine.property(UNITS[2], "MainPID")
    assert "MESH_ENGINE_KEY_FILE=/run/cred" in machine.run(f"tr '\\0' '\\n' < /proc/{pid}/environ")
    machine.run("rm -r /etc/systemd/system/mesh-*@*.service.d; systemctl daemon-reload")
    machine.run(f"systemctl restart {UNITS[1]} {UNITS[2]}")
    serves(machine)


def test_processes_run_by_hand_as_written(machine: Machine):
    machine.run(f"systemctl stop {UNITS[1]} {UNITS[2]}")
    router, agent = block("mesh router ").replace("\\\n", " ").splitlines()
    with (
        machine.begin(f"timeout 15 {router}") as one,
        machine.begin(f"MESH_ENGINE_KEY={KEY} timeout 15 {agent}") as other,
    ):
        serves(machine)
        for process in (one, other):
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 124, said
    machine.run(f"systemctl start {UNITS[1]} {UNITS[2]}")
    serves(machine)


def test_an_agent_without_its_engine_serves_and_says_so(machine: Machine):
    machine.run("systemctl stop engine")
    machine.run(f"systemctl restart {UNITS[2]}")  # returns: it is ready, its engine is not
    wait_until(
        lambda: "can't" in status(machine, UNITS[2]) or "refused" in status(machine, UNITS[2]),
        "why the engine does not answer",
    )
    none = "no replica of any region is ready; 0 of 1 replicas ready"
    wait_until(lambda: none in status(machine, UNITS[1]), "router's status")


def test_every_block_of_the_installation_was_run():
    section = (ROOT / "docs" / "install.md").read_text().split("\n## 3. Install")[1]
    section = section.split("To try a process by hand")[0]
    assert section.count("```sh\n") == 2
