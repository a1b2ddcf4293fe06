"""A port with TLS, on the loop of tests and on that of live routers."""

import asyncio
import contextlib
import logging
import socket
import ssl
import subprocess

import pytest
import uvloop

from mesh.http import tls as tls_module
from mesh.http.http_request import Answer, HttpRequest
from mesh.http.server import HttpServer, HttpTimes
from mesh.http.tls import TlsUnusable, read_tls
from tests.support.certificates import made_certificate
from tests.support.until import PATIENCE_S

HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
LAST = b"connection: close\r\n\r\n"
each_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


async def handle(request: HttpRequest) -> Answer:
    while await request.body.next():
        pass
    return Answer(200, {}, b"served")


@contextlib.asynccontextmanager
async def served(tls, handler=handle, **options):
    counted: list[str] = []
    server = HttpServer(handler, region="us", count=counted.append, **options)
    await server.listen("127.0.0.1", 0, tls=tls)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield server, counted
    finally:
        await server.close(0.1)


async def asked(port: int, context: ssl.SSLContext | None, head: bytes = HEAD + LAST) -> bytes:
    """All that comes back on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(head)
        return await reader.read()
    finally:
        writer.transport.abort()


async def wait_until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@each_loop
def test_requests_are_served_and_h1_is_agreed_on(run, tmp_path):
    made = made_certificate(tmp_path)
    made.client.set_alpn_protocols(["h2", "http/1.1"])

    async def go():
        context = made.client
        context.set_alpn_protocols(["h2", "http/1.1"])
        async with served(made.tls) as (server, counted):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
            chosen = writer.get_extra_info("ssl_object")
            for _ in range(3):
                writer.write(HEAD + b"\r\n")
                assert (await reader.readuntil(b"served")).startswith(b"HTTP/1.1 200")
            writer.close()
            await wait_until(lambda: not server.clients)
            return chosen.selected_alpn_protocol(), chosen.version(), counted

    assert run(go()) == ("http/1.1", "TLSv1.3", [])


@each_loop
def test_requests_that_are_sent_early_are_all_answered(run, tmp_path):
    made = made_certificate(tmp_path)

    async def go():
        async with served(made.tls) as (server, _):
            return await asked(server.port, made.client, (HEAD + b"\r\n") * 50 + HEAD + LAST)

    assert run(go()).count(b"HTTP/1.1 200") == 51


@each_loop
def test_more_than_a_last_request_is_answered_to_its_end(run, tmp_path):
    made = made_certificate(tmp_path)

    async def go():
        async with served(made.tls) as (server, _):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=made.client
            )
            writer.write(HEAD + LAST + HEAD + b"\r\n")
            got = await reader.readuntil(b"served")
            writer.transport.abort()
            return got

    assert run(go()).startswith(b"HTTP/1.1 200")


@each_loop
def test_plain_http_reads_what_to_do(run, tmp_path):
    made = made_certificate(tmp_path)

    async def go():
        async with served(made.tls) as (server, counted):
            return await asked(server.port, None), counted

    answer, counted = run(go())
    assert answer.startswith(b"HTTP/1.1 400") and b"https://" in answer
    assert counted == ["plain_http"]


@each_loop
def test_failed_handshakes_are_counted_and_logged_seldom(run, tmp_path, caplog):
    made, other = made_certificate(tmp_path / "a"), made_certificate(tmp_path / "b")

    async def go():
        async with served(made.tls) as (server, counted):
            for _ in range(30):
                with pytest.raises(ssl.SSLCertVerificationError):
                    await asked(server.port, other.client)
            await wait_until(lambda: len(counted) == 30)
            assert (await asked(server.port, made.client)).endswith(b"served")
            return counted

    with caplog.at_level(logging.WARNING):
        assert set(run(go())) == {"handshakes"}
    assert 1 <= len([one for one in caplog.records if "handshake" in one.getMessage()]) <= 2


@each_loop
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"], ids=["nothing", "a beginning"])
def test_who_does_not_finish_a_handshake_is_let_go(run, said, tmp_path, monkeypatch):
    monkeypatch.setattr(tls_module, "HANDSHAKE_S", 0.2)
    made = made_certificate(tmp_path)

    async def go():
        async with served(made.tls) as (server, counted):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(said)
            assert await reader.read() == b""
            writer.transport.abort()
            await wait_until(lambda: counted)
            return counted, server._tls.handshakes

    assert run(go()) == (["handshakes"], set())


@each_loop
def test_silent_connections_hold_others_up_for_a_moment_only(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tls_module, "HANDSHAKES_MAX", 8)
    monkeypatch.setattr(tls_module, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(tls_module, "HURRIED_S", 0.2)
    made = made_certificate(tmp_path)

    async def go():
        async with served(made.tls) as (server, _):
            address = ("127.0.0.1", server.port)
            silent = [socket.create_connection(address) for _ in range(30)]
            await wait_until(lambda: len(server._tls.handshakes) == 8)
            answer = await asked(server.port, made.client)
            for one in silent:
                one.close()
            return answer

    assert run(go()).endswith(b"served")


@each_loop
def test_a_new_certificate_holds_for_new_connections_and_cuts_no_other(run, tmp_path):
    old, new = made_certificate(tmp_path / "a"), made_certificate(tmp_path / "b")

    async def go():
        async with served(old.tls) as (server, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=old.client)
            writer.write(HEAD + b"\r\n")
            await reader.readuntil(b"served")
            server.renew(new.tls)
            assert (await asked(server.port, new.client)).endswith(b"served")
            with pytest.raises(ssl.SSLCertVerificationError):
                await asked(server.port, old.client)
            writer.write(HEAD + b"\r\n")
            return await reader.readuntil(b"served")

    assert run(go()).startswith(b"HTTP/1.1 200")


@each_loop
def test_clients_show_a_certificate_where_that_is_asked(run, tmp_path):
    made = made_certificate(tmp_path / "server")
    right = made_certificate(tmp_path / "clients", "client")
    wrong = made_certificate(tmp_path / "others", "client")
    tls = read_tls(made.cert, made.key, right.ca)

    async def ask(port: int, shown) -> bytes:
        context = made.client
        if shown is not None:
            context.load_cert_chain(shown.cert, shown.key)
        try:
            return await asked(port, context)
        except (ssl.SSLError, ConnectionError):
            return b""

    async def go():
        async with served(tls) as (server, _):
            return [await ask(server.port, shown) for shown in (right, wrong, None)]

    served_to, *refused = run(go())
    assert served_to.endswith(b"served")
    assert refused == [b"", b""]


@each_loop
def test_a_slow_reader_gets_all_of_a_large_last_answer(run, tmp_path):
    made, size = made_certificate(tmp_path), 8_000_000

    async def large(request: HttpRequest) -> Answer:
        return Answer(200, {}, b"x" * size)

    async def go():
        async with served(made.tls, large, times=HttpTimes(headers_s=0.5)) as (server, _):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=made.client, limit=65536
            )
            writer.write(HEAD + LAST)
            got = len(await reader.readuntil(b"\r\n\r\n"))
            body = 0
            while piece := await reader.read(200_000):
                body += len(piece)
                await asyncio.sleep(0.01)
            writer.transport.abort()
            return got, body

    head, body = run(go())
    assert head and body == size


@each_loop
def test_a_server_that_retires_serves_who_was_shaking_hands(run, tmp_path):
    made = made_certificate(tmp_path)

    async def go():
        async with served(made.tls) as (server, _):
            plug = socket.create_connection(("127.0.0.1", server.port))
            await wait_until(lambda: server._tls.handshakes)
            retiring = asyncio.create_task(server.retire(20.0))
            reader, writer = await asyncio.open_connection(
                sock=plug, ssl=made.client, server_hostname="127.0.0.1"
            )
            writer.write(HEAD + b"\r\n")
            got = await reader.read()
            writer.transport.abort()
            await retiring
            return got

    got = run(go())
    assert got.endswith(b"served") and b"connection: close" in got.lower()


def test_files_that_cannot_be_served_with_are_named(tmp_path):
    made, other = made_certificate(tmp_path / "a"), made_certificate(tmp_path / "b")
    with pytest.raises(TlsUnusable, match=r"none\.pem: can't be read"):
        read_tls(tmp_path / "none.pem", made.key)
    with pytest.raises(TlsUnusable, match="the key is that of another certificate"):
        read_tls(made.cert, other.key)
    with pytest.raises(TlsUnusable, match="no certificates in PEM"):
        read_tls(made.cert, made.key, made.key)
    locked = tmp_path / "locked.key"
    encrypt = ["openssl", "pkcs8", "-topk8", "-v2", "aes-256-cbc", "-passout", "pass:secret"]
    subprocess.run([*encrypt, "-in", made.key, "-out", locked], check=True, capture_output=True)
    with pytest.raises(TlsUnusable, match="without"):
        read_tls(made.cert, locked)
    assert read_tls(made.cert, made.key) == made.tls != other.tls
