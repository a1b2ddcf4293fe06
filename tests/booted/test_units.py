"""docs/install.md on a real systemd: what the units do about failures and stops.

`make test-systemd` runs it, as root on Debian or Ubuntu with mmdebstrap and systemd-container.
"""

import re

import pytest

from tests.booted.installed import (
    AGENT,
    KEY,
    ROUTER,
    UNITS,
    an_open_stream,
    block,
    drop_ins,
    journal,
    restarted,
    serves,
    status,
    taken,
)
from tests.booted.machine import Machine, wait_until

pytestmark = [pytest.mark.booted, pytest.mark.timeout(600)]


def test_units_are_up_and_say_what_they_do(machine: Machine):
    for unit in UNITS:
        assert machine.run(f"systemctl is-active {unit}") == "active\n"
        assert machine.run(f"systemctl is-enabled {unit}") == "enabled\n"
    idle = "1 of 1 replicas ready, 0 requests open"
    wait_until(lambda: status(machine, ROUTER) == idle, "router's status")
    wait_until(lambda: status(machine, AGENT).startswith("ready"), "agent's status")
    shown = machine.run(f"systemctl status --no-pager {ROUTER} {AGENT}")
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
    """As systemd has it: the container has no memory controller that would act on it."""
    for unit in UNITS:
        assert int(machine.property(unit, "MemoryMax")) >= 4 << 30


def test_an_agents_metrics_are_where_its_log_says(machine: Machine):
    log = machine.run(f"journalctl --no-pager --output=cat --unit={AGENT}")
    url = re.findall(r"metrics at (http://127\.0\.0\.1:97\d\d/metrics)", log)[-1]
    page = machine.run(f"curl -sS --fail {url}")
    assert 'replica="us-0"' in page and "process_resident_memory_bytes" in page


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


@pytest.mark.parametrize(
    ("unit", "draining"),
    [
        (ROUTER, "this router is shutting down; 1 of 1 replicas ready, 1 requests open"),
        (AGENT, "draining: m; 1 requests under way"),
    ],
)
def test_a_stop_lets_an_open_stream_end(machine: Machine, unit: str, draining: str):
    with an_open_stream(machine), machine.begin(f"systemctl stop {unit}") as stopping:
        wait_until(lambda: status(machine, unit) == draining, "the status of a drain")
        assert not taken(machine)
        assert stopping.wait(60) == 0
    assert machine.property(unit, "Result") == "success"
    machine.run(f"systemctl start {unit}")
    serves(machine)


def test_a_worker_that_stands_still_is_restarted_alone(machine: Machine):
    more = 'workers = 2\\nmetrics = "127.0.0.1:9101"'
    machine.run(f"sed 's/^routers.*/&\\n{more}/' mesh.toml > /etc/mesh/mesh.toml")
    machine.run(f"systemctl restart {ROUTER}")
    two = "r1-1: 1 of 1 replicas ready"
    wait_until(lambda: two in status(machine, ROUTER), "two workers")
    main = machine.property(ROUTER, "MainPID")
    first, second = machine.run(f"pgrep --parent {main}").split()
    machine.run(f"kill -STOP {second}")
    wait_until(lambda: second not in machine.run(f"pgrep --parent {main}").split(), "its end")
    wait_until(lambda: len(machine.run(f"pgrep --parent {main}").split()) == 2, "another one")
    assert machine.run(f"pgrep --parent {main}").split()[0] == first
    assert machine.property(ROUTER, "MainPID") == main
    assert "worker r1-1 hangs: it reported nothing" in journal(machine)
    machine.run("cp mesh.toml /etc/mesh/mesh.toml")
    machine.run(f"systemctl restart {ROUTER}")
    serves(machine)


def test_the_drop_ins_of_the_page_work(machine: Machine):
    """They give an engine's key in a file of its own, give a router's console its credentials, and
    record a router's decisions."""
    key, console, recording = drop_ins()
    kept, key_file = "/etc/mesh/credentials", "/etc/mesh/credentials/console.key"
    machine.run(f"install -m 600 rendered/us/credentials/{{observer,admin}}.env {kept}")
    machine.run(f"head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' > {key_file}")
    there = 'console = "127.0.0.1:8191"'
    machine.run(f"sed 's/^routers.*/&\\n{there}/' mesh.toml > /etc/mesh/mesh.toml")
    machine.run(f"install -d -m 700 /etc/mesh/engine-keys; echo {KEY} > /etc/mesh/engine-keys/us-0")
    for unit, name, drop_in in (
        (ROUTER, "recording", recording),
        (ROUTER, "console", console),
        (AGENT, "key", key),
    ):
        machine.run(f"install -d /etc/systemd/system/{unit}.service.d")
        file = f"/etc/systemd/system/{unit}.service.d/{name}.conf"
        machine.run(f"cat > {file} <<'END'\n{drop_in}END")
    machine.run(f"systemctl daemon-reload; systemctl restart {ROUTER} {AGENT}")
    serves(machine)
    assert "<title>" in machine.run("curl -sS --fail-with-body http://127.0.0.1:8191/")
    bearer = f'-H "authorization: Bearer $(cat {key_file})"'
    machine.run(f"curl -sS --fail-with-body -X POST {bearer} http://127.0.0.1:8191/api/key")
    assert machine.run("stat --format='%a %U %s' /var/lib/mesh/r1.jsonl").startswith("600 mesh ")
    pid = machine.property(AGENT, "MainPID")
    assert "MESH_ENGINE_KEY_FILE=/run/cred" in machine.run(f"tr '\\0' '\\n' < /proc/{pid}/environ")
    machine.run("rm -r /etc/systemd/system/mesh-*@*.service.d; systemctl daemon-reload")
    machine.run("cp mesh.toml /etc/mesh/mesh.toml")
    machine.run(f"systemctl restart {ROUTER} {AGENT}")
    serves(machine)


def test_processes_run_by_hand_as_written(machine: Machine):
    machine.run(f"systemctl stop {ROUTER} {AGENT}")
    router, agent = block("mesh router ").replace("\\\n", " ").splitlines()
    with (
        machine.begin(f"timeout 40 {router}") as one,
        machine.begin(f"MESH_ENGINE_KEY={KEY} timeout 40 {agent}") as other,
    ):
        serves(machine)
        for process in (one, other):
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 124, said
    machine.run(f"systemctl start {ROUTER} {AGENT}")
    serves(machine)


def test_an_agent_without_its_engine_serves_and_says_so(machine: Machine):
    machine.run("systemctl stop engine-0")
    machine.run(f"systemctl restart {AGENT}")  # returns: it is ready, its engine is not
    wait_until(
        lambda: "can't" in status(machine, AGENT) or "refused" in status(machine, AGENT),
        "why the engine does not answer",
    )
    none = "no replica of any region is ready; 0 of 1 replicas ready"
    wait_until(lambda: none in status(machine, ROUTER), "router's status")
