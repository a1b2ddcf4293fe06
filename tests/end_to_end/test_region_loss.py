"""kill -9 of every router of a region under load: a neighbour serves its replicas meanwhile."""

from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.region_loss import LOST, fragile_mesh, lose, watching

pytestmark = pytest.mark.timeout(120)

REGIONS = {"us": '["r1", "r2"]', "eu": '["r1"]', "ap": '["r1"]'}
ROUND_TRIPS_MS = {("us", "eu"): 20, ("us", "ap"): 60, ("eu", "ap"): 60}


def write_config(directory: Path) -> Path:
    """Three regions of one replica; us has two routers."""
    ports = iter(free_ports(3 * len(REGIONS)))
    text = '[mesh]\nname = "test"\n'
    for region, routers in REGIONS.items():
        addresses = [f'{key} = "127.0.0.1:{next(ports)}"' for key in ("http", "nats", "leaf")]
        text += "\n".join(
            [f"[regions.{region}]", *addresses, "replicas = 1", f"routers = {routers}", ""]
        )
    for (one, other), rtt_ms in ROUND_TRIPS_MS.items():
        text += f'[[links]]\nbetween = ["{one}", "{other}"]\nrtt_ms = {rtt_ms}\n'
    path = directory / "mesh.toml"
    path.write_text(text)
    return path


async def test_a_lost_region_is_served_by_its_nearest_neighbour_and_handed_back(tmp_path):
    async with (
        fragile_mesh(tmp_path, write_config(tmp_path)) as mesh,
        watching(mesh, list(REGIONS)) as seen,
    ):
        await seen.until("us", ("us",), 20.0)
        rounds = await lose(mesh, seen, ["us"], ("eu", "ap"), every_s=0.05, tokens=16, gone_s=1.0)
    told = rounds["us"]
    assert told.by == "eu"
    assert told.adopted_s < told.served_s < 8.0, "2 s where nothing else needs the machine"
    assert told.back_s < 5.0
    assert told.both_s <= 1.0, "two owners for longer than a lease"
    assert told.ends[LOST] == 0
    assert set(told.ends) <= {"ok", "connection lost", "error event"}
    assert told.ends["ok"] > 0.8 * told.ends.total()


async def test_two_of_three_regions_lost_at_once_are_both_served_by_the_third(tmp_path):
    async with (
        fragile_mesh(tmp_path, write_config(tmp_path)) as mesh,
        watching(mesh, list(REGIONS)) as seen,
    ):
        for region in REGIONS:
            await seen.until(region, (region,), 20.0)
        told = await lose(mesh, seen, ["us", "ap"], ("eu",), every_s=0.05, tokens=16, gone_s=1.0)
    for one in told.values():
        assert one.by == "eu"
        assert one.adopted_s < one.served_s < 8.0, "2 s where nothing else needs the machine"
        assert one.back_s < 5.0
        assert one.both_s <= 1.0, "two owners for longer than a lease"
        assert one.ends[LOST] == 0
        assert set(one.ends) <= {"ok", "connection lost", "error event"}
        assert one.ends["ok"] > 0.8 * one.ends.total()
