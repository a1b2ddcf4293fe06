"""What happens to tests that need more of a machine than Python: an engine, systemd, Prometheus.

On a laptop without it they are deselected, and the run's last lines say how many and why. In CI
(`CI=true`) they fail: a check that silently stops running is worse than one that fails.
"""

import functools
import gc
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

PROBE_TIMEOUT_S = 5


class Need(NamedTuple):
    """What the tests of one marker need. `problem`: why it isn't there, or None if it is."""

    tests: str
    problem: Callable[[], str | None]
    remedy: str


@functools.cache
def engine_problem() -> str | None:
    """Why no container engine can be used, or None when one answers."""
    import docker

    with warnings.catch_warnings():
        # The client leaves the socket of a failed connection to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            docker.from_env(timeout=PROBE_TIMEOUT_S).close()  # asks the engine for its version
            problem = None
        except docker.errors.DockerException as error:
            problem = f"no container engine answers ({error})"
        gc.collect()
    return problem


def systemd_problem() -> str | None:
    """Why units can't be checked, or None when they can."""
    return None if shutil.which("systemd-analyze") else "there is no systemd-analyze"


def prometheus_problem() -> str | None:
    """Why rules and dashboards can't be tried, or None when they can."""
    missing = [tool for tool in ("prometheus", "promtool") if not shutil.which(tool)]
    return f"there is no {' and no '.join(missing)}" if missing else None


NEEDS = {
    "containers": Need("container tests", engine_problem, "run .ci/container-engine make test"),
    "systemd": Need("systemd unit tests", systemd_problem, "install the package systemd"),
    "prometheus": Need("Prometheus tests", prometheus_problem, "install the package prometheus"),
}
DESELECTED = pytest.StashKey[list[str]]()
# How a worker of pytest-xdist tells the process that prints the summary.
WORKER_KEY = "tests_deselected"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DESELECTED] = []


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    yield  # -m and -k choose first: nobody wants to hear of tests that were not asked for
    if os.environ.get("CI") == "true":
        return
    for marker, need in NEEDS.items():
        ours = [item for item in items if item.get_closest_marker(marker)]
        problem = need.problem() if ours else None
        if problem is None:
            continue
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)
        config.stash[DESELECTED].append(f"{len(ours)} {need.tests} not run: {problem}")
    if hasattr(config, "workeroutput"):
        config.workeroutput[WORKER_KEY] = config.stash[DESELECTED]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, need in NEEDS.items():
        if item.get_closest_marker(marker) and (problem := need.problem()):
            pytest.fail(f"{problem}: {need.remedy}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    lines = getattr(node, "workeroutput", {}).get(WORKER_KEY)
    if lines:
        node.config.stash[DESELECTED] = lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in terminalreporter.config.stash[DESELECTED]:
        terminalreporter.write_line(line, yellow=True)
