"""Encrypted connections of real nats-servers: clients, routes and links; what is refused, and a
change of certificates and of their authority under traffic."""

import asyncio
import contextlib
import json
import re
import ssl
from dataclasses import replace
from pathlib import Path

import aiohttp
import nats.errors
import pytest

from infra import bus
from infra.bus import BusUnreachable
from infra.certificates import change_authority, keep_authority
from infra.nats import region_config
from schemas import subjects
from schemas.ids import RegionId
from tests.support.nats_regions import mesh_toml, running_regions
from tests.support.ports import free_ports
from tests.support.scripted_engine import event, opened, scripted_engine
from tests.support.small_mesh import PATIENT, chat, small_mesh
from tests.support.until import PATIENCE_S, until

DIGEST = subjects.digest(RegionId("us"))


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    """Two linked regions, one of them a cluster of three servers."""
    toml = mesh_toml(("us", "eu"), clusters=("us",))
    with pytest.MonkeyPatch.context() as patch:
        # Who stands still for a second is not to be cut off: no connection may be lost here.
        patch.setattr(bus, "CLUSTER_PING_INTERVAL_S", 60.0)
        patch.setattr(bus, "PING_INTERVAL_S", 60.0)
        patch.setattr(region_config, "PINGS_AMONG_SEVERAL", {"ping_interval": "60s"})
        patch.setattr(region_config, "CLUSTER_PING_INTERVAL", "60s")
        with running_regions(tmp_path_factory.mktemp("tls"), toml=toml, tls=True) as running:
            yield running


async def cut(writer: asyncio.StreamWriter) -> None:
    """Let the connection go, and wait until it is gone."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def shown(port: int) -> bytes:
    """The certificate that a server shows to a client that begins with the handshake."""
    context = ssl._create_unverified_context()
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    await cut(writer)
    return found


async def greeting(port: int) -> dict:
    """What a server says to whoever begins with nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    line = await reader.readline()
    await cut(writer)
    return json.loads(line.removeprefix(b"INFO "))


async def routed(port: int, files: Path | None = None) -> bool:
    """Whether a route's port talks to who shows that certificate, or none."""
    context = ssl._create_unverified_context()
    if files is not None:
        context.load_cert_chain(files.with_suffix(".pem"), files.with_suffix(".key"))
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except (ssl.SSLError, ConnectionError):
        return False
    try:
        return bool(await reader.read(100))
    except (ssl.SSLError, ConnectionError):
        return False
    finally:
        await cut(writer)


async def test_each_kind_of_connection_is_encrypted_and_those_of_servers_both_ways(regions):
    for name in ("us", "eu"):
        for server in regions.topology.region(name).servers:
            assert await shown(server.nats.port)
            assert (await greeting(server.nats.port))["tls_required"]
            if name == "eu":  # which accepts
                info = await greeting(server.leaf.port)
                assert info["tls_required"] and info["tls_verify"]
            if server.cluster is not None:
                assert not await routed(server.cluster.port)
                assert await routed(server.cluster.port, regions.directory / name / "nats-1")


async def test_a_message_crosses_routes_and_a_link(regions):
    receiver = await regions.connect("eu", "router", inbox_prefix=subjects.inbox_prefix("eu", "r1"))
    got: asyncio.Queue[bytes] = asyncio.Queue()
    for number in range(3):
        url = regions.address("us", "router").servers[number]
        address = replace(regions.address("us", "router"), url=url)
        sender = await bus.connect(address, name="us", inbox_prefix="_INBOX.us.r1")
        if number == 0:
            await receiver.listen(
                subjects.digest(RegionId("us")), lambda msg: got.put_nowait(msg.data)
            )
            await receiver.flush()
        async with asyncio.timeout(PATIENCE_S):
            while got.empty():  # interest crosses after the subscription
                await sender.publish(DIGEST, b"%d" % number)
                await asyncio.sleep(0.05)
        while not got.empty():
            assert got.get_nowait() == b"%d" % number
            await asyncio.sleep(0.02)
        await sender.close()
    await receiver.close()


