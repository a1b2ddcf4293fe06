"""Sections 4 and 5 of docs/install.md on a real systemd: replicas, passwords, versions, a look."""

import re

import pytest

from tests.booted.installed import (
    AGENT,
    MESH_TOML,
    NATS,
    ROUTER,
    RUNNER,
    UNITS,
    an_open_stream,
    block,
    blocks,
    blocks_run,
    engine,
    journal,
    line,
    restarted,
    serves,
    status,
    write_mesh_toml,
)
from tests.booted.machine import Machine, wait_until

pytestmark = [pytest.mark.booted, pytest.mark.timeout(600)]

RELOADED = (NATS, ROUTER)
RENDER = block("mesh infra nats --config mesh.toml").strip()
CONFIGURE = line("install -D -o mesh")
# Section 5; the second one with `system.env`.
LOOK, LOOK_DEEPER = block("set -a; . rendered/us/credentials/observer"), block("nats server list")
NOT_RUN_HERE = {  # by their beginning
    "mesh router --credentials": "tests/booted/test_units.py, each line for itself",
    "mesh infra nats --config infra/k8s/mesh.toml": "needs a cluster: tests/infra/k8s",
    "set -a; . rendered/us/credentials/setup.env": "tests/tools/test_stream_backup.py",
}


def pids(machine: Machine) -> dict[str, str]:
    return {unit: machine.property(unit, "MainPID") for unit in UNITS}


def of_another_replica(text: str) -> str:
    return text.replace("us-0", "us-1").replace("8000", "8001")


def test_a_replica_is_added_and_removed_while_a_stream_goes_on(machine: Machine):
    before = pids(machine)
    agents = [line for line in block("# the region's server").splitlines() if "us-0" in line]
    with an_open_stream(machine, 1500):
        write_mesh_toml(machine, MESH_TOML.replace("replicas = 1", "replicas = 2"))
        machine.run(f"{RENDER}\n{CONFIGURE}\nsystemctl reload {NATS}")
        machine.run(engine(1))
        machine.run(of_another_replica("\n".join(agents)))
        wait_until(lambda: "2 of 2 replicas ready" in status(machine, ROUTER), journal(machine))

        write_mesh_toml(machine, MESH_TOML)
        machine.run(f"{RENDER}\n{CONFIGURE}\nsystemctl reload {NATS}")
        wait_until(lambda: "1 of 1 replicas ready" in status(machine, ROUTER), journal(machine))
    assert pids(machine) == before
    gone = "Authorization Violation|authorization|revoked|Authentication"
    wait_until(
        lambda: re.search(gone, machine.run("journalctl -o cat -u mesh-agent@us-1")), "cut off"
    )
    machine.run("systemctl disable --now mesh-agent@us-1; systemctl stop engine-1")
    serves(machine)


@pytest.mark.parametrize("unit", RELOADED)
def test_a_reload_keeps_the_process_and_its_streams(machine: Machine, unit: str):
    before = pids(machine)
    with an_open_stream(machine):
        machine.run(f"systemctl reload {unit}")
        assert pids(machine) == before
    serves(machine)


def test_passwords_are_rotated(machine: Machine):
    old = machine.run("cat rendered/us/credentials/agent-us-0.env")
    copies = [
        line
        for line in block("# the region's server").splitlines()
        if line.startswith("install -") and "rendered/" in line
    ]
    assert len(copies) == 4
    machine.run(f"{RENDER} --rotate")
    machine.run("\n".join(copies))
    machine.run(f"systemctl restart {NATS}\nsystemctl restart {ROUTER} {RUNNER} {AGENT}")
    serves(machine)
    assert machine.run("cat rendered/us/credentials/agent-us-0.env") != old
    machine.run(f"cat > /tmp/old.env <<'END'\n{old}END")
    agent = "mesh-agent run --replica us-0 --engine-url http://127.0.0.1:8000"
    refused = machine.result(f"timeout 60 {agent} --credentials /tmp/old.env")
    assert refused.returncode == 1, refused.stderr
    assert "refused user 'agent-us-0'" in refused.stderr


def test_a_newer_version_is_installed_and_each_process_restarted(machine: Machine):
    machine.run("rm -rf /srv/newer; cp -r . /srv/newer")
    machine.run("sed -i 's/^version = .*/version = \"99.1.0\"/' /srv/newer/pyproject.toml")
    with an_open_stream(machine):
        machine.run("/opt/mesh/bin/pip install --quiet /srv/newer")
    assert "99.1.0" in machine.run("mesh --version")
    before = pids(machine)
    for unit in (ROUTER, AGENT, RUNNER):
        with an_open_stream(machine):
            machine.run(f"systemctl restart {unit}")  # returns when the new process serves
        assert restarted(machine, unit, before[unit])
        serves(machine)
    machine.run(f"systemctl restart {NATS}")
    serves(machine)
    assert not set(pids(machine).values()) & set(before.values())


def test_the_fleet_can_be_looked_at(machine: Machine):
    listed = machine.run(LOOK)
    assert "mesh-agent (us-0)" in listed and "mesh-router" in listed
    system = "set -a; . rendered/us/credentials/system.env; set +a"
    shown = machine.run(f"{system}\n{LOOK_DEEPER}")
    assert "test-us" in shown


def test_every_block_of_the_page_was_run(machine: Machine):
    left = set(blocks()) - set(blocks_run(machine))
    assert {first for first in left if not first.startswith(tuple(NOT_RUN_HERE))} == set()
