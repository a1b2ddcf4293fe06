import asyncio

import pytest

from mesh.http.large_bodies import OLDEST_EVERY, SmallestFirstLock


async def until_all_wait() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def order(sizes: list[int]) -> list[int]:
    """In which they are served that come in this order while another works."""
    turns, served = SmallestFirstLock(), []

    async def work(size: int) -> None:
        await turns.take(size)
        served.append(size)
        turns.release()

    await turns.take(0)
    async with asyncio.TaskGroup() as tasks:
        for size in sizes:
            tasks.create_task(work(size))
        await until_all_wait()
        turns.release()
    return served


async def test_the_smallest_is_first():
    assert await order([9, 2, 5]) == [2, 5, 9]


async def test_equals_go_in_the_order_in_which_they_came():
    assert await order([5.0, 5, 5.0]) == [5.0, 5, 5.0]


async def test_the_oldest_has_its_turn_before_many_smaller_ones():
    served = await order([100, *range(1, 20)])
    assert served.index(100) == OLDEST_EVERY - 1


async def test_who_leaves_keeps_nobody_waiting():
    turns = SmallestFirstLock()
    await turns.take(1)
    left = asyncio.create_task(turns.take(1))
    chosen = asyncio.create_task(turns.take(2))
    last = asyncio.create_task(turns.take(3))
    await until_all_wait()
    left.cancel()
    turns.release()  # it is 2's
    chosen.cancel()  # in the same moment
    async with asyncio.timeout(5):
        await last
    assert left.cancelled() and chosen.cancelled()
    turns.release()
    async with asyncio.timeout(5):
        await turns.take(1)


async def test_who_waits_too_long_leaves():
    turns = SmallestFirstLock()
    await turns.take(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await turns.take(1)
    turns.release()
    await turns.take(1)
