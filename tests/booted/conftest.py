"""One installed machine for all tests here, and the count of what ran on it."""

from collections.abc import Iterator

import pytest

from tests.booted.installed import UNITS, blocks, blocks_run, installed
from tests.booted.machine import Machine

COUNTED = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def machine(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Machine]:
    with installed(tmp_path_factory.mktemp("booted")) as machine:
        yield machine
        pytestconfig.stash[COUNTED] = (
            f"{len(UNITS)} units, {len(blocks_run(machine))} of {len(blocks())} blocks of "
            f"docs/install.md and {len(machine.commands)} commands run on a booted systemd"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if counted := terminalreporter.config.stash.get(COUNTED, ""):
        terminalreporter.write_line(counted)
