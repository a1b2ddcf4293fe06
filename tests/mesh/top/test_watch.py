"""`mesh top` on real buses, as observer alone: what it may read, a bus that goes and comes back."""

import asyncio
import shutil
from contextlib import asynccontextmanager
from types import SimpleNamespace

from infra.bus import BusAddress
from infra.process import end_all
from infra.topology import parse
from mesh.adapters.operator_orders import ORDERS
from mesh.adapters.region_records import Numbered
from mesh.doctor.logins import Logins, read_logins
from mesh.top.fleet import Fleet
from mesh.top.watch import FleetWatch, _RegionBus
from schemas import subjects
from schemas.control import RegionControl, encode_control
from schemas.ids import RegionId
from schemas.state import encode_state
from tests.mesh.top.test_fleet import beat, digest
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.until import until


@asynccontextmanager
async def watching(directory):
    """Two regions' buses, and a watch of both with nothing but observers' credentials."""
    text = mesh_toml(("us", "eu"), replicas=1)
    regions = NatsRegions(parse(text, "mesh.toml"), directory / "rendered")
    for name in ("us", "eu"):
        target = directory / "seen" / name / "credentials"
        target.mkdir(parents=True)
        shutil.copy(directory / "rendered" / name / "credentials" / "observer.env", target)
    logins = read_logins(regions.topology, directory / "seen")
    assert all(one == Logins(observer=one.observer) for one in logins.values())
    watch = FleetWatch(regions.topology, logins)
    first = watch.frame()
    assert (first.notes, {row.bus for row in first.regions}) == ((), {"connecting"})
    task = asyncio.create_task(watch.run())
    try:
        await regions.start()
        yield regions, watch
    finally:
        await end_all([task])
        await regions.stop()


class State:
    """Of a region, as its agent and its router publish it for as long as a test runs."""

    def __init__(self, regions, region):
        self._regions, self._region, self._seq = regions, region, 0
        self._task = asyncio.create_task(self._publish())

    async def _publish(self):
        region = self._region
        agent = await self._regions.connect(region, f"agent-{region}-0")
        router = await self._regions.connect(region, "router")
        replica = f"{region}-0"
        while True:
            self._seq += 1
            if agent.is_connected and router.is_connected:
                heartbeat = encode_state(beat(replica, seq=self._seq))
                await agent.publish(subjects.heartbeat(region, replica), heartbeat)
                state = encode_state(digest(region, seq=self._seq))
                await router.publish(subjects.digest(region), state)
                await router.publish(subjects.digest(region), b"no digest")
            await asyncio.sleep(0.05)

    async def stop(self):
        await end_all([self._task])


def row(watch, region):
    return next(one for one in watch.frame().regions if one.region == region)


def replica(watch, region):
    return next(one for one in watch.frame().replicas if one.region == region)


async def test_a_bus_that_goes_away_is_shown_and_comes_back(tmp_path):
    async with watching(tmp_path) as (regions, watch):
        states = [State(regions, name) for name in ("us", "eu")]
        try:
            for name in ("us", "eu"):
                await until(lambda name=name: row(watch, name).state == "serving")
                await until(lambda name=name: replica(watch, name).state == "ready")
            await regions.stop_one("us")
            await until(lambda: row(watch, "us").bus == "away")
            assert replica(watch, "us").state == "ready"  # its last state
            await until(lambda: (replica(watch, "us").age_s or 0.0) > 2.0)
            assert "us: its bus is away" in watch.frame().notes[0]
            assert row(watch, "eu").bus == "connected"
            await regions.start_one("us")
            await until(lambda: row(watch, "us").bus == "connected")
            await until(
                lambda: replica(watch, "us").age_s is not None and replica(watch, "us").age_s < 1.0
            )
            assert watch.frame().notes == ()
        finally:
            for one in states:
                await one.stop()


async def test_orders_from_before_and_from_now_are_read(tmp_path):
    async with watching(tmp_path) as (regions, watch):
        admin = await regions.connect("us", "admin")

        async def order(**values):
            await ORDERS.change(admin, "us", lambda known: RegionControl(region="us", **values))

        def lines():
            return "\n".join(watch.fleet.replica_lines("us", "us-0", watch.clock()))

        await order(drained=("us-0",), by="ann", command="drain us-0")
        await until(lambda: "drained by ann" in lines())
        await order()
        await until(lambda: "drained by ann" not in lines())
        await regions.stop_one("us")
        await until(lambda: row(watch, "us").bus == "away")
        await regions.start_one("us")
        await until(lambda: row(watch, "us").bus == "connected")
        await until(lambda: admin.is_connected)
        await order(all_drained=True, by="bob", command="drain us")
        await until(lambda: "drained by bob" in lines())
        await admin.close()


async def test_a_late_answer_does_not_undo_the_order_that_came_meanwhile(monkeypatch):
    us = RegionId("us")
    fleet = Fleet({us: ()}, [us])
    watched = _RegionBus(us, BusAddress("nats://127.0.0.1:1"), fleet, lambda: 5.0, "test")
    watched._connected()
    older, newer = (RegionControl(region="us", drained=(name,)) for name in ("us-0", "us-1"))
    headers = {"Nats-Stream": subjects.STREAM_CONTROL, "Nats-Sequence": "4"}

    async def read(client, region):
        watched._orders(SimpleNamespace(headers=headers, data=encode_control(newer)))
        return Numbered(3, older)

    monkeypatch.setattr("mesh.top.watch.ORDERS", SimpleNamespace(read=read))
    await watched._read_orders(None)
    assert fleet._regions[us].orders == newer
