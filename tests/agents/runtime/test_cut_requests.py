"""A request that its deadline cuts counts as running at a real engine that shows no numbers."""

import time

import orjson
import pytest

from agents.core.cut_requests import TOKEN_S
from schemas.exchange import H_DEADLINE_MS, Outcome
from tests.agents.scene import scene
from tests.agents.scripted_engine import Conversation

TOKENS = 3000


async def silent(talk: Conversation) -> None:
    await talk.hung_up()


@pytest.mark.parametrize(("stream", "counts"), [(False, 1), (True, 0)])
async def test_it_counts_until_its_estimated_end(nats_server, stream, counts) -> None:
    passed_s = 0.0
    kind = {"engine_kind": "openai", "clock": lambda: time.monotonic() + passed_s}
    body = orjson.dumps({"max_tokens": TOKENS, "stream": stream})
    async with scene(nats_server, silent, **kind) as on:
        inbox = await on.router.send_work(1, body, **{H_DEADLINE_MS: "300"})
        assert (await on.router.answer(inbox)).outcome == Outcome.DEADLINE
        await on.router.state(running=counts, outstanding=0)
        passed_s += TOKENS * TOKEN_S / 2
        await on.router.state(running=counts, outstanding=0)
        passed_s += TOKENS * TOKEN_S / 2
        await on.router.state(running=0, outstanding=0)
