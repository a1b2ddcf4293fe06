"""`nats stream backup` and `restore` with the login that makes the streams: docs/install.md."""

import asyncio
import os
from dataclasses import replace

import pytest

from infra.topology import parse
from mesh.adapters.operator_orders import change_orders, read_orders
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.tools.go_tools import NATS

pytestmark = [pytest.mark.tools, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def _nats():
    NATS.install()


async def test_orders_are_backed_up_and_restored_by_one_command_each(tmp_path):
    regions = NatsRegions(parse(mesh_toml(("us",)), "mesh.toml"), tmp_path / "rendered")
    credentials = regions.files["us"].credentials
    told = dict(line.split("=", 1) for line in credentials["setup"].read_text().splitlines())
    alone = {name: value for name, value in os.environ.items() if not name.startswith("NATS")}
    environment = alone | told | {"XDG_CONFIG_HOME": str(tmp_path)}

    async def nats(*words):
        process = await asyncio.create_subprocess_exec(
            NATS.binary,
            *words,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
        assert process.returncode == 0, printed.decode()

    try:
        await regions.start()
        admin = await regions.connect("us", "admin")

        def drained(orders):
            return replace(orders, drained=("us-0",), reason="new fan")

        given = await change_orders(admin, "us", drained)
        backup = str(tmp_path / "CONTROL")
        await nats("stream", "backup", "CONTROL", backup, "--no-progress")
        await nats("stream", "rm", "CONTROL", "--force")
        await nats("stream", "restore", backup, "--no-progress")
        assert await read_orders(admin, "us") == given
    finally:
        await regions.stop()
