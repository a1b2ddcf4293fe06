"""Connections without an HTTP client: what is written is what is sent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connections(url: str, count: int) -> AsyncIterator[list[Pair]]:
    """So many connections to a server's base URL, cut at the end."""
    host, port = url.removeprefix("http://").split(":")
    pairs: list[Pair] = []
    try:
        while len(pairs) < count:
            pairs.append(await asyncio.open_connection(host, port))
        yield pairs
    finally:
        for _, writer in pairs:
            writer.transport.abort()
