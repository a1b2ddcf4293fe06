"""What happens to the tests marked `containers` where no container engine answers.

On a laptop they are deselected, and the run's last lines say how many and why. In CI
(`CI=true`) they fail: a check that silently stops running is worse than one that fails.
"""

import functools
import gc
import os
import warnings
from collections.abc import Iterator

import pytest

PROBE_TIMEOUT_S = 5
DESELECTED = pytest.StashKey[str]()
# How a worker of pytest-xdist tells the process that prints the summary.
WORKER_KEY = "container_tests_deselected"


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
            problem = str(error)
        gc.collect()
    return problem


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    yield  # -m and -k choose first: nobody wants to hear of tests that were not asked for
    ours = [item for item in items if item.get_closest_marker("containers")]
    if not ours or os.environ.get("CI") == "true":
        return
    problem = engine_problem()
    if problem is None:
        return
    items[:] = [item for item in items if item not in ours]
    config.hook.pytest_deselected(items=ours)
    line = f"{len(ours)} container tests not run: no container engine answers ({problem})"
    config.stash[DESELECTED] = line
    if hasattr(config, "workeroutput"):
        config.workeroutput[WORKER_KEY] = line


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("containers") and (problem := engine_problem()):
        pytest.fail(f"no container engine answers ({problem}): run .ci/container-engine make test")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    line = getattr(node, "workeroutput", {}).get(WORKER_KEY)
    if line:
        node.config.stash[DESELECTED] = line


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    line = terminalreporter.config.stash.get(DESELECTED, None)
    if line:
        terminalreporter.write_line(line, yellow=True)
