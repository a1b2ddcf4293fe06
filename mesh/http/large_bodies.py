"""Large bodies are joined and parsed where that does not block the router's event loop.

Every client's tokens pass through the loop, so nothing on it may take longer than a few
milliseconds. Pieces are joined in a thread, which releases the interpreter's lock; JSON is parsed
in another process (`large_body_process`), started with the first large body and again when it is
gone. One body is parsed at a time, so that the memory of one is needed and not of ten; mostly the
smallest first, so that a small body waits for one of those that take long, and not for all of them.
"""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process

from mesh.adapters.refused import RequestRefused
from mesh.http.large_body_process import ANSWERED, ASKED, too_complex, unpack
from mesh.http.read_request import BodyFields, read_fields
from schemas.exchange import LARGE_BYTES
from schemas.http import Fault

OLDEST_EVERY = 4


class SmallestFirstLock:
    """A lock that mostly goes to the smallest work that waits.

    First come, first served would let the largest keep all others waiting. The smallest alone
    would let a flow of small ones keep the large out for good, so one turn in OLDEST_EVERY goes to
    the one that has waited longest.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], int] = {}  # sizes, the oldest first
        self._is_taken = False
        self._given = 0

    async def take(self, size: int) -> None:
        """Wait for one's turn, and `release` it. `size`: of the work, in any unit."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = size
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(turn, None)
            if turn.done() and not turn.cancelled():  # it was given in the same moment
                self.release()
            raise

    def release(self) -> None:
        """The work is done: the next may begin."""
        waiting = {turn: size for turn, size in self._waiting.items() if not turn.done()}
        if not waiting:
            self._is_taken = False
            return
        self._given += 1
        is_oldest = self._given % OLDEST_EVERY == 0
        turn = next(iter(waiting)) if is_oldest else min(waiting, key=waiting.__getitem__)
        del self._waiting[turn]
        turn.set_result(None)


log = logging.getLogger(__name__)

READ_S_MAX = 10.0  # for one body, the start of the process included: 4 s are the worst JSON
QUEUE_S_MAX = 60.0  # for those before it
PIPE_BYTES = 256 * 1024  # written or read at once


class LargeBodies:
    """Close it at the end."""

    def __init__(self) -> None:
        self._turns = SmallestFirstLock()
        self._process: Process | None = None
        self._reading: asyncio.Task[tuple[bytes, BodyFields]] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def read(
        self, path: str, chunks: list[bytes], content_type: str = ""
    ) -> tuple[bytes, BodyFields]:
        """Join and parse a body. Raises RequestRefused."""
        size = sum(map(len, chunks))
        if size <= LARGE_BYTES:
            body = b"".join(chunks)
            return body, read_fields(path, body, content_type)
        try:
            async with asyncio.timeout(QUEUE_S_MAX):
                await self._turns.take(size)
        except TimeoutError as error:
            message = "too many large bodies wait to be read"
            raise RequestRefused(Fault.SATURATED, message) from error
        # Its turn ends when it is read, also if its client leaves meanwhile.
        self._reading = asyncio.create_task(self._read(path, chunks, content_type))
        self._reading.add_done_callback(self._over)
        return await asyncio.shield(self._reading)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._end()

    def _over(self, reading: asyncio.Task[tuple[bytes, BodyFields]]) -> None:
        self._turns.release()
        if not reading.cancelled():
            reading.exception()  # retrieved, though its client may have left

    async def _read(
        self, path: str, chunks: list[bytes], content_type: str
    ) -> tuple[bytes, BodyFields]:
        body = await asyncio.to_thread(b"".join, chunks)
        asking = asyncio.create_task(self._ask(path, body, content_type))
        try:
            # While this process is suspended the other one reads on: that costs one half at most.
            for _ in range(2):
                await asyncio.wait([asking], timeout=READ_S_MAX / 2)
            if not asking.done():
                asking.cancel()
                raise TimeoutError
            return body, await asking
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            await self._end()  # it is out of time or memory
            raise too_complex() from error
        except asyncio.CancelledError:
            asking.cancel()
            await self._end()
            raise

    async def _ask(self, path: str, body: bytes, content_type: str) -> BodyFields:
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        name = f"{path} {content_type}".encode("utf-8", "replace")  # no path has a space
        process.stdin.write(ASKED.pack(len(name), len(body)) + name)
        with memoryview(body) as view:
            for start in range(0, len(body), PIPE_BYTES):
                process.stdin.write(view[start : start + PIPE_BYTES])
                await process.stdin.drain()
        has_grown, kind, about_bytes, text_bytes = ANSWERED.unpack(
            await process.stdout.readexactly(ANSWERED.size)
        )
        about = await process.stdout.readexactly(about_bytes)
        pieces = []
        while text_bytes:
            piece = await process.stdout.readexactly(min(PIPE_BYTES, text_bytes))
            text_bytes -= len(piece)
            pieces.append(piece)
        if has_grown:
            await self._end()
        return unpack(kind, about, await asyncio.to_thread(b"".join, pieces))

    async def _started(self) -> Process:
        old = self._process
        if old is not None and old.returncode is None:
            assert old.stdout is not None
            if not old.stdout.at_eof():
                return old
        await self._end()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "mesh.http.large_body_process",
                stdin=PIPE,
                stdout=PIPE,
                limit=PIPE_BYTES,
                start_new_session=True,  # a Ctrl-C is the router's to take; it ends with its input
            )
        except OSError as error:
            log.warning("no process can be started to read large bodies: %s", error)
            message = "this router can't read large bodies at present"
            raise RequestRefused(Fault.OVERLOADED, message) from error
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
