"""The cheap clients before a server that is not always well."""

import asyncio

import pytest

from tests.programs.live.load.clients import Asks, Load

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Faulty:
    """Cuts every third request off, without an answer or in the middle of one."""

    def __init__(self) -> None:
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.rpartition(b"content-length: ")[2]))
                self.asked += 1
                if self.asked % 3 == 0:
                    writer.write(ANSWER[: 0 if self.asked % 2 else -1])
                    return
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@pytest.mark.parametrize("rate", [None, 300.0])
async def test_what_is_cut_off_has_failed_and_the_rest_goes_on(rate):
    faulty = Faulty()
    server = await asyncio.start_server(faulty.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    load = Load(port, Asks(port, 2, 1, seed=1))
    async with server, asyncio.timeout(20):
        if rate:
            await load.open(2, 0.2, rate)
        while faulty.asked < 3:  # unless the machine takes the whole time for something else
            await load.closed(2, 0.2)
    assert load.statuses["failed"] == faulty.asked // 3 > 0
    assert load.statuses["200"] == faulty.asked - faulty.asked // 3
    assert len(load.took_s) == load.statuses.total()
    assert len(load.late_s) == (60 if rate else 0)


@pytest.mark.parametrize("rate", [None, 300.0])
async def test_requests_to_a_closed_port_fail_and_the_clients_go_on(rate):
    server: asyncio.Server

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.close()
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.rpartition(b"content-length: ")[2]))
        writer.write(ANSWER)
        writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    load = Load(port, Asks(port, 2, 1, seed=1))
    seconds = 0.2 if rate else 2.5  # closed: enough for the first to be answered, and more to fail
    async with asyncio.timeout(20):
        await (load.open(1, seconds, rate) if rate else load.closed(1, seconds))
    assert load.statuses["200"] == 1
    assert load.statuses["failed"] == (59 if rate else pytest.approx(125, abs=124))
    assert len(load.took_s) == load.statuses.total()
