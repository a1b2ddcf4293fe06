"""Watches the buses while somebody looks at the console, and only then."""

import asyncio
import contextlib
import gzip
import logging
import time
from dataclasses import dataclass

import orjson

from infra.process import end_all
from mesh.console.config import ConsoleConfig
from mesh.console.frames import Frames
from mesh.top.watch import FleetWatch

log = logging.getLogger(__name__)

UNWATCHED_S = 30.0  # after the last question the buses are left
LOOK_S = 1.0
FRAME_S = 0.9  # the page asks once a second; all who look get the same frame
SHARE = 0.05  # of the process's time that making frames may take: it routes requests too
FASTEST = 1  # gzip's level


@dataclass(frozen=True, slots=True)
class MadeFrame:
    """JSON, plain and compressed."""

    plain: bytes
    gzipped: bytes


class Viewing:
    """The fleet as it is seen now. `close` at the end."""

    def __init__(self, config: ConsoleConfig) -> None:
        self._config = config
        self._frames = Frames(config)
        self._watch: FleetWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._frame: MadeFrame | None = None
        self._next_at = 0.0

    @property
    def is_watching(self) -> bool:
        return self._watching is not None

    @property
    def watch(self) -> FleetWatch:
        """Watches from now on, if it did not, and at least until UNWATCHED_S from now."""
        self._asked_at = time.monotonic()
        if self._watch is None or self._watching is None or self._watching.done():
            self._watch = FleetWatch(
                self._config.topology, self._config.logins, name="mesh console"
            )
            self._watching = asyncio.create_task(self._run(self._watch))
            self._frame = None
        return self._watch

    def frame(self) -> MadeFrame:
        """The newest one; it is made anew as often as its cost allows."""
        watch = self.watch
        began = time.monotonic()
        if self._frame is None or began >= self._next_at:
            shown = self._frames.shown(watch.frame(), watch.fleet, time.time())
            plain = orjson.dumps(shown, option=orjson.OPT_NON_STR_KEYS)
            self._frame = MadeFrame(plain, gzip.compress(plain, FASTEST))
            took_s = time.monotonic() - began
            self._next_at = began + max(FRAME_S, took_s / SHARE)
        return self._frame

    async def close(self) -> None:
        if self._watching is not None:
            await end_all([self._watching])

    async def _run(self, watch: FleetWatch) -> None:
        watching = asyncio.create_task(watch.run())
        try:
            while time.monotonic() - self._asked_at < UNWATCHED_S and not watching.done():
                await asyncio.wait([watching], timeout=LOOK_S)
            if watching.done():
                watching.result()
        except Exception:
            log.exception("the console's view of the fleet ended; it begins anew when asked")
        finally:
            await end_all([watching])
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await watching
            if self._watch is watch:
                self._watch = self._watching = self._frame = None
