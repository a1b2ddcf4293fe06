"""A nats-server that comes back with an empty store: what operators ordered holds all the same."""

import shutil
from pathlib import Path

import orjson

from tests.support.examined_mesh import examined, looked, running
from tests.support.mesh_command import mesh_command


def store_of(regions, region) -> Path:
    config = regions.files[region].config.read_text().splitlines()
    [line] = [line for line in config if "store_dir" in line]
    return Path(line.split('"')[-2])


def keepers(findings):
    """Regions of which the doctor says that routers keep orders."""
    return [one.region for one in findings if one.check == "orders"]


async def test_orders_that_the_stream_has_lost_hold_until_the_next_one_writes_them_again(
    tmp_path, caplog
):
    async def ordered(*words):
        files = ("--config", tmp_path / "mesh.toml", "--credentials", tmp_path / "rendered")
        status, out, err = await mesh_command(*words, *files)
        assert status == 0, err
        return out

    async with running(tmp_path) as (regions, mesh):
        orders = mesh.routers["us"].requests.leases.orders
        await ordered("cordon", "us-0", "--reason", "new fan")
        await ordered("routing", "set", "us", "policy=least-load")
        await mesh.until(lambda: orders.drained == ("us-0",), "the drain")
        await mesh.until_ready("us", 0)

        await regions.stop_one("us")
        shutil.rmtree(store_of(regions, "us") / "jetstream")
        await regions.start_one("us")
        await regions.set_up("us")
        await mesh.until(lambda: orders.is_lost, "the router to find the stream empty")
        assert orders.drained == ("us-0",)
        assert mesh.sample("us", "mesh_orders_lost") == 1.0
        assert mesh.routers["us"].requests.readiness().problem is not None
        lines = [line for line in caplog.records if "the store of orders was lost" in line.msg]
        assert [line.levelname for line in lines] == ["ERROR"]

        async def look():
            return keepers(await examined(regions, tmp_path))

        assert await looked(look, lambda found: found == ["us"]) == ["us"]
        out = await ordered("cordon", "us")
        assert "written again as its routers keep them: drained us-0, routing of policy" in out
        await mesh.until(lambda: not orders.is_lost, "the next order")
        assert await look() == []
        routing = mesh.routers["us"].requests.routing
        assert (orders.seq, orders.drained, routing.settings.policy) == (1, ("*",), "least-load")
        history = orjson.loads(orders._data)
        assert history["drained"] == ["us-0"] and history["routing"] == {"policy": "least-load"}
        await ordered("undrain", "us")
        await mesh.until_ready("us", 1)
