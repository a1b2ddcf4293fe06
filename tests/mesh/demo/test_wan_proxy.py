"""The link between real sockets: delay, throughput, order, half-close, back-pressure, cuts."""

import asyncio
import contextlib
import hashlib
import random

import pytest
import uvloop

from infra.address import Address
from infra.process import end_all
from mesh.demo.wan_proxy import WanProxy
from tests.support.ports import free_ports
from tests.support.until import PATIENCE_S, until

CHUNK = 64 * 1024
TIMING_S = 0.006  # of timers and sockets


@contextlib.asynccontextmanager
async def listening(handler):
    """A server on a free port whose connections `handler(reader, writer)` serves."""
    tasks = set()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            await handler(reader, writer)
        except ConnectionError:
            pass  # the tests cut links on purpose
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Address(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()
        await end_all(tasks)


@contextlib.asynccontextmanager
async def connected(address):
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()  # close() would wait for a peer that does not read


async def echo(reader, writer):
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def round_trips(address, count):
    loop, taken = asyncio.get_running_loop(), []
    async with connected(address) as (reader, writer):
        for _ in range(count):
            started = loop.time()
            writer.write(b"ping")
            await reader.readexactly(4)
            taken.append(loop.time() - started)
    return taken


@pytest.mark.parametrize("rtt_s", [0.020, 0.150])
async def test_a_round_trip_takes_the_rtt(rtt_s):
    async with (
        asyncio.timeout(PATIENCE_S),
        listening(echo) as target,
        WanProxy(target, one_way_s=rtt_s / 2) as link,
    ):
        # A busy machine makes some round trips longer, none shorter: the quickest shows the link's.
        taken = await round_trips(link.address, 15)
        while min(taken) > rtt_s + TIMING_S:
            taken += await round_trips(link.address, 15)
    assert min(taken) == pytest.approx(rtt_s, abs=TIMING_S)


async def test_what_went_each_way_is_counted():
    async def answer_twice(reader, writer):
        writer.write(2 * await reader.readexactly(10))
        await writer.drain()

    async with (
        asyncio.timeout(PATIENCE_S),
        listening(answer_twice) as target,
        WanProxy(target, one_way_s=0.0) as link,
        connected(link.address) as (reader, writer),
    ):
        writer.write(b"0123456789")
        await reader.readexactly(20)
        assert (link.to_target_bytes, link.from_target_bytes) == (10, 20)


async def test_delay_costs_no_throughput_and_no_byte():
    """One chunk per delay would take 256 x 50 ms; in flight together they take little more."""
    sent = random.Random(1).randbytes(16 * 1024 * 1024)
    digest = hashlib.blake2b()
    done = asyncio.Event()

    async def receive(reader, writer):
        while data := await reader.read(CHUNK):
            digest.update(data)
        done.set()

    loop = asyncio.get_running_loop()
    async with (
        asyncio.timeout(PATIENCE_S),
        listening(receive) as target,
        WanProxy(target, one_way_s=0.050) as link,
        connected(link.address) as (_, writer),
    ):
        started = loop.time()
        for at in range(0, len(sent), CHUNK):
            writer.write(sent[at : at + CHUNK])
            await writer.drain()
        writer.write_eof()
        await done.wait()
        taken_s = loop.time() - started
    assert digest.digest() == hashlib.blake2b(sent).digest()
    assert taken_s < 9.0, "well under a second where nothing else needs the machine"


async def test_one_side_may_finish_before_the_other():
    async def answer_after_eof(reader, writer):
        question = await reader.read(-1)
        writer.write(b"answer to " + question)
        writer.write_eof()

    async with (
        asyncio.timeout(PATIENCE_S),
        listening(answer_after_eof) as target,
        WanProxy(target, one_way_s=0.010) as link,
        connected(link.address) as (reader, writer),
    ):
        writer.write(b"question")
        writer.write_eof()
        assert await reader.read(-1) == b"answer to question"
        await until(lambda: link.connections == 0)


async def test_a_receiver_that_stops_reading_stops_the_sender():
    held_bytes_max = 256 * 1024
    release = asyncio.Event()

    async def read_late(reader, writer):
        await release.wait()
        writer.write(hashlib.blake2b(await reader.read(-1)).digest())

    async with (
        asyncio.timeout(PATIENCE_S),
        listening(read_late) as target,
        WanProxy(target, one_way_s=0.005, held_bytes_max=held_bytes_max) as link,
        connected(link.address) as (reader, writer),
    ):
        sent = random.Random(2).randbytes(32 * 1024 * 1024)
        writer.write(sent)
        writer.write_eof()
        stuck = await settled(lambda: writer.transport.get_write_buffer_size())
        assert stuck > 0  # the rest fills kernel buffers and the line
        assert link.held_bytes <= held_bytes_max + 512 * 1024  # one more read may come in
        release.set()
        assert await reader.readexactly(64) == hashlib.blake2b(sent).digest()


async def test_a_cut_drops_connections_at_once_with_all_that_was_on_its_way():
    async with (
        asyncio.timeout(PATIENCE_S),
        listening(echo) as target,
        WanProxy(target, one_way_s=2 * PATIENCE_S) as link,
        connected(link.address) as (reader, writer),
    ):
        writer.write(b"on its way")
        await until(lambda: link.to_target_bytes)
        link.cut()
        with contextlib.suppress(ConnectionError):  # an end of file is as good as a reset
            assert await reader.read(1) == b""


async def test_a_cut_link_refuses_connections_until_it_is_healed():
    address = Address("127.0.0.1", free_ports(1)[0])
    async with (
        asyncio.timeout(PATIENCE_S),
        listening(echo) as target,
        WanProxy(target, one_way_s=0.010, listen=address) as link,
        connected(link.address) as (reader, writer),
    ):
        writer.write(b"first")
        assert await reader.readexactly(5) == b"first"
        link.cut()
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
        assert link.connections == 0

        await link.heal()
        assert link.address == address
        assert len(await round_trips(address, 2)) == 2


async def test_a_broken_connection_breaks_the_other_side_after_what_was_sent():
    async def answer_and_break(reader, writer):
        await reader.readexactly(1)
        writer.write(b"last words")
        await writer.drain()

    async with (
        asyncio.timeout(PATIENCE_S),
        listening(answer_and_break) as target,
        WanProxy(target, one_way_s=0.020) as link,
        connected(link.address) as (reader, writer),
    ):
        writer.write(b"?")
        assert await reader.read(-1) == b"last words"


async def test_nobody_at_the_target_ends_the_connection():
    gone = Address("127.0.0.1", free_ports(1)[0])
    async with asyncio.timeout(PATIENCE_S), WanProxy(gone, one_way_s=0.010) as link:
        reader, writer = await asyncio.open_connection(*link.address)
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await until(lambda: link.connections == 0)


async def test_a_client_that_leaves_while_the_link_is_dialing_leaves_nothing_behind():
    async with (
        asyncio.timeout(PATIENCE_S),
        listening(echo) as target,
        WanProxy(target, one_way_s=0.010) as link,
    ):
        for _ in range(20):
            _, writer = await asyncio.open_connection(*link.address)
            writer.transport.abort()
        await until(lambda: link.connections == 0)


@pytest.mark.parametrize(
    "scenario",
    [
        test_delay_costs_no_throughput_and_no_byte,
        test_one_side_may_finish_before_the_other,
        test_a_receiver_that_stops_reading_stops_the_sender,
        test_a_cut_drops_connections_at_once_with_all_that_was_on_its_way,
        test_a_cut_link_refuses_connections_until_it_is_healed,
        test_a_broken_connection_breaks_the_other_side_after_what_was_sent,
        test_nobody_at_the_target_ends_the_connection,
        test_a_client_that_leaves_while_the_link_is_dialing_leaves_nothing_behind,
    ],
)
def test_the_event_loop_of_the_command_serves_it_as_well(scenario):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(scenario())


async def settled(value, *, unchanged_s=0.3):
    """`value()` once it has stayed the same for a while."""
    last = value()
    while True:
        await asyncio.sleep(unchanged_s)
        if (now := value()) == last:
            return now
        last = now
