"""Which process a connection leads to is known by a list that was read after it was opened."""

import asyncio
import time

from agents.adapters.served_models import LOADS_MAX, ServedModels


class Pages:
    """Lists of models, given out when the test says so."""

    def __init__(self):
        self.readings, self.models = 0, ("a",)
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self):
        self.readings += 1
        models = self.models
        await self.gate.wait()
        if models is None:
            raise TimeoutError
        return models


async def test_a_kept_connection_costs_no_reading_and_a_new_one_one():
    pages = Pages()
    served = ServedModels(pages.read)
    opened_at = time.monotonic()
    served.were_read(time.monotonic(), ("a",))
    assert await served.serves("a", opened_at) and not await served.serves("b", opened_at)
    assert pages.readings == 0
    pages.models = ("b",)
    opened_at = time.monotonic()
    assert await served.serves("b", opened_at) and not await served.serves("a", opened_at)
    assert pages.readings == 1


async def test_connections_opened_meanwhile_share_the_next_reading():
    pages = Pages()
    served = ServedModels(pages.read)
    pages.gate.clear()
    first = asyncio.create_task(served.serves("a", time.monotonic()))
    await asyncio.sleep(0.01)  # that reading begins
    later = [asyncio.create_task(served.serves("b", time.monotonic())) for _ in range(9)]
    await asyncio.sleep(0.01)
    pages.models = ("b",)
    pages.gate.set()
    assert await first is True
    assert await asyncio.gather(*later) == [True] * 9
    assert pages.readings == 2


async def test_one_that_waits_may_leave_and_the_others_are_answered():
    pages = Pages()
    served = ServedModels(pages.read)
    pages.gate.clear()
    leaves = asyncio.create_task(served.serves("a", time.monotonic()))
    stays = asyncio.create_task(served.serves("a", time.monotonic()))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    pages.gate.set()
    assert await stays


async def test_a_list_that_cannot_be_read_changes_nothing():
    pages = Pages()
    served = ServedModels(pages.read)
    pages.models = None
    assert await served.serves("a", time.monotonic())  # nothing is known
    served.were_read(time.monotonic(), ("a",))
    assert not await served.serves("b", time.monotonic())
    assert await served.serves("a", time.monotonic())


async def test_a_list_whose_reading_began_before_a_load_ended_does_not_take_the_adapter_away():
    served = ServedModels(Pages().read)
    served.were_read(time.monotonic(), ("a",))
    before = time.monotonic()
    served.loaded("sql")
    served.were_read(before, ("a",))
    assert await served.serves("sql", before)
    after = time.monotonic()
    served.were_read(after, ("a",))  # it was unloaded
    assert not await served.serves("sql", after)


async def test_so_many_of_the_last_loads_are_remembered():
    served = ServedModels(Pages().read)
    before = time.monotonic()
    for number in range(LOADS_MAX + 1):
        served.loaded(f"adapter-{number}")
    served.were_read(before, ("a",))
    known = [await served.serves(f"adapter-{number}", before) for number in range(LOADS_MAX + 1)]
    assert known == [False] + [True] * LOADS_MAX
