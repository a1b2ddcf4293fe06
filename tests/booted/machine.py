"""A stock Debian 12 with a booted systemd, in a container of systemd-nspawn.

Its packages come from Debian's archive (tests/support/debian.py). Its network is its own loopback,
so Python packages are fetched by this machine first. Rejected: Docker, whose systemd
would run in this machine's own control groups where these are of version 1.
"""

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.debian import (
    BASE,
    INSTALLS_FROM_WHEELS,
    ROOT,
    WHEELS,
    command,
    make_all,
    make_base,
    make_wheels,
    need,
)
from tests.tools.go_tools import NATS

CHECKOUT = "/srv/mesh"
ENVIRONMENT = {
    "PATH": "/opt/mesh/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PIP_FIND_LINKS": "/srv/wheels",
    **INSTALLS_FROM_WHEELS,
}
TOOLS = {"systemd-nspawn": "systemd-container"}
BOOT_S = 60.0
END_S = 30.0


class Machine:
    """A booted container; `run` runs shell text in it. `commands` is what ran in it."""

    def __init__(self, leader: int) -> None:
        self._leader = leader  # its process 1
        self.commands: set[str] = set()

    def _words(self, text: str) -> list[str]:
        entered = ["nsenter", f"--target={self._leader}", "--all", f"--wdns={CHECKOUT}"]
        self.commands |= {line for line in text.splitlines() if line and not line.startswith("#")}
        given = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
        return [*entered, "env", "-i", *given, "bash", "-euc", text]

    def run(self, text: str, *, timeout_s: float = 240.0) -> str:
        """What the text prints; fails with both outputs unless its status is 0."""
        done = self.result(text, timeout_s=timeout_s)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def result(self, text: str, *, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._words(text), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def begin(self, text: str) -> subprocess.Popen[str]:
        """Run it beside us."""
        return subprocess.Popen(
            self._words(text), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def property(self, unit: str, name: str) -> str:
        return self.run(f"systemctl show --property={name} --value {unit}").strip()


def wait_until(condition: Callable[[], object], what: str, within_s: float = 60.0) -> float:
    """Seconds until the condition holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - began


def _fill(root: Path) -> None:
    """Unpack the base; put the wheels, this checkout, changes included, and `nats` into it."""
    root.mkdir()
    command("tar", "--extract", f"--file={BASE}", f"--directory={root}")
    shutil.copytree(WHEELS, root / "srv" / "wheels")
    shutil.copy(NATS.binary, root / "usr" / "local" / "bin" / "nats")
    checkout = root / CHECKOUT[1:]
    checkout.mkdir()
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    there = b"\0".join(name for name in files.split(b"\0") if (ROOT / name.decode()).is_file())
    words = ("tar", "--create", "--null", "--files-from=-")
    packed = subprocess.run(words, cwd=ROOT, input=there, capture_output=True, check=True).stdout
    subprocess.run(("tar", "--extract", f"--directory={checkout}"), input=packed, check=True)


@contextlib.contextmanager
def booted_machine(directory: Path) -> Iterator[Machine]:
    """Boot it, and leave nothing of it."""
    need(TOOLS)
    make_all(make_base, make_wheels)
    root = directory / "debian"
    _fill(root)
    log = directory / "console"
    with log.open("wb") as console:
        container = subprocess.Popen(
            (
                *("systemd-nspawn", "--quiet", "--boot", f"--directory={root}"),
                *("--register=no", "--keep-unit", "--private-network", "--console=pipe"),
                "--kill-signal=SIGRTMIN+3",
            ),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
        )
    leader = 0
    try:
        children = Path(f"/proc/{container.pid}/task/{container.pid}/children")

        def has_leader() -> bool:
            nonlocal leader
            assert container.poll() is None, log.read_text(errors="replace")
            leader = int((children.read_text().split() or [0])[-1])
            return leader > 0 and "systemd" in Path(f"/proc/{leader}/comm").read_text()

        wait_until(has_leader, "a process 1", BOOT_S)
        machine = Machine(leader)
        booted = "systemctl is-system-running --wait"
        wait_until(lambda: "running" in machine.result(booted).stdout, "a booted systemd", BOOT_S)
        yield machine
    finally:
        container.send_signal(signal.SIGTERM)
        try:
            container.wait(END_S)
        except subprocess.TimeoutExpired:
            subprocess.run(["kill", "-KILL", str(leader), str(container.pid)], check=False)
            container.wait(END_S)
        shutil.rmtree(root, ignore_errors=True)
