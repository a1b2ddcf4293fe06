"""Fixtures that every part of the suite shares."""

import faulthandler
import gc
import importlib
import os
import sys
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import forked_programs
from tests.support.nats_server import NatsServer, running_nats_server

pytest_plugins = ["tests.support.machine_needs"]
pytest.register_assert_rewrite("tests.engines.contract", "tests.engines.without_page_contract")

gc.disable()  # until all tests are collected: nothing of that is garbage

# Without compiled files, each process that a test starts would compile all of our modules anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Each process that imports aiohttp reads all of the machine's certificates twice, a tenth of its
# start. No test needs any; httpx wants one.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "data" / "certificate.pem")

# JetStream waits until what it acknowledges is on its disk. In memory 20,000 lines of a job pass in
# a third of the time, and no test waits for whoever else writes to the disk.
MEMORY, ROOM_BYTES = "/dev/shm", 4 * 1024**3
if os.access(MEMORY, os.W_OK):
    found = os.statvfs(MEMORY)
    has_room = found.f_bavail * found.f_frsize > ROOM_BYTES
    if has_room and not found.f_flag & os.ST_NOEXEC:  # some tests run programs that they write
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

# What is printed depends on the terminal; a test that is about one says what it is like.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm"

forked_programs.install(now="PYTEST_XDIST_WORKER" in os.environ)

# How long an example takes says how busy the machine is. A property that is rarely broken has
# more examples of its own.
settings.register_profile(
    "shared", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")


# What takes longest goes first, so that parallel workers end together.
FIRST = (
    "tests/end_to_end",
    "tests/dashboards",
    "tests/test_pages.py",
    "tests/seeds",
    "tests/mesh/demo",
    "tests/mesh/cli",
    "tests/mesh/supervisor",
    "tests/infra",
    "tests/mesh/runtime",
)


LATE_S, FAILED_ENDS_S = 60.0, 300.0  # a busy machine stops three regions in less
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # while a test runs pytest replaces that one


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where what pytest-timeout raises is caught and lost, all threads' stacks are printed and the
    process ends."""
    marked = item.get_closest_marker("timeout")
    limit_s = float(marked.args[0] if marked and marked.args else item.config.getini("timeout"))
    _ends_within(limit_s + LATE_S, item.config)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Once a test has failed, pytest-timeout [2.4] and pytest's faulthandler [9.2] stop counting.
    What it leaves open may hang as its event loop is closed."""
    if isinstance(node, pytest.Item):
        _ends_within(FAILED_ENDS_S, node.config)


def _ends_within(seconds: float, config: pytest.Config) -> None:
    if not config.getoption("usepdb"):
        faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[STDERR])


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a run of all tests each worker first imports its own part of them: pytest rewrites a file
    once and keeps it, and the others find it when they collect. An error comes again then."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    folder = Path(__file__).parent
    files = sorted(file.relative_to(folder.parent) for file in folder.rglob("test_*.py"))
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        if not file.is_relative_to("tests/programs"):
            with suppress(Exception):
                importlib.import_module(".".join(file.with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """What was collected stays to the end; the garbage collector need not look at it again."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests counted (`record_property("counted", …)`), also in other processes."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, text in report.user_properties:
            if name == "counted":
                terminalreporter.write_line(str(text))


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A real nats-server with JetStream on a free port, open to anyone on loopback."""
    async with running_nats_server(tmp_path / "nats") as server:
        yield server
