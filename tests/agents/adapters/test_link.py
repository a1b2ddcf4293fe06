"""When frames may go: not while the bus is away, nor before the core has heard of its return."""

import asyncio
import contextlib

import pytest

from agents.adapters.link import Link
from agents.core.events import BusLost, BusReturned

WAIT_S = 20.0


class Core:
    """Hears what it is fed, when it is let."""

    def __init__(self, link: Link) -> None:
        self.heard: list[tuple[type, bool]] = []  # and whether frames could go then
        self.listens = asyncio.Event()
        self.listens.set()
        self._link = link

    async def feed(self, event: BusLost | BusReturned) -> None:
        await self.listens.wait()
        self.heard.append((type(event), self._link.is_there.is_set()))


@pytest.fixture
async def link():
    return Link()


@pytest.fixture
async def core(link):
    core = Core(link)
    telling = asyncio.create_task(link.tell(core.feed))
    yield core
    telling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await telling


async def until_there(link):
    async with asyncio.timeout(WAIT_S):
        await link.is_there.wait()


async def test_frames_wait_until_the_core_has_heard(link, core):
    assert link.is_there.is_set()
    link.lost()
    assert not link.is_there.is_set(), "at once, and not in a task"
    link.back()
    assert not link.is_there.is_set()
    await until_there(link)
    assert core.heard == [(BusLost, False), (BusReturned, False)]


async def test_a_core_that_hears_late_lets_nothing_go_on_a_bus_lost_again(link, core):
    core.listens.clear()
    link.lost()
    link.back()
    link.lost()
    core.listens.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert [kind for kind, _ in core.heard] == [BusLost, BusReturned, BusLost]
    assert not link.is_there.is_set()
    link.back()
    await until_there(link)


async def test_its_clock_stands_still_while_the_bus_is_away(link, core):
    before = link.present_s()
    link.lost()
    gone = link.present_s()
    link.lost()  # it is gone already
    await asyncio.sleep(0.05)
    assert link.present_s() == gone >= before
    link.back()
    await until_there(link)
    assert link.present_s() - gone < asyncio.get_running_loop().time() - before
    assert link.losses == 2
    here = link.present_s()
    await asyncio.sleep(0.01)
    assert link.present_s() > here