async def test_a_server_without_tls_is_named(tmp_path, nats_server, monkeypatch):
    monkeypatch.setattr(bus, "START_TIMEOUT_S", 1.5)
    address = bus.BusAddress(nats_server.url, "x", "y", keep_authority(tmp_path, "test").base64)
    with pytest.raises(BusUnreachable, match="speaks no TLS"):
        await bus.connect(address, name="x", inbox_prefix="_INBOX")


async def test_who_has_no_authority_another_one_or_no_certificate_is_refused(regions, tmp_path):
    right = regions.address("eu", "router")
    other = keep_authority(tmp_path, "other").base64
    for wrong in (None, other):
        with pytest.raises(BusUnreachable, match=r"not to be trusted.*MESH_BUS_CA"):
            await bus.connect(replace(right, ca=wrong), name="x", inbox_prefix="_INBOX")
    with pytest.raises(BusUnreachable, match="MESH_BUS_CA: no certificates"):
        await bus.connect(replace(right, ca="nonsense!"), name="x", inbox_prefix="_INBOX")


async def test_a_server_that_goes_without_gets_no_password(tmp_path):
    """Somebody between could say that the server speaks plain."""
    said: list[bytes] = []

    async def plain(reader, writer):
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1000}\r\n')
        said.append(await reader.read(1000))
        writer.close()

    [port] = free_ports(1)
    server = await asyncio.start_server(plain, "127.0.0.1", port)
    ca = keep_authority(tmp_path, "test").base64
    address = bus.BusAddress(f"nats://127.0.0.1:{port}", "router", "secret", ca)
    connecting = asyncio.create_task(bus.connect(address, name="x", inbox_prefix="_INBOX"))
    await until(lambda: said)
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    server.close()
    assert all(b"secret" not in one for one in said)


class Flow:
    """Numbered messages from one region to the other, and those that came."""

    def __init__(self, sender, receiver):
        self.sent, self.got, self.sender, self.receiver = 0, [], sender, receiver

    async def begin(self) -> None:
        await self.receiver.listen(DIGEST, lambda msg: self.got.append(int(msg.data)))
        await self.receiver.flush()
        while not self.got:  # interest crosses after the subscription
            await self._send()
        self.first = self.got[0]
        self._task = asyncio.create_task(self._keep_sending())

    async def _send(self) -> None:
        await self.sender.publish(DIGEST, b"%d" % self.sent)
        self.sent += 1
        await asyncio.sleep(0.002)

    async def _keep_sending(self) -> None:
        while True:
            await self._send()

    async def close(self) -> None:
        self._task.cancel()
        for one in (self.sender, self.receiver):
            await one.close()

    async def end(self) -> list[int]:
        """The numbers that did not come."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await until(lambda: self.got[-1] == self.sent - 1)
        return sorted(set(range(self.first, self.sent)) - set(self.got))


async def test_certificates_and_their_authority_change_under_traffic(regions):
    lost: list[str] = []
    clients = [
        await regions.connect(
            name,
            "router",
            inbox_prefix=subjects.inbox_prefix(name, "r1"),
            on_lost=lambda name=name: lost.append(name),
        )
        for name in ("us", "eu")
    ]
    flow = Flow(*clients)
    await flow.begin()
    servers = [s for name in ("us", "eu") for s in regions.topology.region(name).servers]
    before = {await shown(server.nats.port) for server in servers}
    old = regions.address("eu", "router")
    for step in (None, "1 of 3", "2 of 3", "3 of 3"):  # first with the same authority
        if step is not None:
            assert step in change_authority(regions.directory, "test")
        given = regions.address("eu", "router")  # to processes that were not restarted since
        regions.render(new_certificates=step is None)
        regions.reload()
        want = {
            ssl.PEM_cert_to_DER_cert((regions.directory / folder / name).read_text())
            for folder, name in [("us", f"nats-{n}.pem") for n in (1, 2, 3)] + [("eu", "nats.pem")]
        }
        async with asyncio.timeout(PATIENCE_S):
            while {await shown(server.nats.port) for server in servers} != want:
                await asyncio.sleep(0.05)
        for address in (given, regions.address("eu", "router")):
            client = await bus.connect(address, name="x", inbox_prefix="_INBOX.eu.x")
            await client.close()
    assert before.isdisjoint(want)
    with pytest.raises(BusUnreachable, match="not to be trusted"):
        await bus.connect(old, name="x", inbox_prefix="_INBOX.eu.x")
    assert (await flow.end(), lost) == ([], [])
    await flow.close()


def handed_out(regions) -> list[bus.BusAddress]:
    """The routers' login at each server of both regions, as the files have it now."""
    logins = [regions.address(name, "router") for name in ("us", "eu")]
    return [replace(login, url=url) for login in logins for url in login.servers]


