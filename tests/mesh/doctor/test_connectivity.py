"""Whether a nats-server answers, told from everything else that may be at its address."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from mesh.doctor.connectivity import check_server
from tests.support.nats_server import running_nats_server
from tests.support.ports import free_ports
from tests.support.stopped import stopped

PATIENT_S = 30.0
TRIES = 5


@asynccontextmanager
async def speaker(says):
    """Whoever connects hears that and no more."""

    async def greet(reader, writer):
        writer.write(says)
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"nats://{host}:{port}"


async def test_a_running_server_answers_and_a_stopped_one_times_out(tmp_path):
    async with running_nats_server(tmp_path) as server:
        assert await check_server(server.url, PATIENT_S) is None
        async with stopped(server.pid):
            for _ in range(TRIES):  # this process may stand still before it is connected
                silence = await check_server(server.url, 0.25)
                if silence.listens:
                    break
        assert silence.listens and silence.url == server.url
        assert silence.why == "it accepts connections and sends nothing for 0.25 s"


async def test_nobody_listens():
    [port] = free_ports(1)
    silence = await check_server(f"nats://127.0.0.1:{port}", PATIENT_S)
    assert (silence.why, silence.listens) == ("nobody listens there", False)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"", "it closes connections without sending anything"),
        (b"INFO", "it closes connections without sending anything"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it is not a nats-server"),
    ],
)
async def test_another_program_listens(says, why):
    async with speaker(says) as url:
        silence = await check_server(url, PATIENT_S)
    assert (silence.why, silence.listens) == (why, True)


async def test_an_unknown_host_name_is_reported():
    silence = await check_server("nats://nowhere.invalid:4222", PATIENT_S)
    assert silence.why and not silence.listens
