"""When frames may go: not while the bus is away, nor before the core was fed its return."""

import asyncio

import pytest

from agents.adapters.outbox import BusConnection
from agents.core.events import BusDisconnected, BusReconnected
from infra.process import end_all
from tests.support.until import PATIENCE_S


class Core:
    """Hears what it is fed, when it is let."""

    def __init__(self, link: BusConnection) -> None:
        self.received: list[tuple[type, bool]] = []  # and whether frames could go then
        self.listens = asyncio.Event()
        self.listens.set()
        self._link = link

    async def feed(self, event: BusDisconnected | BusReconnected) -> None:
        await self.listens.wait()
        self.received.append((type(event), self._link.is_up.is_set()))


@pytest.fixture
async def link():
    return BusConnection()


@pytest.fixture
async def core(link):
    core = Core(link)
    telling = asyncio.create_task(link.report(core.feed))
    yield core
    await end_all([telling])


async def until_there(link):
    async with asyncio.timeout(PATIENCE_S):
        await link.is_up.wait()


async def test_frames_wait_until_the_core_was_fed_the_return(link, core):
    assert link.is_up.is_set()
    link.lost()
    assert not link.is_up.is_set(), "at once, and not in a task"
    link.returned()
    assert not link.is_up.is_set()
    await until_there(link)
    assert core.received == [(BusDisconnected, False), (BusReconnected, False)]


async def test_a_core_that_is_fed_late_lets_nothing_go_on_a_bus_lost_again(link, core):
    core.listens.clear()
    link.lost()
    link.returned()
    link.lost()
    core.listens.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert [kind for kind, _ in core.received] == [BusDisconnected, BusReconnected, BusDisconnected]
    assert not link.is_up.is_set()
    link.returned()
    await until_there(link)


async def test_its_clock_stops_while_the_bus_is_away(link, core):
    before = link.connected_s()
    link.lost()
    gone = link.connected_s()
    link.lost()  # it is gone already
    await asyncio.sleep(0.05)
    assert link.connected_s() == gone >= before
    link.returned()
    await until_there(link)
    assert link.connected_s() - gone < asyncio.get_running_loop().time() - before
    assert link.losses == 2
    here = link.connected_s()
    await asyncio.sleep(0.01)
    assert link.connected_s() > here
