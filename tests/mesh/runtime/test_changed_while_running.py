"""A router whose routing, tenants and file change while it streams: not one byte is lost."""

import asyncio
import hashlib
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from infra.bus import BusAddress, connect
from mesh.adapters.operator_orders import ORDERS
from tests.mesh.supervisor.test_forked_workers import streams_in_both, two_workers
from tests.support.scripted_engine import event, hang, say
from tests.support.small_mesh import chat
from tests.support.until import PATIENCE_S

WORKERS = (0, 1)
REST = event("late") + b"data: [DONE]\n\n"
LABELS = 'residency = ["us", "audited"]\n'
ENDPOINT = 'endpoint = "http://us.example:1/v1"\n'
TENANT = f"""
[tenants.acme]
key_sha256 = ["{hashlib.sha256(b"acme-key").hexdigest()}"]
residency = ["us"]
"""


class Changing:
    """The router's file, its orders, and what each worker says of them."""

    def __init__(self, file, router, session, server):
        self.file, self.router, self.session, self.server = file, router, session, server

    def edit(self, *pairs, more=""):
        """Write the file with these texts replaced, and more behind it."""
        text = self.file.read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        self.file.write_text(text + more)

    async def reload(self, endpoint=None):
        """Wait until every worker has read the file again, if it names that endpoint."""
        self.router.process.send_signal(signal.SIGHUP)
        if endpoint is not None:
            await self.until(lambda home: home["endpoint"] == endpoint)

    async def homes(self):
        found = []
        for worker in WORKERS:
            async with self.session.get(self.router.page(worker) + "/v1/regions") as answer:
                found.append((await answer.json())["data"][0])
        return found

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE_S):
            while not all(map(condition, await self.homes())):
                await asyncio.sleep(0.05)

    async def order(self, **routing):
        client = await connect(BusAddress(self.server.url), name="test", inbox_prefix="_INBOX")
        try:
            return await ORDERS.change(
                client,
                "us",
                lambda orders: replace(orders, routing=routing, by="ann@desk", command="test"),
            )
        finally:
            await client.close()

    async def statuses(self):
        """Of requests with the tenant's key for a place that it does not want, by both workers."""
        headers = {"authorization": "Bearer acme-key", "x-mesh-residency": "audited"}
        found = set()
        for _ in range(16):
            async with self.session.post(
                self.router.url + "/v1/chat/completions", json=chat(), headers=headers
            ) as answer:
                await answer.read()
                found.add(answer.status)
        return found

    async def logged(self, text):
        """The first line of the log that has the text."""
        async with asyncio.timeout(PATIENCE_S):
            while line := (await self.router.process.stderr.readline()).decode():
                if text in line:
                    return line
        raise AssertionError(f"the log ends without {text!r}")


async def what_is_wrong_changes_nothing(here: Changing) -> None:
    # A file with mistakes changes nothing, and each of them is in the log.
    right = here.file.read_text()
    here.edit(("skywalker", "fastest"), more="\n[nonsense]\n")
    await here.reload()
    assert "mesh.toml:" in await here.logged("not taken over")
    assert "nonsense" in await here.logged("not taken over")
    here.file.write_text(right)

    # An order that can't be followed changes nothing either, and is shown.
    await here.order(policy="fastest")
    await here.until(lambda home: "fastest" in (home["routing"]["refused"] or ""))
    assert {home["routing"]["policy"] for home in await here.homes()} == {"least-load"}
    await here.order(policy="least-load", hops_max=0)
    await here.until(lambda home: home["routing"]["ordered"] == ["policy", "hops_max"])


