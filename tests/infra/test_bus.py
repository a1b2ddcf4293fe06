import asyncio
import contextlib
import os
import signal
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
import nats.errors
import pytest
import uvloop

from infra import bus
from infra.topology import parse
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.nats_server import NatsServer, running_nats_server
from tests.support.stopped import stopped
from tests.support.until import PATIENCE_S, until

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])


async def test_connects_under_its_own_inbox_prefix(nats_server: NatsServer):
    client = await bus.connect(
        bus.BusAddress(nats_server.url), name="t", inbox_prefix="_INBOX.us.r1"
    )
    assert client.new_inbox().startswith("_INBOX.us.r1.")
    await client.close()


async def test_survives_a_server_restart_and_logs_it(nats_server: NatsServer, caplog):
    caplog.set_level("WARNING")  # as routers of `mesh up` have it
    lost, back = asyncio.Event(), asyncio.Event()
    client = await bus.connect(
        bus.BusAddress(nats_server.url),
        name="t",
        inbox_prefix="_INBOX.us.r1",
        on_lost=lost.set,
        on_back=back.set,
    )
    got = asyncio.Queue()
    await client.subscribe("a", cb=got.put)
    await flushed(client)
    await nats_server.restart()
    async with asyncio.timeout(PATIENCE_S):
        await lost.wait()
        await back.wait()
    said = [record.getMessage() for record in caplog.records if record.name == "infra.bus"]
    at = f"the bus at {nats_server.url}"
    assert [line for line in said if at in line] == [
        f"t: lost {at}, reconnecting",
        f"t: {at} is back",
    ]
    await client.publish("a", b"again")
    async with asyncio.timeout(PATIENCE_S):
        assert (await got.get()).data == b"again"
    await client.close()


def unprocessed(caplog) -> list[str]:
    """The log lines about messages that could not be processed."""
    return [text for text in caplog.messages if "could not be processed" in text]


async def test_a_listener_that_raises_is_logged_and_called_again(nats_server: NatsServer, caplog):
    received: list[bytes] = []
    problems: list[Exception] = []

    def listener(msg) -> None:
        received.append(msg.data)
        if msg.data == b"1":
            raise ValueError("one")

    client = await bus.connect(
        bus.BusAddress(nats_server.url), name="x", inbox_prefix="_INBOX.x", on_error=problems.append
    )
    await client.listen("a.*", listener)
    for text in (b"1", b"2"):
        await client.publish("a.b", text, headers={"X": "y"})
    await client.flush()
    assert received == [b"1", b"2"]
    assert unprocessed(caplog) == ["a message on b'a.b' could not be processed: ValueError: one"]
    assert problems == []
    await client.close()


@pytest.mark.parametrize(
    ("headers", "arrived"),
    [
        ({"Mesh-Attempt": "1", "traceparent": "00-ab-cd-00"}, None),
        ({"X": ""}, None),
        ({"X": "a\r\nY: b"}, {"X": "a  Y: b"}),
        ({"X": "a\tb"}, {"X": "a\tb"}),
        ({" X ": "a"}, {"X": "a"}),
        ({"X_y": "a"}, {"X_y": "a"}),
        ({}, {}),
    ],
)
async def test_headers_arrive_as_they_would_from_nats_pys_own_client(nats_server, headers, arrived):
    """Above all no value ends its line, whatever a client had written in it."""
    received: list[dict[str, str]] = []
    address = bus.BusAddress(nats_server.url)
    ours = await bus.connect(address, name="x", inbox_prefix="_INBOX.x")
    theirs = await nats.connect(nats_server.url)
    await ours.listen("a", lambda msg: received.append(msg.headers or {}))
    await ours.flush()
    await theirs.publish("a", b"text", "b", headers)
    block = bus.plain_headers(headers)
    if block is not None:
        await ours.publish_described("a", b"text", "b", headers, block)
    await flushed(theirs)
    await ours.flush()
    assert (block is None) is (arrived is not None)
    assert received == [headers if arrived is None else arrived] * len(received)
    assert len(received) == (2 if block else 1)
    await theirs.close()
    await ours.close()


