"""What systemd receives from a service, on a real datagram socket."""

import asyncio
import os

import pytest

from infra.process import end_all
from infra.service_manager import STATUS_CHARS_MAX, STATUS_EVERY_S, ServiceManager
from tests.support.notify_socket import notify_socket


async def test_readiness_status_and_end_are_reported():
    with notify_socket() as systemd:
        manager = ServiceManager(systemd.environment())
        manager.report_ready()
        manager.report("3 of 4 replicas ready")
        manager.report_stopping()
        assert await systemd.next() == ["READY=1"]
        assert await systemd.next() == ["WATCHDOG=1", "STATUS=3 of 4 replicas ready"]
        assert await systemd.next() == ["STOPPING=1"]


async def test_a_status_is_one_line_whatever_an_engine_says():
    with notify_socket() as systemd:
        ServiceManager(systemd.environment()).report("down: gone\nMAINPID=1\n" + "x" * 1000)
        _, status = await systemd.next()
        assert status.startswith("STATUS=down: gone MAINPID=1 xxx")
        assert len(status) == len("STATUS=") + STATUS_CHARS_MAX


async def test_it_reports_twice_in_the_time_of_the_watchdog():
    with notify_socket() as systemd:
        manager = ServiceManager(systemd.environment(watchdog_s=0.02))
        assert (manager.watchdog_s, manager.every_s) == (0.02, 0.01)
        numbers = iter(range(100))
        reporting = asyncio.create_task(manager.keep_reporting(lambda: f"round {next(numbers)}"))
        assert await systemd.next() == ["WATCHDOG=1", "STATUS=round 0"]
        assert await systemd.next() == ["WATCHDOG=1", "STATUS=round 1"]
        await end_all([reporting])


@pytest.mark.parametrize("pid", ["", "own", "1"])
def test_the_watchdog_of_another_process_is_not_ours(pid):
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "60000000"}
    if pid:
        environ["WATCHDOG_PID"] = str(os.getpid()) if pid == "own" else pid
    manager = ServiceManager(environ)
    assert manager.watchdog_s == (None if pid == "1" else 60.0)
    assert manager.every_s == STATUS_EVERY_S
    assert environ == {}  # children inherit nothing of it


async def test_an_abstract_address_is_understood():
    address = f"mesh-test-{os.getpid()}"
    with notify_socket() as systemd:  # for its reading half only
        receiving = systemd._receiving.__class__(1, 2)
        receiving.setblocking(False)
        receiving.bind("\0" + address)
        ServiceManager({"NOTIFY_SOCKET": "@" + address}).report_ready()
        assert receiving.recv(100) == b"READY=1"
        receiving.close()


def test_without_systemd_or_while_it_is_away_nothing_happens(tmp_path):
    ServiceManager({}).report_ready()
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")}).report_ready()
