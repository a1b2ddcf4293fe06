"""`nats stream backup` and `restore` with the login that makes the streams: docs/install.md. So a
region of one nats-server gets three, too."""

import asyncio
import os
from dataclasses import replace

import pytest

from infra.topology import parse
from mesh.adapters import streams
from mesh.adapters.operator_orders import ORDERS
from tests.support.nats_regions import NatsRegions, mesh_toml
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


def drained(orders):
    return replace(orders, drained=("us-0",), reason="new fan")


async def test_orders_are_backed_up_and_restored_by_one_command_each(tmp_path):
    regions = NatsRegions(parse(mesh_toml(("us",)), "mesh.toml"), tmp_path / "rendered")
    setup = Login(regions, tmp_path)
    try:
        await regions.start()
        admin = await regions.connect("us", "admin")
        given = await ORDERS.change(admin, "us", drained)
        backup = str(tmp_path / "CONTROL")
        await setup.nats("stream", "backup", "CONTROL", backup, "--no-progress")
        await setup.nats("stream", "rm", "CONTROL", "--force")
        await setup.nats("stream", "restore", backup, "--no-progress")
        assert await ORDERS.read(admin, "us") == given
    finally:
        await regions.stop()


async def test_orders_are_kept_where_a_region_gets_three_servers(tmp_path):
    one = NatsRegions(parse(mesh_toml(("us",)), "mesh.toml"), tmp_path / "one")
    backups = {name: str(tmp_path / name) for name in ("CONTROL", "KEYS", "USAGE")}
    try:
        await one.start()
        given = await ORDERS.change(await one.connect("us", "admin"), "us", drained)
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
        assert await ORDERS.read(await three.connect("us", "admin"), "us") == given
    finally:
        await three.stop()
