"""An agent, and an engine without a page that computes a few requests at once, over real HTTP."""

import asyncio
import contextlib
from random import Random

from tests.agents.fake_router import FakeRouter
from tests.agents.scene import scene
from tests.agents.scripted_engine import CHUNKED, LAST_CHUNK, Conversation, chunk

USUAL = 8
TEXT, DONE = b'data: {"choices":[{"text":"t"}]}\n\n', b"data: [DONE]\n\n"


class Engine:
    """Computes so many streams at once; the others wait."""

    def __init__(self, places: int) -> None:
        self.places = asyncio.Semaphore(places)
        self.dice, self.answered = Random(1), 0

    async def __call__(self, talk: Conversation) -> None:
        async with self.places:
            await asyncio.sleep(0.1)
            await talk.send(CHUNKED + chunk(TEXT))
            for _ in range(self.dice.randint(18, 28)):
                await asyncio.sleep(0.08)
                await talk.send(chunk(TEXT))
            await talk.send(chunk(DONE) + LAST_CHUNK)
            self.answered += 1


async def client(router: FakeRouter, first: int) -> None:
    """Asks again and again."""
    for number in range(first, 1_000_000, USUAL):
        inbox = await router.send_work(number, b'{"stream": true}')
        frames = router.frames[inbox]
        await router.until(lambda frames=frames: frames and chr(frames[-1].kind) in "ER")
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def asking(router: FakeRouter):
    tasks = [asyncio.create_task(client(router, first)) for first in range(1, USUAL + 1)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_that_takes_turns_is_given_one_at_a_time(nats_server):
    async with scene(nats_server, Engine(1), engine_kind="openai") as at, asking(at.router):
        assert (await at.router.state()).outstanding_max == USUAL
        await at.router.state(outstanding_max=1, batch_max=1)
        await at.router.state(outstanding=1, full=True)


async def test_one_that_batches_is_given_all(nats_server):
    engine = Engine(USUAL)
    async with scene(nats_server, engine, engine_kind="openai") as at, asking(at.router):
        await at.router.until(lambda: engine.answered >= 4 * USUAL)
        assert {beat.outstanding_max for beat in at.router.beats} == {USUAL}
