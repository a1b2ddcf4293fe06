"""An aborted server leaves no connection behind, not even one that it is about to accept."""

import asyncio
import contextlib
import gc
import socket

import pytest
from aiohttp import web

from tests.support.aborted import abort


@pytest.mark.parametrize("turns", range(5))
async def test_what_is_being_accepted_is_closed(turns):
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    clients = [socket.create_connection(runner.addresses[0]) for _ in range(4)]
    for _ in range(turns):
        await asyncio.sleep(0)
    await abort(runner)
    for client in clients:
        with client:
            client.settimeout(10.0)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
    gc.collect()  # would warn of one that is open
