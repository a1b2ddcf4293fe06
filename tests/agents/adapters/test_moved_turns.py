"""What an engine does with system turns among the messages of `/v1/messages`, over real HTTP."""

import time

import orjson
import pytest

from agents.adapters.engine import EngineClient
from agents.adapters.engine_kinds import KINDS
from agents.core.events import EngineScraped
from tests.agents.scripted_engine import Conversation, plain, running

LOAD = (
    "vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n"
    "sglang:num_queue_reqs 0\nsglang:num_running_reqs 0\nllamacpp:requests_deferred 0\n"
)


class Tokenizer:
    """An engine's `/tokenize`: its statuses for two turns, and for four."""

    def __init__(self, plain_status: int, mixed_status: int) -> None:
        self.statuses, self.asked = {2: plain_status, 4: mixed_status}, 0

    async def script(self, talk: Conversation) -> None:
        asked = orjson.loads(talk.request.body)
        if "messages" not in asked:  # whether there is such a route
            await talk.send(plain(200, b"{}"))
            return
        self.asked += 1
        roles = [turn["role"] for turn in asked["messages"]]
        assert roles == ["system", "user"] * (len(roles) // 2)
        await talk.send(plain(self.statuses[len(roles)], b"{}"))


@pytest.mark.parametrize(
    ("kind", "statuses", "moves", "asked"),
    [
        ("vllm", (200, 200), False, 2),
        ("vllm", (200, 400), True, 2),
        ("sglang", (200, 400), True, 2),
        ("vllm", (400, 400), False, 1),  # a model without a template answers no chat
        ("vllm", (404, 404), False, 1),
        ("vllm", (501, 501), False, 1),
        ("llamacpp", (200, 400), False, 0),
    ],
)
async def test_an_engine_is_asked_once_what_its_template_takes(kind, statuses, moves, asked):
    tokenizer = Tokenizer(*statuses)
    async with running(tokenizer.script) as server:
        server.metrics, server.also_serves = LOAD, ("/tokenize",)
        client = EngineClient(server.url, f"{server.url}/metrics", KINDS[kind], time.monotonic)
        try:
            for _ in range(3):
                scraped = await client.scrape()
                assert isinstance(scraped, EngineScraped)
                assert scraped.system_first is moves
        finally:
            client.close()
    assert tokenizer.asked == asked


@pytest.mark.parametrize(
    "statuses", [(503, 200), (401, 401), (429, 200), (200, 408), (200, 429), (200, 500)]
)
async def test_an_engine_that_could_not_say_is_asked_again(statuses):
    tokenizer, now = Tokenizer(*statuses), 0.0
    async with running(tokenizer.script) as server:
        server.metrics, server.also_serves = LOAD, ("/tokenize",)
        client = EngineClient(server.url, f"{server.url}/metrics", KINDS["vllm"], lambda: now)
        try:
            scraped = await client.scrape()
            assert isinstance(scraped, EngineScraped) and not scraped.system_first
            tokenizer.statuses = {2: 200, 4: 400}
            now = 60.0
            scraped = await client.scrape()
            assert isinstance(scraped, EngineScraped) and scraped.system_first
        finally:
            client.close()
