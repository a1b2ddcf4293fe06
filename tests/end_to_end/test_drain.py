"""`mesh drain` and its like, over a real mesh under load: no request fails."""

import asyncio
import os
import re
import signal
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import orjson
import pytest
from click.testing import CliRunner
from openai import AsyncOpenAI

from infra.bus import BusAddress, connect
from infra.process import end_all
from mesh.adapters.operator_orders import ORDERS
from mesh.cli.drain import WAITING
from mesh.cli.main import main
from schemas import subjects
from schemas.http import H_DECISION
from schemas.state import Heartbeat, ReplicaState, decode_heartbeat
from schemas.subjects import STREAM_CONTROL
from tests.support.flushed import flushed
from tests.support.mesh_command import said_by
from tests.support.mesh_up import MeshUp, mesh_up, write_config
from tests.support.until import PATIENCE_S, until

DRAINED = [f"replica us-0: {WAITING}", "replica us-0: drained, nothing runs there"]
UNDRAINED = ["replica us-0: work is sent there again", "replica us-1: not drained, nothing changes"]
CLIENTS = 3
LONG_TOKENS = 1000  # some 12 s
PAUSE_S = 0.1  # between two requests of a client: the commands have the machine too
DRAINING = ReplicaState.DRAINING
REPLICAS = {"us": 2, "eu": 1}


async def ordered(folder, *words: str) -> tuple[int, str]:
    """Exit code and all output."""
    return await said_by(*words, "--credentials", folder / ".mesh" / "config")


class Load:
    """Clients of a region that stream all the time; `served` counts answers by replica."""

    def __init__(self, mesh: MeshUp) -> None:
        self._mesh = mesh
        self.served: dict[str, int] = {}
        self.failed: list[str] = []

    async def client(self) -> None:
        url = self._mesh.endpoint("us") + "/v1"
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as openai:
            while True:
                try:
                    raw = await openai.chat.completions.with_raw_response.create(
                        model=self._mesh.model,
                        messages=[{"role": "user", "content": os.urandom(8).hex()}],
                        max_tokens=16,
                        stream=True,
                        extra_headers={"x-mesh-debug": "1"},
                    )
                    reasons = [
                        chunk.choices[0].finish_reason
                        async for chunk in raw.parse()
                        if chunk.choices
                    ]
                    assert reasons[-1] in ("length", "stop"), reasons
                except Exception as error:
                    self.failed.append(repr(error))
                    await asyncio.sleep(0.1)
                else:
                    replica = orjson.loads(raw.headers[H_DECISION])["replica"]
                    self.served[replica] = self.served.get(replica, 0) + 1
                    await asyncio.sleep(PAUSE_S)

    async def serves_again(self, replica: str) -> None:
        before = self.served.get(replica, 0)
        await until(lambda: self.served.get(replica, 0) > before)

    async def others_serve(self, drained: str, count: int) -> None:
        """So many more answers, none of them from the drained one."""
        before = self.served.get(drained, 0)
        others = sum(self.served.values()) - before
        await until(
            lambda: sum(self.served.values()) - self.served.get(drained, 0) >= others + count
        )
        assert self.served.get(drained, 0) == before


@asynccontextmanager
async def load(mesh: MeshUp, clients: int = CLIENTS):
    found = Load(mesh)
    tasks = [asyncio.create_task(found.client()) for _ in range(clients)]
    try:
        yield found
    finally:
        await end_all(tasks)


async def test_a_replica_and_a_region_are_drained_without_one_failed_request(tmp_path):
    config = write_config(tmp_path, regions=("us", "eu"), replicas=REPLICAS)
    # Under the default policy a fast replica may serve all of a small load by itself.
    config.write_text(config.read_text() + '[routing]\npolicy = "round-robin"\n')
    async with mesh_up(tmp_path, config=config) as mesh, load(mesh) as clients:
        await clients.serves_again("us-0")
        code, said = await ordered(tmp_path, "drain", "us-0", "--reason", "new fan")
        assert (code, *said.splitlines()[:: len(said.splitlines()) - 1]) == (0, *DRAINED)
        await clients.others_serve("us-0", 15)

        # The order holds for an agent and for a router that start again.
        async with heartbeats(mesh) as beats:
            await until(lambda: "us-0" in beats)
            first = beats["us-0"].epoch
            os.kill(mesh.record["processes"]["agent-us-0"], signal.SIGKILL)
            await until(lambda: beats["us-0"].epoch != first)
            await until(lambda: beats["us-0"].state is DRAINING)
        assert clients.failed == []
        router = mesh.record["processes"]["router-us-r1"]
        os.kill(router, signal.SIGKILL)

        def is_another() -> bool:  # between the two there is none
            return mesh.record["processes"].get("router-us-r1", router) != router

        await until(is_another)
        await is_ready(mesh.endpoint("us"))
        clients.failed.clear()  # of the router that was killed
        await clients.others_serve("us-0", 15)

        code, said = await ordered(tmp_path, "undrain", "us-0", "us-1")
        assert (code, said.splitlines()) == (0, UNDRAINED)
        await is_open(mesh, "us-0")
        await clients.serves_again("us-0")

        # Everything that is named, once for each region.
        code, said = await ordered(tmp_path, "drain", "us-1", "us/us-0", "us", "us-1")
        assert (code, said.splitlines()[-1]) == (0, "region us: drained, nothing runs there")
        served = dict(clients.served)
        await clients.serves_again("eu-0")
        assert {name: clients.served[name] for name in ("us-0", "us-1")} == {
            name: served[name] for name in ("us-0", "us-1")
        }
        code, said = await ordered(tmp_path, "undrain", "us-0")
        assert code == 2 and "all of region us is drained" in said
        for said in ("work is sent there again", "not drained, nothing changes"):
            assert await ordered(tmp_path, "undrain", "us") == (0, f"region us: {said}\n")
        await asyncio.gather(is_open(mesh, "us-0"), is_open(mesh, "us-1"))
        assert clients.failed == []

        code, said = await ordered(tmp_path, "changes", "us")
        assert code == 0
        header, *rows = [re.split(r"  +", line) for line in said.splitlines()]
        assert header == ["region", "number", "at", "by", "command", "then drained", "reason"]
        assert [[row[1], *row[4:]] for row in rows] == [
            ["4", "undrain region us", "none"],
            ["3", "drain region us", "all"],
            ["2", "undrain replicas us-0, us-1", "none"],
            ["1", "drain replica us-0", "us-0", "new fan"],
        ]
        await _only_admins_write(mesh)


