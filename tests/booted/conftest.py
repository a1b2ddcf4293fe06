"""One installed machine for all tests here, and the count of what ran on it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.booted.installed import UNITS, blocks, blocks_run, installed
from tests.booted.machine import Machine

COUNTED = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def machine(pytestconfig: pytest.Config) -> Iterator[Machine]:
    # On a disk: file systems in memory have no devices, and a Debian is large.
    with (
        tempfile.TemporaryDirectory(prefix="booted-", ignore_cleanup_errors=True) as folder,
        installed(Path(folder)) as machine,
    ):
        yield machine
        pytestconfig.stash[COUNTED] = (
            f"{len(UNITS)} units, {len(blocks_run(machine))} of {len(blocks())} blocks of "
            f"docs/install.md and {len(machine.commands)} commands run on a booted systemd"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if counted := terminalreporter.config.stash.get(COUNTED, ""):
        terminalreporter.write_line(counted)
