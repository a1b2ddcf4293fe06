"""Ends an aiohttp server of this process as a process that dies ends: every connection is reset."""

import asyncio

from aiohttp import web

ACCEPTING_TURNS = 10  # of the loop, in which connections that were being accepted appear


async def abort(runner: web.AppRunner) -> None:
    """Stop listening, reset every connection, and clean up."""
    loop = asyncio.get_running_loop()
    for site in runner.sites:
        assert isinstance(site, web.TCPSite) and site._server is not None
        for listening in site._server.sockets:
            # Closed now, Python 3.11 would forget, open, what it is about to accept.
            loop.remove_reader(listening)
    for _ in range(ACCEPTING_TURNS):
        _reset(runner)
        await asyncio.sleep(0)
    await runner.cleanup()


def _reset(runner: web.AppRunner) -> None:
    assert runner.server is not None
    for connection in list(runner.server.connections):
        if connection.transport is not None:
            connection.transport.abort()
