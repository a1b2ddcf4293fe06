"""Whether a nats-server answers, told from everything else that may be at its address."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from mesh.doctor.reach import silence_at
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


async def test_a_server_that_runs_answers_and_one_that_is_stopped_is_given_up(tmp_path):
    async with running_nats_server(tmp_path) as server:
        assert await silence_at(server.url, PATIENT_S) is None
        async with stopped(server.pid):
            for _ in range(TRIES):  # this process may stand still before it is connected
                silence = await silence_at(server.url, 0.25)
                if silence.listens:
                    break
        assert silence.listens and silence.url == server.url
        assert silence.why == "it takes connections and says nothing for 0.25 s"


async def test_nobody_is_there():
    [port] = free_ports(1)
    silence = await silence_at(f"nats://127.0.0.1:{port}", PATIENT_S)
    assert (silence.why, silence.listens) == ("nobody listens there", False)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"", "it closes connections without a word"),
        (b"INFO", "it closes connections without a word"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no nats-server speaks there"),
    ],
)
async def test_somebody_else_is_there(says, why):
    async with speaker(says) as url:
        silence = await silence_at(url, PATIENT_S)
    assert (silence.why, silence.listens) == (why, True)


async def test_a_name_that_nobody_knows_is_told():
    silence = await silence_at("nats://nowhere.invalid:4222", PATIENT_S)
    assert silence.why and not silence.listens
