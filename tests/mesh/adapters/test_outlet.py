"""Bytes of a stream on the short way: written at once, left to the handler where it must wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from mesh.adapters.answer import CREDIT_BYTES
from mesh.adapters.http_server import HttpServer
from mesh.adapters.outlet import BEHIND_BYTES, Outlet
from mesh.adapters.ticket import Ticket
from tests.mesh.adapters.build import LOST, Feeder, ticket

EVENT = b"data: 1\n\n"


class Poured:
    """A feeder whose ticket pours into the outlet of a real response."""

    def __init__(self, request: web.BaseRequest, stream: web.StreamResponse, held: Ticket) -> None:
        self.feeder = Feeder(held)
        self.passed = 0
        assert request.transport is not None
        chunked = stream.headers.get("Transfer-Encoding") == "chunked"
        self.outlet = Outlet(request.transport, self.feeder.answer, self._count, chunked=chunked)

    def _count(self) -> None:
        self.passed += 1


@asynccontextmanager
async def pouring(
    version: str = "1.1", held: Ticket | None = None
) -> AsyncIterator[tuple[Poured, asyncio.StreamReader]]:
    """An outlet into a connection, and the client's end of it behind the headers."""
    made: asyncio.Future[Poured] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b"first")
        made.set_result(Poured(request, stream, held or ticket()))
        await done.wait()
        return stream

    runner = web.ServerRunner(HttpServer(handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
    writer.write(f"POST / HTTP/{version}\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
    try:
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            first = b"5\r\nfirst\r\n" if b"chunked" in head else b"first"
            assert await reader.readexactly(len(first)) == first
            yield await made, reader
    finally:
        done.set()
        writer.transport.abort()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("version", "on_the_wire"), [("1.1", b"9\r\ndata: 1\n\n\r\n"), ("1.0", EVENT)]
)
async def test_what_comes_is_on_the_wire_before_anybody_is_woken(version, on_the_wire):
    async with pouring(version) as (poured, reader):
        poured.feeder.data(EVENT)
        assert poured.outlet.pour()
        assert await reader.readexactly(len(on_the_wire)) == on_the_wire


async def test_credit_is_asked_for_once_enough_has_been_written():
    async with pouring("1.1") as (poured, _):
        event = b"data: " + b"x" * (CREDIT_BYTES // 8 - 8) + b"\n\n"
        for events in range(1, 9):
            poured.feeder.data(event)
            while not poured.outlet.pour():
                await asyncio.sleep(0)  # the client's kernel takes it
            assert poured.passed == (events == 8)


async def test_half_an_event_waits_for_its_other_half():
    async with pouring("1.1") as (poured, reader):
        poured.feeder.data(EVENT[:4])
        assert poured.outlet.pour()
        assert poured.feeder.answer.buffered_bytes == 4
        poured.feeder.data(EVENT[4:])
        assert poured.outlet.pour()
        assert await reader.readexactly(14) == b"9\r\ndata: 1\n\n\r\n"


async def test_the_end_is_the_handlers():
    async with pouring("1.1") as (poured, _):
        poured.feeder.end(last=EVENT)
        assert not poured.outlet.pour()
        assert poured.feeder.answer.take() == EVENT  # to go out with the end, in one write


async def test_a_socket_that_is_behind_is_the_handlers():
    async with pouring("1.1") as (poured, _):
        large = b"data: " + b"x" * BEHIND_BYTES + b"\n\n"
        for _ in range(1000):  # more than any kernel buffers
            poured.feeder.data(large)
            if not poured.outlet.pour():
                break
        else:
            raise AssertionError("it wrote on and on to a client that does not read")
        assert poured.feeder.answer.buffered_bytes == len(large)  # waits to go in one piece


async def test_a_client_that_is_gone_is_the_handlers():
    async with pouring("1.1") as (poured, _):
        poured.outlet._transport.abort()
        poured.feeder.data(EVENT)
        assert not poured.outlet.pour()
        assert poured.feeder.answer.buffered_bytes == len(EVENT)  # nothing was taken


async def test_a_waiting_handler_sleeps_on_while_the_outlet_pours_and_wakes_for_the_rest():
    held = ticket()
    async with pouring("1.1", held) as (poured, reader):
        waiting = asyncio.create_task(held.next_bytes(poured.outlet))
        await asyncio.sleep(0)
        poured.feeder.data(EVENT)
        await asyncio.sleep(0)
        assert not waiting.done()
        poured.feeder.data(EVENT)
        assert await reader.readexactly(28) == b"9\r\ndata: 1\n\n\r\n" * 2
        poured.feeder.fail(LOST)
        assert held.outlet is None
        poured.feeder.data(EVENT)  # what is whole still goes out, but by the handler
        assert await waiting == EVENT
        assert await held.next_bytes(poured.outlet) == b""