@pytest.mark.parametrize(("subject", "reply"), [("a b", ""), ("a", "b 1 1\r\n"), ("", "")])
async def test_a_subject_that_would_end_its_part_of_the_line_is_refused(
    nats_server, subject, reply
):
    client = await bus.connect(bus.BusAddress(nats_server.url), name="x", inbox_prefix="_INBOX.x")
    headers = {"X": "y"}
    block = bus.plain_headers(headers)
    assert block is not None
    with pytest.raises(nats.errors.BadSubjectError):
        await client.publish_described(subject, b"", reply, headers, block)
    await client.close()


def test_a_header_without_a_legal_name_is_left_to_nats_py():
    assert bus.plain_headers({"X: y\r\nZ": "a"}) is None


@pytest.mark.parametrize("headers", [b"ab", b"NATS/1.0", b"NATS/1.0 \xff\xff\xff\r\n\r\n"])
async def test_messages_with_malformed_headers_end_no_reading(nats_server, headers, caplog):
    """Neither that of a listener nor that of a subscription; many are one line in the log."""
    received: list[bytes] = []
    problems: list[Exception] = []
    done = asyncio.Event()

    async def subscribed(msg) -> None:
        received.append(msg.data)
        done.set()

    client = await bus.connect(
        bus.BusAddress(nats_server.url), name="x", inbox_prefix="_INBOX.x", on_error=problems.append
    )
    await client.listen("a", lambda msg: received.append(msg.data))
    await client.subscribe("b", cb=subscribed)
    await client.flush()
    _, writer = await asyncio.open_connection("127.0.0.1", nats_server.port)
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
    for subject in (b"a", b"b"):
        sizes = b"%d %d" % (len(headers), len(headers) + 1)
        writer.write(b"HPUB %b %b\r\n%bx\r\nPUB %b 1\r\ny\r\n" % (subject, sizes, headers, subject))
    await writer.drain()
    async with asyncio.timeout(5):
        await done.wait()
    writer.close()
    assert received == [b"y", b"y"]
    assert len(unprocessed(caplog)) == 1
    assert problems == [], "they pass for no error of the server"
    await client.close()


INFO = b'INFO {"server_id":"x","version":"2.12.7","max_payload":1000}\r\n'


