"""Large bodies, put together and read where that holds up nobody else.

What takes longer than a few milliseconds must not happen on the router's loop, on which the tokens
of all clients pass. Pieces are joined in a thread, which lets the interpreter go; JSON is parsed in
another process (`large_body_process`), begun with the first large body and again when it is gone.
One body at a time, so that one body's memory is needed and not ten; mostly the smallest first, so
that an honest one waits for one of those that take long, and not for all of them (`turns`).

Rejected: a thread for the parsing (it keeps the interpreter's lock for as long as it takes), a pool
of processes from the standard library (its workers outlive a router that is killed), and a parser
that stops and goes on (none in the standard library, and ten times slower).
"""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process

from mesh.adapters.body_fields import BodyFields, read_fields
from mesh.adapters.large_body_process import ANSWERED, ASKED, too_complex, unpack
from mesh.adapters.problem import Problem
from mesh.adapters.turns import Turns
from schemas.http import Fault

log = logging.getLogger(__name__)

LARGE_BYTES = 256 * 1024  # read at once: 0.1 ms of text, 8 ms of the worst JSON
READ_S_MAX = 10.0  # for one body, the start of the process included: 4 s are the worst JSON
QUEUE_S_MAX = 60.0  # for those before it
PIPE_BYTES = 256 * 1024  # written or read at once


class LargeBodies:
    """Close it at the end."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._process: Process | None = None
        self._reading: asyncio.Task[tuple[bytes, BodyFields]] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    async def read(self, path: str, chunks: list[bytes]) -> tuple[bytes, BodyFields]:
        """The whole body and what it says. Raises Problem."""
        size = sum(map(len, chunks))
        if size <= LARGE_BYTES:
            body = b"".join(chunks)
            return body, read_fields(path, body)
        try:
            async with asyncio.timeout(QUEUE_S_MAX):
                await self._turns.take(size)
        except TimeoutError as error:
            message = "too many large bodies wait to be read"
            raise Problem(Fault.SATURATED, message) from error
        # Its turn ends when it is read, also if its client leaves meanwhile.
        self._reading = asyncio.create_task(self._read(path, chunks))
        self._reading.add_done_callback(self._over)
        return await asyncio.shield(self._reading)

    async def close(self) -> None:
        """End the process."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._end()

    def _over(self, reading: asyncio.Task[tuple[bytes, BodyFields]]) -> None:
        self._turns.release()
        if not reading.cancelled():
            reading.exception()  # of nobody's, where its client has left

    async def _read(self, path: str, chunks: list[bytes]) -> tuple[bytes, BodyFields]:
        body = await asyncio.to_thread(b"".join, chunks)
        try:
            async with asyncio.timeout(READ_S_MAX):
                return body, await self._ask(path, body)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            await self._end()  # it is out of time or memory
            raise too_complex() from error
        except asyncio.CancelledError:
            await self._end()
            raise

    async def _ask(self, path: str, body: bytes) -> BodyFields:
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        name = path.encode()
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
                *(sys.executable, "-P", "-m", "mesh.adapters.large_body_process"),
                stdin=PIPE,
                stdout=PIPE,
                limit=PIPE_BYTES,
                start_new_session=True,  # a Ctrl-C is the router's to take; it ends with its input
            )
        except OSError as error:
            log.warning("no process can be started to read large bodies: %s", error)
            message = "this router can't read large bodies at present"
            raise Problem(Fault.OVERLOADED, message) from error
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
