"""Clients that take connections and memory and give nothing for it: they cost others nothing."""

import asyncio
import contextlib

import orjson
import pytest

from mesh.http import request_body as upload
from mesh.http.server import PROBES, HttpTimes
from schemas.exchange import BODY_BYTES_MAX
from tests.support.raw_http import connections
from tests.support.small_mesh import PATIENT, chat, client, one_replica
from tests.support.until import PATIENCE_S

CHAT = "/v1/chat/completions"
ATTACKERS = 16
HUNDREDS = 300


@contextlib.asynccontextmanager
async def region(nats_server, **limits):
    async with one_replica(nats_server, **PATIENT, **limits) as mesh:
        [engine] = mesh.engines
        mesh.engine = engine
        yield mesh


@pytest.fixture
async def mesh(nats_server):
    async with region(nats_server) as mesh:
        yield mesh


async def answer(reader: asyncio.StreamReader) -> bytes:
    """All that comes before the connection ends; empty where it was cut."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    return b""


def head(length: int, *more: str) -> bytes:
    lines = (f"POST {CHAT} HTTP/1.1", "host: x", f"content-length: {length}", *more, "", "")
    return "\r\n".join(lines).encode()


async def test_bodies_that_are_announced_and_never_sent_take_no_room(mesh):
    async with connections(mesh.urls["us"], ATTACKERS) as pairs, client() as session:
        for _, writer in pairs:
            writer.write(head(BODY_BYTES_MAX))
        router = mesh.routers["us"]
        clients = router._http.clients
        await mesh.until(
            lambda: sum(one.is_answering for one in clients) >= ATTACKERS, "the heads to be read"
        )
        for _ in range(3):
            async with session.post(mesh.urls["us"] + CHAT, json=chat()) as answer:
                assert answer.status == 200, await answer.text()
        async with session.get(mesh.urls["us"] + "/ready") as answer:
            assert answer.status == 200


def turned_away(mesh, why: str) -> float:
    return mesh.sample("us", "mesh_http_turned_away_total", why=why)


async def test_a_body_that_stops_on_its_way_is_given_up(mesh, monkeypatch):
    monkeypatch.setattr(upload, "WINDOW_S", 0.2)
    async with connections(mesh.urls["us"], 1) as [(reader, writer)]:
        writer.write(head(BODY_BYTES_MAX) + b'{"model":"tiny",' * 10_000)
        got = await reader.readuntil(b"}}")
    assert b" 408 " in got.split(b"\r\n", 1)[0] and b'"code":"request_timeout"' in got
    assert mesh.routers["us"].requests.bodies.taken_bytes == 0
    assert turned_away(mesh, "request_timeout") == 1


async def test_a_body_that_trickles_fast_enough_is_served(mesh):
    body = orjson.dumps(chat("x" * 50_000))
    async with connections(mesh.urls["us"], 1) as [(reader, writer)]:
        writer.write(head(len(body), "connection: close"))
        for at in range(0, len(body), 10_000):
            writer.write(body[at : at + 10_000])
            await writer.drain()
            await asyncio.sleep(0.01)
        assert b" 200 " in (await answer(reader)).split(b"\r\n", 1)[0]


async def test_hundreds_of_connections_that_dribble_headers_are_let_go(nats_server):
    async def dribble(url: str) -> bytes:
        async with connections(url, 1) as [(reader, writer)]:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-a: ")
            more = asyncio.create_task(drip(writer))
            try:
                return await answer(reader)
            finally:
                more.cancel()

    async def drip(writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            await asyncio.sleep(0.2)
            writer.write(b"a")

    async def nothing(url: str) -> bytes:
        async with connections(url, 1) as [(reader, _)]:
            return await answer(reader)

    async with (
        region(nats_server, http_times=HttpTimes(headers_s=1.0)) as mesh,
        client() as session,
    ):
        url = mesh.urls["us"]
        all_of_them = asyncio.gather(*(one(url) for one in (dribble, nothing) * (HUNDREDS // 2)))
        async with session.post(url + CHAT, json=chat()) as served:
            assert served.status == 200
        got = await all_of_them
        said = [text for text in got[::2] if text]  # a byte in flight may have cut some
        assert said and all(text.startswith(b"HTTP/1.1 408 ") for text in said)
        assert set(got[1::2]) == {b""}
        assert turned_away(mesh, "headers_late") == HUNDREDS
        await mesh.until(lambda: mesh.sample("us", "mesh_http_connections") <= 1, "all to be gone")


async def test_idle_connections_are_closed_without_a_word(nats_server):
    async with (
        region(nats_server, http_times=HttpTimes(headers_s=240.0, idle_s=0.5)) as mesh,
        connections(mesh.urls["us"], 1) as [(reader, writer)],
    ):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await answer(reader)).endswith(b"ok\n")


async def test_who_comes_to_a_full_router_is_told_and_probes_are_answered(nats_server):
    most = 20
    async with (
        region(nats_server, connections_max=most) as mesh,
        connections(mesh.urls["us"], most) as held,
    ):
        url = mesh.urls["us"]
        await mesh.until(lambda: mesh.sample("us", "mesh_http_connections") == most, "them all")
        async with client() as session:
            async with session.post(url + CHAT, json=chat()) as refused:
                assert (refused.status, refused.headers["connection"]) == (503, "close")
                assert refused.headers["retry-after"] and refused.headers["x-request-id"]
                assert (await refused.json())["error"]["code"] == "overloaded"
            async with session.get(url + "/health") as alive:
                assert alive.status == 200
            async with session.get(url + "/ready") as ready:
                assert (ready.status, (await ready.json())["error"]["code"]) == (503, "overloaded")
            async with session.get(url + "/metrics") as page:
                assert f"mesh_http_connections_max {most}.0" in await page.text()
        assert turned_away(mesh, "connections") == 1  # probes were served
        held[0][1].transport.abort()
        await mesh.until(lambda: mesh.sample("us", "mesh_http_connections") < most, "a place")
        async with client() as session, session.post(url + CHAT, json=chat()) as served:
            assert served.status == 200


async def test_beyond_the_places_for_probes_nobody_is_read_and_all_are_told(nats_server):
    async with (
        region(nats_server, connections_max=1) as mesh,
        connections(mesh.urls["us"], 1 + PROBES) as _,
    ):
        full = 1 + PROBES
        await mesh.until(lambda: mesh.sample("us", "mesh_http_connections") == full, "them all")
        async with connections(mesh.urls["us"], 5) as pairs:
            for _, writer in pairs:
                writer.write(head(100_000) + b"x" * 100_000)
            for got in await asyncio.gather(*(answer(reader) for reader, _ in pairs)):
                assert got.startswith(b"HTTP/1.1 503 Service Unavailable\r\n"), got
                assert b"retry-after: 1" in got and b"x-mesh-region: us" in got
                assert b'"code":"overloaded"' in got
        # The places of those who said nothing are free again soon.
        left = mesh.until(lambda: mesh.sample("us", "mesh_http_connections") <= 1, "probes to go")
        await left


async def test_a_router_without_room_for_bodies_is_not_ready(mesh, monkeypatch):
    async with client() as session:
        monkeypatch.setattr(mesh.routers["us"].requests.bodies, "_limit_bytes", 1000)
        async with session.get(mesh.urls["us"] + "/ready") as ready:
            assert (ready.status, (await ready.json())["error"]["code"]) == (503, "overloaded")
        async with session.post(mesh.urls["us"] + CHAT, json=chat("x" * 2000)) as refused:
            assert refused.status == 429