@contextlib.asynccontextmanager
async def client_of(serve):
    """Of a server that speaks as `serve` does."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        address = bus.BusAddress(f"nats://{host}:{port}")
        client = await bus.connect(address, name="t", inbox_prefix="_INBOX.t")
        yield client
        await bus.close(client)


async def test_a_flush_pings_behind_all_messages():
    received: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        while line := await reader.readline():
            received.append(line.split()[0].decode())
            if received[-1] == "PING":
                writer.write(b"PONG\r\n")
        writer.close()

    async with client_of(serve) as client:
        received.clear()
        await client.subscribe("a")
        await client.flush()
        assert "PING" in received[received.index("SUB") :]


async def test_a_flush_goes_on_whose_answer_was_lost_with_the_connection():
    pings = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal pings
        writer.write(INFO)
        while line := await reader.readline():
            if not line.startswith(b"PING"):
                continue
            pings += 1
            if pings == 2:  # the first is the login's
                break
            writer.write(b"PONG\r\n")
        writer.close()

    async with client_of(serve) as client:
        await client.flush(PATIENCE_S)
        assert pings > 2


async def test_a_late_answer_to_a_flush_that_timed_out_does_no_harm(nats_server, caplog):
    address = bus.BusAddress(nats_server.url)
    client = await bus.connect(address, name="t", inbox_prefix="_INBOX.t")
    received = asyncio.Queue()
    await client.subscribe("a", cb=received.put)
    async with stopped(nats_server.pid):
        with pytest.raises(nats.errors.FlushTimeoutError):
            await client.flush(0.05)
    await client.flush()
    await client.publish("a", b"1")
    async with asyncio.timeout(PATIENCE_S):
        assert (await received.get()).data == b"1"
    assert client.is_connected
    assert [record for record in caplog.records if record.name.startswith("nats")] == []
    await client.close()


async def test_a_fault_of_the_client_while_closing_is_only_logged(caplog):
    class Faulty:
        async def close(self) -> None:
            raise RuntimeError("of the library")

    await bus.close(Faulty())
    assert "disconnecting from the bus: of the library" in caplog.messages


async def test_a_cancelled_connect_leaves_nothing_open(monkeypatch):
    """At every moment: at some of them nats-py loses a cancel, and would go on trying."""
    monkeypatch.setattr(bus, "START_TIMEOUT_S", 600.0)
    there = set()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who = writer.get_extra_info("peername")
        there.add(who)
        await reader.read()
        there.remove(who)
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    address = bus.BusAddress(f"nats://{host}:{port}")
    async with server:
        for moments in range(16):
            connecting = asyncio.create_task(
                bus.connect(address, name="t", inbox_prefix="_INBOX.us.r1")
            )
            for _ in range(moments):
                await asyncio.sleep(0)
            connecting.cancel()
            await until(connecting.done)
            assert connecting.cancelled()
        # Connections are taken in their order: with this one, all have come that ever will.
        _, last = await asyncio.open_connection(host, port)
        await until(lambda: there == {last.get_extra_info("sockname")})
        last.close()
        await until(lambda: not there)


async def test_an_error_without_a_text_is_logged_by_its_name(nats_server: NatsServer, caplog):
    address = bus.BusAddress(nats_server.url)
    client = await bus.connect(address, name="t", inbox_prefix="_INBOX.us.r1")
    await client._error_cb(TimeoutError())
    assert "t: bus: TimeoutError" in caplog.messages
    await client.close()


async def test_no_server_is_one_clear_error(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(bus, "START_TIMEOUT_S", 1.0)
    with pytest.raises(bus.BusUnreachable, match="is nats-server running"):
        await bus.connect(bus.BusAddress("nats://127.0.0.1:1"), name="t", inbox_prefix="_INBOX.x")
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody goes on trying"


@pytest.mark.parametrize(
    ("user", "password", "says"),
    [
        (None, None, "requires a user: set NATS_USER and NATS_PASSWORD"),
        ("router", "wrong", "refused user 'router': are NATS_USER"),
    ],
)
async def test_a_refused_login_is_reported_at_once_and_once(tmp_path, caplog, user, password, says):
    regions = NatsRegions(parse(mesh_toml(("us", "eu"), replicas=1), "mesh.toml"), tmp_path)
    try:
        await regions.start()
        address = bus.BusAddress(regions.address("us", "router").url, user, password)
        async with asyncio.timeout(bus.START_TIMEOUT_S / 2):
            with pytest.raises(bus.BusUnreachable, match=says):
                await bus.connect(address, name="t", inbox_prefix="_INBOX.us.r1")
    finally:
        await regions.stop()
    assert not [record for record in caplog.records if record.name == "infra.bus"]


async def test_a_server_that_is_not_there_yet_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(bus, "START_TIMEOUT_S", 1.0)
    with pytest.raises(bus.BusUnreachable, match="is nats-server running"):
        await bus.connect(bus.BusAddress("nats://127.0.0.1:1"), name="t", inbox_prefix="_INBOX.x")
    [said] = [record.getMessage() for record in caplog.records if record.name == "infra.bus"]
    assert said.startswith("t: no bus at nats://127.0.0.1:1 yet (")


@contextlib.asynccontextmanager
async def saying(serve: Callable[[StreamReader, StreamWriter], Awaitable[None]]):
    """A server of which `serve` speaks, behind its INFO, on each connection; yields its address."""
    there = set()

    async def handle(reader: StreamReader, writer: StreamWriter) -> None:
        there.add(writer)
        try:
            writer.write(b'INFO {"server_id":"x","version":"2.12.7","max_payload":1000}\r\n')
            await serve(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            there.remove(writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield bus.BusAddress(f"nats://{host}:{port}")
        await until(lambda: not there)


async def until_published(reader: StreamReader, writer: StreamWriter) -> None:
    """Answer as a server does until the client publishes or is gone."""
    while (line := await reader.readline()) and not line.startswith(b"PUB"):
        if line.startswith(b"PING"):
            writer.write(b"PONG\r\n")


@LOOPS
def test_leaving_after_the_server_was_killed_leaves_nothing_behind(tmp_path, caplog, loop):
    async def play() -> None:
        async with running_nats_server(tmp_path) as server:
            client = await bus.connect(
                bus.BusAddress(server.url), name="t", inbox_prefix="_INBOX.t"
            )
            await client.subscribe("a", cb=asyncio.Queue().put)
            await flushed(client)
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda: not client.is_connected)
            await client.publish("a", b"too late")
            await bus.close(client)
            assert client.is_closed
            me = {asyncio.current_task()}
            await until(lambda: asyncio.all_tasks() == me)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(play())
    assert "disconnected; unsent messages are lost" in caplog.messages


@LOOPS
def test_leaving_at_any_moment_of_a_loss_is_no_cancel(loop):
    """The task that reconnects is cancelled wherever it is."""

    async def play(turns: int) -> None:
        lost = asyncio.Event()

        async def serve(reader: StreamReader, writer: StreamWriter) -> None:
            await until_published(reader, writer)
            writer.close()
            lost.set()

        async with saying(serve) as address:
            client = await bus.connect(address, name="t", inbox_prefix="_INBOX.t")
            await client.publish("a", b"")
            await lost.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            await bus.close(client)
            assert client.is_closed

    for turns in range(16):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(play(turns))


async def test_leaving_ends_an_attempt_to_reconnect_that_loses_a_cancel(monkeypatch):
    """As Python 3.11's `wait_for` does when a cancel comes together with a refused connection."""
    monkeypatch.setattr(bus, "RECONNECT_WAIT_S", 0.001)
    trying, lost_cancels = asyncio.Event(), 0
    async with saying(until_published) as address:
        client = await bus.connect(address, name="t", inbox_prefix="_INBOX.t")

        async def refused(*_) -> None:
            nonlocal lost_cancels
            trying.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost_cancels += 1
                if lost_cancels > 1:
                    raise
                raise ConnectionRefusedError from None

        monkeypatch.setattr(client, "_connect_to_server", refused)
        await client.publish("a", b"")  # the server ends the connection at it
        async with asyncio.timeout(PATIENCE_S):
            await trying.wait()
            await bus.close(client)
    assert lost_cancels  # the next one may come between two attempts
    assert asyncio.all_tasks() == {asyncio.current_task()}


@LOOPS
def test_a_server_that_resets_at_any_moment_is_connected_again(monkeypatch, loop):
    """While INFO is read and answered: a write after the loss must not end the reconnecting."""
    monkeypatch.setattr(bus, "RECONNECT_WAIT_S", 0.001)
    moments = 16
    resets = [*range(moments), None, *range(moments), None]  # None: serves until it is published to

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        moment = resets.pop(0)
        if moment is None:
            await until_published(reader, writer)
            return
        for _ in range(moment):
            await asyncio.sleep(0)
        linger = struct.pack("ii", 1, 0)  # no goodbye but a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async def play() -> None:
        async with saying(serve) as address:
            client = await bus.connect(address, name="t", inbox_prefix="_INBOX.t")
            assert len(resets) == moments + 1
            await client.publish("a", b"")
            await until(lambda: not resets and client.is_connected)
            await bus.close(client)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(play())
