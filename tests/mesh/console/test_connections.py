"""The console's connections on the event loop of a router."""

import asyncio
import contextlib

import uvloop

from mesh.console.connections import CONNECTIONS_MAX, Connections


class Echo(asyncio.Protocol):
    """Serves one connection, and says which one a request is of."""

    def __init__(self, requested):
        self._requested = requested

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        self._requested(self)
        self._transport.write(data)


async def echoed(connection):
    reader, writer = connection
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"


def test_on_uvloop_silent_connections_make_room_and_used_ones_stay():
    async def served():
        connections = Connections(lambda: Echo(connections.requested))
        loop = asyncio.get_running_loop()
        async with await loop.create_server(connections.accept, "127.0.0.1", 0) as server:
            where = server.sockets[0].getsockname()[:2]
            used, *silent = [await asyncio.open_connection(*where) for _ in range(CONNECTIONS_MAX)]
            await echoed(used)
            late = await asyncio.open_connection(*where)
            await echoed(late)
            with contextlib.suppress(ConnectionResetError):
                assert await silent[0][0].read() == b""
            more = [await asyncio.open_connection(*where) for _ in range(CONNECTIONS_MAX)]
            await echoed(used)
            for _, writer in (used, late, *silent, *more):
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    uvloop.run(asyncio.wait_for(served(), 60.0))
