"""Reports to systemd: this process serves, what it does, its event loop runs (sd_notify(3)).

Own code, because the protocol is one datagram: PyPI's sdnotify is of 2017, systemd-python and
cysystemd need libsystemd and bind all of it, and none of them knows asyncio.
"""

import asyncio
import contextlib
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping

STATUS_EVERY_S = 1.0
STATUS_CHARS_MAX = 300


class StatusReporter(ABC):
    """Somebody who learns what this process does."""

    every_s = STATUS_EVERY_S

    @abstractmethod
    def report_ready(self) -> None:
        """Report that this process serves."""

    @abstractmethod
    def report_reloading(self) -> None:
        """Report that this process reads its configuration again; it is ready after that."""

    @abstractmethod
    def report(self, status: str) -> None:
        """Report what it does, in one line, and so that its event loop runs."""

    @abstractmethod
    def report_stopping(self) -> None:
        """Report that this process has begun to end."""

    async def keep_reporting(self, status: Callable[[], str]) -> None:
        """Report `status()` every `every_s`, from the event loop that serves. Runs for ever."""
        while True:
            self.report(status())
            await asyncio.sleep(self.every_s)


class ServiceManager(StatusReporter):
    """systemd. Without it (no NOTIFY_SOCKET) nothing is sent."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Takes systemd's variables out of the environment: children must not report."""
        address = environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        microseconds = environ.pop("WATCHDOG_USEC", "")
        is_ours = environ.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
        # How long systemd waits for a report before it ends this process; None: for ever.
        self.watchdog_s = int(microseconds) / 1e6 if microseconds.isdigit() and is_ours else None
        if self.watchdog_s is not None:
            self.every_s = min(STATUS_EVERY_S, self.watchdog_s / 2)
        self._is_stopping = False

    def report_ready(self) -> None:
        if not self._is_stopping:  # a reload that ends meanwhile
            self._send("READY=1")

    def report_reloading(self) -> None:
        if not self._is_stopping:
            self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def report(self, status: str) -> None:
        self._send("WATCHDOG=1", f"STATUS={' '.join(status.split())[:STATUS_CHARS_MAX]}")

    def report_stopping(self) -> None:
        self._is_stopping = True
        self._send("STOPPING=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        # systemd that restarts itself takes nothing for a moment: the next report comes.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sending,
        ):
            sending.setblocking(False)
            sending.sendto("\n".join(lines).encode(), self._address)


NO_SERVICE_MANAGER = ServiceManager({})
