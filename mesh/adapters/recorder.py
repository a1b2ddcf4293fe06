"""Records a router's events and effects in a file, without delaying the router.

`handle` calls the core and keeps one line with the event and the effects
(`mesh/core/recording.py`). Once a second a thread writes the lines of that second, so a slow disk
delays no answer; a crash loses the last second. An error after the start (a full disk, the limit, a
value that can't be written) ends the recording with one line in the log, and the router continues.

Only the file's owner may read it: it has no prompt and no answer in it, but the time and size of
every request, and hashes that confirm a guessed text.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mesh.core import recording
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.recording import RecordingHeader

log = logging.getLogger(__name__)

BYTES_MAX = 1024**3
WRITE_S = 1.0
WAITING_BYTES_MAX = 64 * 1024 * 1024  # many seconds of a large fleet
END_BYTES = 512  # kept free for the line that says why it ended

Decide = Callable[[ev.Event, float], list[fx.Effect]]


class RecordingRefused(OSError):
    """The file can't be opened; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTo:
    """Where to record, and how much."""

    path: Path
    bytes_max: int = BYTES_MAX


class Recorder:
    """`open`, then `handle` in the place of the core's, then `close`."""

    def __init__(
        self,
        to: RecordTo,
        header: RecordingHeader,
        decide: Decide,
        open_file: Callable[[Path], BinaryIO] | None = None,
    ) -> None:
        self._to = to
        self._open_file = open_file or open_new
        self._header = header
        self._decide = decide
        self._file: BinaryIO | None = None
        self._waiting = bytearray()  # a list of lines costs twice the time, in fresh memory
        self._room_bytes = to.bytes_max - END_BYTES
        self._recording = False
        self._closing = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin the file; one that is there already is kept beside it, as FILE.old.

        Raises RecordingRefused; nothing is recorded then.
        """
        try:
            first = recording.encode_header(self._header)
        except TypeError as error:
            raise RecordingRefused(str(error)) from error
        self._file = self._open_file(self._to.path)
        self._recording = True
        self._keep(first)
        self._writing = asyncio.create_task(self._write_often())

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """The core's effects of the event; also recorded."""
        try:
            effects = self._decide(event, now)
        except Exception as error:
            if self._recording:
                self._keep(recording.encode_raised(now, event, error))
            raise
        if self._recording:
            try:
                self._keep(recording.encode_step(now, event, effects))
            except TypeError as error:
                self._end(f"a {type(event).__name__} can't be written: {error}")
        return effects

    async def close(self) -> None:
        """Write what is left; `open` may have failed or not been called."""
        if self._recording:
            self._recording = False
            self._waiting += recording.encode_end("the router left")
        if self._writing is not None:
            self._closing.set()
            await self._writing

    def _keep(self, line: bytes) -> None:
        self._room_bytes -= len(line)
        if self._room_bytes < 0:
            self._end(f"its limit of {self._to.bytes_max} bytes")
        elif len(self._waiting) + len(line) > WAITING_BYTES_MAX:
            self._end("the disk takes less than the router does")
        else:
            self._waiting += line

    def _end(self, why: str) -> None:
        # Steps after a hole would be decided by a core that never saw what is missing.
        self._recording = False
        self._waiting += recording.encode_end(why[: END_BYTES // 2])
        log.warning("the recording in %s ended, the router goes on: %s", self._to.path, why)

    async def _write_often(self) -> None:
        closing = False
        try:
            while not closing:  # and once more then
                closing = await self._until_due()
                lines, self._waiting = self._waiting, bytearray()
                await asyncio.to_thread(self._write, lines)
        except OSError as error:
            self._recording = False
            log.warning("the recording in %s ended, the router goes on: %s", self._to.path, error)
        self._close_file()

    async def _until_due(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITE_S):
                await self._closing.wait()
        return self._closing.is_set()

    def _write(self, lines: bytearray) -> None:
        assert self._file is not None, "opened"
        self._file.write(lines)
        self._file.flush()

    def _close_file(self) -> None:
        assert self._file is not None, "opened"
        with contextlib.suppress(OSError):  # it was logged
            self._file.close()


def open_new(path: Path) -> BinaryIO:
    """A new private file at `path`, locked; raises RecordingRefused.

    The file before it becomes FILE.old, so that a router which a supervisor restarts does not
    overwrite the record of its crash.
    """
    try:
        _step_aside(path)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except RecordingRefused:
        raise
    except OSError as error:
        raise RecordingRefused(f"can't record to {path}: {error.strerror}") from error
    return os.fdopen(handle, "wb")


def _step_aside(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise RecordingRefused(f"can't record to {path}: it is no regular file")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordingRefused(
                f"can't record to {path}: another router records there; name another file"
            ) from error
        path.replace(path.with_name(path.name + ".old"))
    finally:
        os.close(handle)
