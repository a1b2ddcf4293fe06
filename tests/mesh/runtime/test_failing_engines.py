"""Engines that fail every request at once beside one that serves: what clients get."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.support.scripted_engine import fail, say, scripted_engine
from tests.support.small_mesh import chat, post
from tests.support.until import PATIENCE_S

REQUESTS = 40
KNOWN_AFTER = 30  # by then each bad one has failed often enough


@pytest.mark.parametrize("status", [500, 503])
async def test_three_of_four_that_fail_at_once_lose_the_work_to_the_fourth(one, status):
    async with AsyncExitStack() as stack:
        more = [await stack.enter_async_context(scripted_engine()) for _ in range(2)]
        for number, engine in enumerate(more, 2):
            await one.agent("us", f"us-{number}", engine)
        await one.until_ready("us", 4)
        bad = [one.engines[0], *more]
        for engine in bad:
            engine.behaviour = fail(status, "broken")
        got = [(await post(one, chat(str(number))))[0] for number in range(REQUESTS)]
        assert set(got) <= {200, status}
        assert set(got[KNOWN_AFTER:]) == {200}
        assert len(one.engines[1].seen) >= REQUESTS - KNOWN_AFTER
        for replica, is_out in (("us-0", 1), ("us-1", 0)):
            assert one.sample("us", "mesh_replica_left_out", replica=replica) == is_out


async def test_one_that_is_mended_gets_work_again(one, monkeypatch):
    monkeypatch.setattr("mesh.core.view.outliers.OUT_S", 0.1)
    mended = one.engines[0]

    async def until_left_out(is_out: bool) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while one.sample("us", "mesh_replica_left_out", replica="us-0") != is_out:
                assert (await post(one, chat()))[0] == 200

    mended.behaviour = fail(500, "broken")
    await until_left_out(True)
    mended.behaviour, mended.seen = say("hello"), []
    await until_left_out(False)
    tried = len(mended.seen)
    assert tried >= 5, "each good answer doubles what it may have, from one to more than sixteen"
    for _ in range(10):
        assert (await post(one, chat()))[0] == 200
    assert len(mended.seen) > tried