async def is_taken(address: bus.BusAddress) -> bool:
    """Whether the server lets a new connection with that login in, and keeps it."""
    cut = asyncio.Event()
    try:
        one = await bus.connect(address, name="x", inbox_prefix="_INBOX.x", on_lost=cut.set)
    except BusUnreachable:
        return False
    with contextlib.suppress(nats.errors.Error):
        await one.flush()
    await bus.close(one)
    return not cut.is_set()


async def until_all(addresses: list[bus.BusAddress], *, taken: bool) -> None:
    """Servers read their files again in their own time."""
    async with asyncio.timeout(PATIENCE_S):
        for address in addresses:
            while await is_taken(address) is not taken:
                await asyncio.sleep(0.02)


async def test_passwords_change_while_old_logins_go_on(regions):
    """Both are taken until the old ones are dropped; no connection of either is cut before."""
    lost: list[str] = []

    async def routers() -> Flow:
        """Connections of both regions with the login that is handed out now, and what passes."""
        flow = Flow(
            *[
                await regions.connect(name, "router", on_lost=lambda name=name: lost.append(name))
                for name in ("us", "eu")
            ]
        )
        await flow.begin()
        return flow

    running, old = await routers(), handed_out(regions)
    for _ in range(2):
        regions.render(rotate=True, keep_old=True)
        regions.reload()
        new = handed_out(regions)
        assert new[0].user != old[0].user and new[0].password != old[0].password
        await until_all([*new, *old], taken=True)
        before, running = running, await routers()  # restarted, one by one
        await before.close()
        regions.render()  # a replica may come meanwhile
        regions.reload()
        await until_all([*new, *old], taken=True)
        regions.render(drop_old=True)
        regions.reload()
        await until_all(old, taken=False)
        await until_all(new, taken=True)
        assert lost == []
        old = new
    sent = running.sent
    await until(lambda: running.got[-1] > sent)  # over the link, which was dialled anew
    await running.close()


async def test_a_stream_across_a_link_outlasts_each_change(regions):
    """Its client reads every event once, in order, though the link is dialled anew; of certificates
    and passwords, and of the authority in its three steps, in each of which a router starts."""
    over, said = asyncio.Event(), 0

    async def counts(request, body):
        nonlocal said
        stream = await opened(request)
        while not over.is_set():
            await stream.write(event(f"{said},"))
            said += 1
            await asyncio.sleep(0.005)
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async with small_mesh(regions) as mesh, scripted_engine() as engine:
        engine.behaviour = counts
        url = await mesh.router("us", **PATIENT)
        await mesh.router("eu", **PATIENT)
        await mesh.agent("eu", "eu-0", engine)
        await mesh.until_peer("us", "eu")
        async with (
            asyncio.timeout(PATIENCE_S),
            aiohttp.ClientSession() as session,
            session.post(url + "/v1/chat/completions", json=chat(stream=True)) as answer,
        ):
            assert answer.status == 200
            for number, how in enumerate(
                (
                    {"new_certificates": True},
                    {"rotate": True, "keep_old": True},
                    {"new_certificates": True},
                    *({"authority": f"{step} of 3"} for step in (1, 2, 3)),
                )
            ):
                if (step := how.pop("authority", None)) is not None:
                    assert step in change_authority(regions.directory, "test")
                regions.render(**how)
                regions.reload()
                await until_all(handed_out(regions), taken=True)
                if step is not None:
                    other = await mesh.router("us", f"r{number}", **PATIENT)
                    await mesh.until_peer(f"us/r{number}", "eu")
                    async with session.get(other + "/v1/models") as listed:
                        assert [one["id"] for one in (await listed.json())["data"]] == ["tiny"]
                before = said
                await until(lambda before=before: said > before + 20)
            over.set()
            text = (await answer.content.read()).decode()
    assert text.endswith("data: [DONE]\n\n")
    assert re.findall(r"(\d+),", text) == [str(number) for number in range(said)]
