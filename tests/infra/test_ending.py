"""Ending tasks for sure, whatever they do with a cancel."""

import asyncio
import contextlib

import pytest

from infra.process import end_all, run_all
from tests.support.until import PATIENCE_S


async def forever() -> None:
    await asyncio.Event().wait()


async def loses(cancels: int) -> None:
    for _ in range(cancels):
        with contextlib.suppress(asyncio.CancelledError):
            await forever()
    await forever()


async def fails() -> None:
    raise RuntimeError("left to whoever awaits it")


async def test_all_have_ended_when_it_returns(monkeypatch):
    monkeypatch.setattr("infra.process.CANCEL_AGAIN_S", 0.001)
    tasks = [asyncio.create_task(work) for work in (forever(), loses(1), loses(3), fails())]
    await asyncio.sleep(0)  # all have begun
    async with asyncio.timeout(PATIENCE_S):
        await end_all(tasks)
    assert [task.cancelled() for task in tasks] == [True, True, True, False]
    assert isinstance(tasks[-1].exception(), RuntimeError)


async def test_nothing_to_end_is_no_wait():
    await end_all([])


async def test_a_cancelled_caller_leaves_no_task_behind():
    slow = asyncio.create_task(loses(3))
    await asyncio.sleep(0)  # it has begun
    ending = asyncio.create_task(end_all([slow]))
    while not slow.cancelling():
        await asyncio.sleep(0)
    ending.cancel()
    try:
        await asyncio.wait([ending], timeout=20)
        assert ending.cancelled() and slow.cancelled()
    finally:
        await end_all([slow])


async def test_works_that_run_together_end_also_when_one_loses_its_cancel():
    async def stubborn() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    running = asyncio.create_task(run_all([stubborn(), stubborn()]))
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await end_all([running])
    assert running.cancelled()


async def test_the_failure_of_one_ends_the_others_and_is_raised():
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_all([waits(), fails()])
    assert ended == ["waits"]
    await run_all([])