async def test_streams_outlast_every_change_and_workers_that_start_later_have_it(
    tmp_path, nats_server
):
    tables = {"table": LABELS, "routing": 'policy = "round-robin"\npushing = "blind"\n'}
    async with two_workers(tmp_path, nats_server, **tables) as (router, engine, session):
        here = Changing(Path(tmp_path) / "mesh.toml", router, session, nats_server)
        gate = asyncio.Event()
        engine.behaviour = hang(event("first"), gate)
        async with AsyncExitStack() as stack:
            begun = await streams_in_both(router, session, stack)
            assert [home["routing"]["policy"] for home in await here.homes()] == ["round-robin"] * 2

            await here.order(policy="least-load")
            ordered = {"policy": "least-load", "ordered": ["policy"], "refused": None}
            await here.until(lambda home: home["routing"] == ordered)

            # The file changes too; the order goes before it, and what it does not name is taken.
            here.edit(
                ("round-robin", "skywalker"),
                ("blind", "pending"),
                (LABELS, LABELS + ENDPOINT),
                more=TENANT,
            )
            await here.reload("http://us.example:1/v1")
            assert [home["routing"] for home in await here.homes()] == [ordered] * 2
            line = await here.logged("read again; in force now")
            assert "routing.policy, routing.pushing, tenants, endpoint" in line

            await what_is_wrong_changes_nothing(here)

            gate.set()
            assert [await answer.content.read() for answer in begun] == [REST] * len(begun)

        # A key of the file works now; a worker that starts later has the file and the order.
        engine.behaviour = say("hello")
        assert await here.statuses() == {403}
        [victim, other] = router.workers()
        os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while victim in router.workers() or len(router.workers()) < 2:
                await asyncio.sleep(0.05)
        assert other in router.workers()
        for worker in WORKERS:
            await router.until_serves(worker)
        await here.until(lambda home: home["routing"]["ordered"] == ["policy", "hops_max"])
        assert {home["endpoint"] for home in await here.homes()} == {"http://us.example:1/v1"}
        assert await here.statuses() == {403}

        # Without the order the file holds; without the tenant its key is nobody's.
        await here.order()
        await here.until(lambda home: home["routing"]["policy"] == "skywalker")
        here.edit((TENANT, ""), ("example:1", "example:2"))
        await here.reload("http://us.example:2/v1")
        assert await here.statuses() == {200}


async def what_needs_a_restart_is_named(here: Changing) -> None:
    here.edit(("workers = 2", "workers = 3"), ('name = "test"', 'name = "other"'))
    await here.reload()
    await here.logged("read again; in force now: nothing new")
    line = await here.logged("after a restart")
    assert line.rstrip().endswith("after a restart: workers, mesh.name")
    assert here.router.process.returncode is None and len(here.router.workers()) == 2


async def test_aliases_come_and_go_with_the_file_while_a_stream_goes_on(tmp_path, nats_server):
    async with two_workers(tmp_path, nats_server) as (router, engine, session):
        here, url = Changing(tmp_path / "mesh.toml", router, session, nats_server), router.url
        without, gate = here.file.read_text(), asyncio.Event()
        alias = '\n[models."org/chat-v1.0"]\nto = "tiny"\n'

        async def until_status(status):
            body = chat() | {"model": "org/chat-v1.0"}
            async with asyncio.timeout(PATIENCE_S):
                answered = 0
                while answered < 8:  # by one worker or the other
                    async with session.post(url + "/v1/chat/completions", json=body) as answer:
                        await answer.read()
                        answered = answered + 1 if answer.status == status else 0

        engine.behaviour = hang(event("first"), gate)
        async with AsyncExitStack() as stack:
            begun = await streams_in_both(router, session, stack)
            engine.behaviour = say("hello")
            await until_status(404)
            here.edit(more=alias)
            await here.reload()
            await until_status(200)
            assert {body["model"] for body in engine.seen} == {"tiny"}
            assert "models" in await here.logged("read again; in force now")
            here.file.write_text(without + alias.replace('"tiny"', '"org/chat-v1.0"'))
            await here.reload()
            assert 'models."org/chat-v1.0".to: names itself' in await here.logged("not taken over")
            await until_status(200)
            here.file.write_text(without)
            await here.reload()
            await until_status(404)
            gate.set()
            assert {await answer.content.read() for answer in begun} == {REST}
        await what_needs_a_restart_is_named(here)
