"""Configuration that is read again on SIGHUP, one time after the other.

SIGHUP stays blocked until a process can follow it, so that one that comes while the process starts
is neither lost nor its end.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

from infra.service_manager import StatusReporter

log = logging.getLogger(__name__)


def block() -> None:
    """Let SIGHUP wait for `Reloads.run`, in this process and those that it forks."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def ignore(why: str) -> None:
    """Log SIGHUP and go on, in a process that has nothing to read again. On the running loop."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, log.warning, "SIGHUP changes nothing: %s", why)


class Reloads:
    """One process's. `reporter` learns of each reload's begin and end."""

    def __init__(self, read_again: Callable[[], Awaitable[None]], reporter: StatusReporter) -> None:
        self._read_again = read_again
        self._reporter = reporter
        self._requested = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._requested.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        while True:
            await self._requested.wait()
            self._requested.clear()  # another request meanwhile means once more
            self._reporter.report_reloading()
            try:
                await self._read_again()
            except Exception:
                log.exception("the configuration could not be read again; the old one holds")
            self._reporter.report_ready()