async def test_long_streams_of_a_drained_replica_go_on_from_another_one(tmp_path):
    config = write_config(tmp_path, regions=("us",), replicas=2)
    config.write_text(config.read_text() + '[routing]\npolicy = "round-robin"\n')
    async with mesh_up(tmp_path, config=config, time_scale=1.0) as mesh:
        url = mesh.endpoint("us")
        begun = []

        async def stream(openai: AsyncOpenAI) -> int:
            chunks = await openai.chat.completions.create(
                model=mesh.model,
                messages=[{"role": "user", "content": os.urandom(8).hex()}],
                max_tokens=LONG_TOKENS,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            first = await anext(chunks)
            begun.append(first)
            found = [chunk async for chunk in chunks]
            assert {one.id for one in found} == {first.id}
            reasons = {one.choices[0].finish_reason for one in found if one.choices}
            assert reasons == {None, "length"}
            return found[-1].usage.completion_tokens

        async with AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as openai:
            streams = [asyncio.create_task(stream(openai)) for _ in range(2)]
            await until(lambda: len(begun) == 2)
            code, said = await ordered(tmp_path, "drain", "us-0", "--move")
            assert (code, said.splitlines()[-1]) == (0, DRAINED[-1])
            assert [await one for one in streams] == [LONG_TOKENS, LONG_TOKENS]
        async with aiohttp.ClientSession() as http, http.get(url + "/metrics") as answer:
            assert 'mesh_streams_continued_total{outcome="whole"} 1.0' in await answer.text()


async def _only_admins_write(mesh: MeshUp) -> None:
    """An observer that has the server answer on the subject of orders writes none."""

    async with AsyncExitStack() as stack:

        async def client(user: str):
            known = mesh.credentials("us", user)
            address = BusAddress(known["NATS_URL"], known["NATS_USER"], known["NATS_PASSWORD"])
            made = await connect(address, name="test", inbox_prefix="_INBOX")
            stack.push_async_callback(made.close)
            return made

        admin = await client("admin")
        before = await ORDERS.read(admin, "us")
        request = f"$JS.API.DIRECT.GET.{STREAM_CONTROL}.{subjects.control('us')}"
        for user in ("observer", "operator", "router"):
            other = await client(user)
            await other.publish(request, b"", reply=subjects.control("us"))
            await other.publish(subjects.control("us"), b"{}")
            await flushed(other)
        assert await ORDERS.read(admin, "us") == before
        assert len(await ORDERS.history(admin, "us", 100)) == before.seq


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("drain", "mars"), "no region and no replica 'mars'; there are us (us-0"),
        (("cordon", "us/us-99"), "no region and no replica 'us/us-99'"),
        (("changes", "mars"), "no region 'mars'"),
        (("drain", "us"), "no credentials of us, eu, ap below"),
    ],
)
def test_what_can_not_be_drained_is_named(tmp_path, arguments, expected):
    folder = str(tmp_path / ".mesh" / "config")
    result = CliRunner().invoke(main, [*arguments, "--credentials", folder])
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", " ").split())


async def is_open(mesh: MeshUp, replica: str) -> None:
    """Wait until it takes work. Who gets some is the policy's choice: a few clients fit in one."""
    async with heartbeats(mesh) as beats:
        await until(lambda: replica in beats and beats[replica].state is ReplicaState.READY)


@asynccontextmanager
async def heartbeats(mesh: MeshUp):
    """The last heartbeat of each replica of us, kept up to date."""
    known = mesh.credentials("us", "observer")
    address = BusAddress(known["NATS_URL"], known["NATS_USER"], known["NATS_PASSWORD"])
    client = await connect(address, name="test", inbox_prefix="_INBOX")
    found: dict[str, Heartbeat] = {}

    async def keep(msg) -> None:
        beat = decode_heartbeat(msg.data)
        found[beat.replica] = beat

    await client.subscribe(subjects.heartbeat("us", subjects.ANY), cb=keep)
    try:
        yield found
    finally:
        await client.close()


async def is_ready(url: str) -> None:
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(url + "/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
