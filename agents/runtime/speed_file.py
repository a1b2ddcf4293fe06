"""The engine's speed, kept on disk from one run of its agent to the next."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from agents.core.known_speed import SPEED_BYTES_MAX, KnownSpeed, decode_speed, encode_speed
from schemas.wire import WireError

log = logging.getLogger(__name__)

FILE_NAME = "prefill-speed.json"
KEEP_EVERY_S = 60.0


class SpeedFile:
    """In the agent's state directory. Its faults are logged and stop nothing."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None where nothing is kept."""
        self._path = None if folder is None else folder / FILE_NAME
        self._kept: KnownSpeed | None = None

    def read(self) -> KnownSpeed | None:
        """What the last run has learned; None if there is nothing that can be read."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as opened:
                data = opened.read(SPEED_BYTES_MAX + 1)
            if len(data) > SPEED_BYTES_MAX:
                raise WireError(f"more than {SPEED_BYTES_MAX} bytes")
            self._kept = decode_speed(data)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s can't be read: %s", self._path, error.strerror)
        except WireError as error:
            log.warning("%s is ignored: %s", self._path, error)
        return self._kept

    def keep(self, speed: KnownSpeed | None) -> None:
        """Write it whole or not at all, if it is new."""
        if self._path is None or speed is None or speed == self._kept:
            return
        partial = self._path.with_name(self._path.name + ".part")
        try:
            partial.write_bytes(encode_speed(speed))
            partial.replace(self._path)
        except OSError as error:
            log.warning("%s can't be written: %s", self._path, error.strerror)
        self._kept = speed

    async def keep_current(self, learned: Callable[[], KnownSpeed | None]) -> None:
        """Keep what is learned, every minute and when this is cancelled."""
        try:
            while True:
                await asyncio.sleep(KEEP_EVERY_S)
                self.keep(learned())
        finally:
            self.keep(learned())
