"""The keys by which an issuer signs tokens: its JWK Set, from a file or a URL, read again in time.

An issuer that can't be reached changes nothing for a day: the last set holds, and the router says
so. A token of an unknown key has the set read at once, but not more often than every AGAIN_S, or
anybody could have the issuer asked by made-up tokens.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

import aiohttp

from infra.auth_table import JwtTable
from infra.process import LimitedLog
from mesh.http.callers import Callers
from mesh.http.tokens import Tokens

log = logging.getLogger(__name__)

EVERY_S = 300.0
AGAIN_S = 10.0
KEPT_S = 86_400.0  # that the last set holds
FETCH_S = 5.0
SET_BYTES_MAX = 256 * 1024
PIECE_BYTES = 64 * 1024


class TokenSigners:
    """One router's: `know` what mesh.toml says; `keep` runs until cancelled."""

    def __init__(self, callers: Callers, clock: Callable[[], float] = time.monotonic) -> None:
        self._callers, self._clock = callers, clock
        self._log = LimitedLog(log)
        self._reading, self._changed = asyncio.Lock(), asyncio.Event()
        self._table: JwtTable | None = None
        self._tokens: Tokens | None = None
        self._tried_at = self._read_at = float("-inf")
        self.problem: str | None = None

    def know(self, table: JwtTable | None) -> None:
        """Take tokens as it says; its keys are read at once, also where it is as before."""
        if table != self._table:
            self._table, self._tokens = table, None if table is None else Tokens(table)
            self._read_at, self.problem = float("-inf"), None
            self._callers.take_tokens(self._tokens, self.read_again)
        self._tried_at = float("-inf")
        self._changed.set()

    async def keep(self) -> None:
        while True:
            self._changed.clear()
            await self.read_again()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if self.problem else EVERY_S):
                    await self._changed.wait()

    async def read_again(self) -> None:
        """Read the set, unless that was tried a moment ago."""
        async with self._reading:
            tokens = self._tokens
            if tokens is None or self._clock() - self._tried_at < AGAIN_S:
                return
            try:
                tokens.know(await _read(tokens.table.jwks))
                self._read_at, self.problem = self._clock(), None
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                self._failed(tokens, error)
            self._tried_at = self._clock()

    def _failed(self, tokens: Tokens, error: Exception) -> None:
        held = self._clock() - self._read_at
        if held > KEPT_S:
            tokens.know(None)
        holds = f"the set read {held:.0f} s ago holds" if held <= KEPT_S else "no token is taken"
        why = str(error) or type(error).__name__
        self.problem = f"jwks of [auth.jwt] can't be read; {holds}; the router's log says why"
        self._log.warning(
            "jwks", "unread", "jwks of [auth.jwt]: %s: %.200s; %s", tokens.table.jwks, why, holds
        )


async def _read(source: str) -> bytes:
    if not source.startswith(("https://", "http://")):
        return await asyncio.to_thread(_read_file, Path(source))
    timeout = aiohttp.ClientTimeout(total=FETCH_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(source, allow_redirects=False) as answer,
    ):
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"status {answer.status}")
        data = bytearray()
        async for piece in answer.content.iter_chunked(PIECE_BYTES):
            data += piece
            if len(data) > SET_BYTES_MAX:
                raise ValueError(f"more than {SET_BYTES_MAX} bytes")
        return bytes(data)


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(SET_BYTES_MAX + 1)
    if len(data) > SET_BYTES_MAX:
        raise ValueError(f"more than {SET_BYTES_MAX} bytes")
    return data
