"""Limits on connections, on the loop of tests and on that of live routers.

The rest of the server is seen in tests/mesh/runtime/test_front_door.py.
"""

import asyncio

import pytest
import uvloop
from aiohttp import web

from mesh.adapters.connections import REFUSALS, Connections
from mesh.adapters.http_server import UNPARSABLE, HttpServer
from tests.support.raw_http import connections

ASK = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
each_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


async def handle(request: web.BaseRequest) -> web.StreamResponse:
    if UNPARSABLE in request:
        return web.Response(status=request[UNPARSABLE].fault.value.status)
    return web.Response(text="served")


async def answers(most: int, probes: int, count: int) -> list[bytes]:
    """What so many connections that come to a port with that many places are answered."""
    places = Connections(most, probes=probes)
    server = HttpServer(handle, region="us", connections=places)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with asyncio.timeout(30), connections(f"http://{host}:{port}", count) as pairs:
            for _, writer in pairs:
                writer.write(ASK)
            got = await asyncio.gather(*(reader.read(20) for reader, _ in pairs))
        while places.open:
            await asyncio.sleep(0.005)
        return got
    finally:
        await runner.cleanup()


@each_loop
def test_who_finds_no_place_reads_why(run):
    got = run(answers(2, 1, 6))
    assert [text[:12] for text in got] == [b"HTTP/1.1 200"] * 2 + [b"HTTP/1.1 503"] * 4


@each_loop
def test_a_flood_is_answered_as_far_as_there_is_room_for_answers(run):
    got = run(answers(1, 0, 1 + 2 * REFUSALS))
    said = [text for text in got[1:] if text]
    assert all(text.startswith(b"HTTP/1.1 503") for text in said)
    assert len(said) >= REFUSALS  # more, where some had left already
