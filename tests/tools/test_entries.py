"""Real nginx and HAProxy, as infra/entry has them, before routers: streams that are silent for
longer than a proxy is patient, and routers that are restarted."""

import asyncio
import io
import time
from functools import partial

import aiohttp
import pytest

from tests.support.batch_regions import batch_toml
from tests.support.nats_regions import running_regions
from tests.support.raw_http import connections
from tests.support.scripted_engine import hang, scripted_engine
from tests.support.small_mesh import PATIENT, small_mesh
from tests.tools.proxies import FILES, HAPROXY, ending, proxy

pytestmark = [pytest.mark.tools, pytest.mark.timeout(180)]
TIMEOUT_S = 6.0  # of the proxies: any process may stand still for two seconds


@pytest.mark.parametrize("name", FILES)
async def test_a_silent_stream_outlives_the_patience_of_a_proxy(nats_server, name):
    """Through one router without the option and one with it, until the first has been given up."""
    gate = asyncio.Event()
    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        engine.behaviour = hang(gate=gate)
        off = await mesh.router("us", "off", sse_keep_alive_s=0.0, **PATIENT)
        on = await mesh.router("us", "on", sse_keep_alive_s=1.0, **PATIENT)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us/off", 1)
        await mesh.until_ready("us/on", 1)
        async with (
            aiohttp.ClientSession() as session,
            proxy(name, [off], TIMEOUT_S) as silent,
            proxy(name, [on], TIMEOUT_S) as kept,
        ):
            waits = asyncio.create_task(ending(session, kept, "kept alive"))
            assert await ending(session, silent, "silent") == "504"
            gate.set()
            assert await waits == "whole"


@pytest.mark.parametrize("name", FILES)
async def test_routers_are_restarted_behind_a_proxy_without_one_failed_request(nats_server, name):
    """Each of two routers ten times, in turn, under streams over kept connections."""
    ends: list[str] = []
    stop = asyncio.Event()

    async def client(session: aiohttp.ClientSession, url: str) -> None:
        while not stop.is_set():
            ends.append(await ending(session, url, f"request {len(ends)}"))

    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        names = ("r1", "r2")
        urls = [await mesh.router("us", router, **PATIENT) for router in names]
        await mesh.agent("us", "us-0", engine)
        places = {"r1": "us", "r2": "us/r2"}
        async with proxy(name, urls) as url, aiohttp.ClientSession() as session:
            for place in places.values():
                await mesh.until_ready(place, 1)
            clients = [asyncio.create_task(client(session, url)) for _ in range(4)]
            for router in names * 10:
                old = mesh.routers[places[router]]
                port = old.http_port
                await old.drain()
                await old.close()
                await mesh.router("us", router, http_port=port, **PATIENT)
                await mesh.until_ready(places[router], 1)
                place = places[router]
                served = partial(mesh.sample, place, "mesh_requests_total", outcome="ok")
                await mesh.until(lambda served=served: served() > 1, "it is asked again")
            stop.set()
            await asyncio.gather(*clients)
    assert {*ends} == {"whole"}, {one: ends.count(one) for one in {*ends}}
    print(f"{name}: {len(ends)} streams over 20 restarts, none failed")


@pytest.fixture
def batch_regions(tmp_path):
    limits = "[batch]\nfiles_mib = 80\nfile_mib_max = 40\n"
    with running_regions(tmp_path, toml=batch_toml(limits=limits)) as regions:
        yield regions


@pytest.mark.parametrize("name", FILES)
async def test_a_batch_file_may_be_larger_than_another_request(batch_regions, name):
    """`file_mib_max` alone limits it; other bodies may have 32 MiB."""
    form, line = aiohttp.FormData({"purpose": "batch"}), b'{"custom_id": "1"}\n'
    lines = io.BytesIO(line * (36 * 2**20 // len(line)))
    form.add_field("file", lines, filename="in.jsonl")
    async with scripted_engine() as engine, small_mesh(batch_regions) as mesh:
        url = await mesh.router("us", **PATIENT)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        door = mesh.routers["us"]._batch
        await mesh.until(lambda: door._store is not None, "the store")
        async with (
            proxy(name, [url]) as entry,
            aiohttp.ClientSession() as session,
            session.post(entry + "/v1/files", data=form) as answer,
        ):
            assert answer.status == 200, await answer.text()


async def test_haproxy_waits_ten_seconds_for_headers(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        url = await mesh.router("us", **PATIENT)
        async with proxy(HAPROXY, [url]) as entry, connections(entry, 1) as [(reader, writer)]:
            began = time.monotonic()
            writer.write(b"GET /ready HTTP/1.1\r\nhost: a\r\n")
            async with asyncio.timeout(60):
                assert b" 408 " in await reader.readline()
            assert time.monotonic() - began > 9
