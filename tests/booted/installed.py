"""docs/install.md done on a booted machine, with a simulated engine where it has vLLM's."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

from tests.booted.machine import Machine, booted_machine, wait_until
from tests.support.debian import ROOT

PAGE = (ROOT / "docs" / "install.md").read_text()
MESH_TOML = """
[mesh]
name = "test"
[regions.us]
http = "127.0.0.1:8101"
nats = "127.0.0.1:4101"
leaf = "127.0.0.1:4201"
replicas = 1
routers = ["r1"]
batch_runners = ["batch-0"]
"""
UNITS = NATS, ROUTER, AGENT, RUNNER = (
    *("mesh-nats@us", "mesh-router@r1", "mesh-agent@us-0", "mesh-batch-runner@batch-0"),
)
KEY = "sk-of-the-engine"
BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}


def blocks() -> dict[str, str]:
    """The `sh` blocks of the page, by their first line."""
    found = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return {block.splitlines()[0]: block for block in found}


def block(begins: str) -> str:
    [found] = [text for first, text in blocks().items() if first.startswith(begins)]
    return found


def line(begins: str, within: str = "# the region's server") -> str:
    """One line of a block."""
    [found] = [line for line in block(within).splitlines() if line.startswith(begins)]
    return found


def drop_ins() -> list[str]:
    """The page's `ini` blocks."""
    return re.findall(r"^```ini\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def ask(tokens: int) -> str:
    """A curl of one streamed answer."""
    body = json.dumps({**BODY, "max_tokens": tokens})
    url = "http://127.0.0.1:8101/v1/chat/completions"
    return f"curl -sSN --fail-with-body {url} -H 'content-type: application/json' -d '{body}'"


def engine(number: int) -> str:
    """Start one more simulated engine."""
    program = f"/opt/mesh/bin/mesh-agent engine-sim --port {8000 + number} --model m"
    return f"systemd-run --quiet --unit=engine-{number} {program}"


@contextlib.contextmanager
def installed(directory: Path) -> Iterator[Machine]:
    """A machine with the units of UNITS; its end prints what was executed."""
    with booted_machine(directory) as machine:
        write_mesh_toml(machine, MESH_TOML)
        began = time.monotonic()
        machine.run(block("python3 -m venv"))
        machine.run(block("mesh infra nats --config mesh.toml"))
        machine.run(engine(0))
        machine.run(block("# the region's server"))
        print(f"installed and started in {time.monotonic() - began:.1f} s")
        machine.run(f"echo MESH_ENGINE_KEY={KEY} >> /etc/mesh/agents/us-0.env")
        machine.run(f"systemctl restart {AGENT}")
        serves(machine)
        yield machine


def write_mesh_toml(machine: Machine, text: str) -> None:
    machine.run(f"cat > mesh.toml <<'END'\n{text}END")


def blocks_run(machine: Machine) -> list[str]:
    """First lines of the page's blocks whose every command has run."""
    return [
        first
        for first, text in blocks().items()
        if {line for line in text.splitlines() if line and not line.startswith("#")}
        <= machine.commands
    ]


def serves(machine: Machine) -> float:
    """Wait until an answer comes whole; seconds."""
    return wait_until(lambda: "[DONE]" in machine.result(ask(2)).stdout, journal(machine))


def taken(machine: Machine) -> bool:
    """Whether the stream of `an_open_stream` has come whole."""
    return machine.run("cat /tmp/stream").rstrip().endswith("data: [DONE]")


@contextlib.contextmanager
def an_open_stream(machine: Machine, tokens: int = 800) -> Iterator[None]:
    """A client reads a stream that has begun; at the end it must come whole."""
    machine.run("rm -f /tmp/stream")
    with machine.begin(f"{ask(tokens)} > /tmp/stream") as stream:
        begun = "grep -q data: /tmp/stream && pgrep curl"
        wait_until(lambda: machine.result(begun).returncode == 0, "a stream")
        yield
        assert stream.wait(60) == 0
    assert taken(machine), machine.run("tail -c 500 /tmp/stream")


def journal(machine: Machine) -> str:
    return machine.run("journalctl --no-pager --lines=60 --output=cat")


def status(machine: Machine, unit: str) -> str:
    return machine.property(unit, "StatusText")


def restarted(machine: Machine, unit: str, old: str) -> bool:
    now = machine.property(unit, "MainPID")
    return now not in ("0", old) and machine.property(unit, "ActiveState") == "active"
