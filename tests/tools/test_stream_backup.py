"""`nats stream backup` and `restore` with the login that makes the streams: docs/install.md. So a
region of one nats-server gets three, too."""

import asyncio
import json
import os
from dataclasses import replace
from functools import partial
from operator import ne

import pytest

from infra.topology import parse
from mesh.adapters import streams
from mesh.adapters.operator_orders import ORDERS
from mesh.adapters.usage_reader import read_day
from mesh.cli.keys import KEYS
from schemas import subjects
from schemas.keys import KeyRecord, Scope
from schemas.usage import UsagePage, UsageRow, encode_page
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.until import PATIENCE_S
from tests.tools.go_tools import NATS

pytestmark = [pytest.mark.tools, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def _nats():
    NATS.install()


class Login:
    """The `nats` command as a region's setup user."""

    def __init__(self, regions, home):
        lines = regions.files["us"].credentials["setup"].read_text().splitlines()
        alone = {name: value for name, value in os.environ.items() if not name.startswith("NATS")}
        told = dict(line.split("=", 1) for line in lines)
        self._environment = alone | told | {"XDG_CONFIG_HOME": str(home)}

    async def nats(self, *words):
        process = await asyncio.create_subprocess_exec(
            NATS.binary,
            *words,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
        assert process.returncode == 0, printed.decode()


DAY = "2026-11-29"
NAMES = ("CONTROL", "KEYS", "USAGE")


class Kept:
    """A region's orders, keys and accounts of tokens."""

    def __init__(self, admin, router):
        self._admin, self._router = admin, router

    @classmethod
    async def of(cls, regions):
        inbox = subjects.inbox_prefix("us", "r1")
        router = await regions.connect("us", "router", inbox_prefix=inbox)
        return cls(await regions.connect("us", "admin"), router)

    async def write(self):
        key = KeyRecord(
            id="ka",
            sha256="0" * 64,
            tenant="acme",
            scopes=(Scope.INFERENCE,),
            created_at_unix_s=1.0,
        )
        await ORDERS.change(self._admin, "us", partial(replace, drained=("us-0",), reason="fan"))
        await KEYS.change(self._admin, "us", partial(replace, keys=(key,)))
        row = UsageRow(tenant="acme", model="tiny", served_region="us", requests=3, output=7)
        page = UsagePage(region="us", router="r1", epoch=1, day=DAY, number=0, rows=(row,))
        subject = subjects.usage("us", "r1", DAY, "1-0")
        answer = await self._router.request(subject, encode_page(page), timeout=PATIENCE_S)
        assert json.loads(answer.data)["seq"]

    async def read(self):
        found = [await records.read(self._admin, "us") for records in (ORDERS, KEYS)]
        return [*found, await read_day(self._router, "us", DAY)]


async def test_orders_are_backed_up_and_restored_by_one_command_each(tmp_path):
    regions = NatsRegions(parse(mesh_toml(("us",)), "mesh.toml"), tmp_path / "rendered")
    setup = Login(regions, tmp_path)
    try:
        await regions.start()
        kept = await Kept.of(regions)
        nothing = await kept.read()
        await kept.write()
        given = await kept.read()
        assert all(map(ne, given, nothing)), "each was written"
        for name in NAMES:
            backup = str(tmp_path / name)
            await setup.nats("stream", "backup", name, backup, "--no-progress")
            await setup.nats("stream", "rm", name, "--force")
            await setup.nats("stream", "restore", backup, "--no-progress")
        assert await kept.read() == given
    finally:
        await regions.stop()


async def test_orders_are_kept_where_a_region_gets_three_servers(tmp_path):
    one = NatsRegions(parse(mesh_toml(("us",)), "mesh.toml"), tmp_path / "one")
    backups = {name: str(tmp_path / name) for name in NAMES}
    try:
        await one.start()
        kept = await Kept.of(one)
        await kept.write()
        given = await kept.read()
        for name, folder in backups.items():
            await Login(one, tmp_path).nats("stream", "backup", name, folder, "--no-progress")
    finally:
        await one.stop()
    three = NatsRegions(
        parse(mesh_toml(("us",), clusters=("us",)), "mesh.toml"), tmp_path / "three"
    )
    try:
        await three.start()
        setup = Login(three, tmp_path)
        for name, folder in backups.items():
            await setup.nats("stream", "rm", name, "--force")
            await setup.nats("stream", "restore", folder, "--no-progress")
        done = await three.set_up("us")
        assert {done[name] for name in backups} == {streams.PUT_RIGHT}
        client = await three.connect("us", "setup")
        for name in backups:
            info = await client.jsm().stream_info(name)
            assert info.config.num_replicas == 3
        kept = await Kept.of(three)
        assert await kept.read() == given
    finally:
        await three.stop()
