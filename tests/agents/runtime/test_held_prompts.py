"""Prompts that routers place here, whatever they and their clients send."""

import asyncio
import contextlib

import orjson
import pytest

from agents.adapters.http_client import HttpClient
from agents.adapters.kv_events import KvEventSource
from agents.adapters.prompt_tokens import prompt_tokens
from agents.config import checked_kv_address
from agents.core.engine_cache import EngineCache
from agents.core.held_blocks import HeldBlocks
from agents.core.held_log import HeldLog
from agents.runtime.held_prompts import HeldPrompts
from infra.process import end_all
from schemas.held import HASHES_MAX, PromptBlocks
from tests.agents.scripted_engine import plain, running
from tests.support.ports import free_ports
from tests.support.until import until

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def following():
    """An agent whose engine is not there."""
    events, api = free_ports(2)
    client = HttpClient(f"http://127.0.0.1:{api}", None)
    cache = EngineCache(HeldBlocks())
    source = KvEventSource(cache, f"tcp://127.0.0.1:{events}", None, "")

    async def publish(_) -> None: ...

    held = HeldPrompts(source, HeldLog(cache.held, 1), client, publish, lambda: 0.0)
    running = asyncio.create_task(held.run())
    try:
        yield held, running
    finally:
        await end_all([running])
        client.close()


def deep(levels: int) -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    given = orjson.dumps({"model": "m", "messages": messages})[:-1]
    return given + b',"chat_template_kwargs":' + b"[" * levels + b"]" * levels + b"}"


async def test_a_prompt_nested_deeper_than_can_be_written_is_left_alone():
    async with following() as (held, running):
        held.received(PromptBlocks("inbox", 2.0, (1, 2)))
        held.started("inbox", CHAT, deep(300))
        held.ended("inbox")
        await until(lambda: held.left_alone == 1)
        assert not running.done()


@pytest.mark.parametrize("length", [float("nan"), float("inf"), 0.0, -1.0, 1e300])
async def test_a_length_that_no_prompt_has_is_ignored(length):
    async with following() as (held, running):
        held.received(PromptBlocks("inbox", length, (1, 2)))
        held.received(PromptBlocks("other", 2.0, tuple(range(HASHES_MAX + 1))))
        assert held.left_alone == 2
        for inbox in ("inbox", "other"):
            held.started(inbox, CHAT, deep(1))
            held.ended(inbox)
        assert held.left_alone == 4  # their prompts have no blocks
        assert not running.done()


async def test_the_engine_is_asked_for_tokens_in_json():
    async with running(lambda talk: talk.send(plain(200, b'{"tokens":[1,2]}'))) as engine:
        engine.also_serves = ("/tokenize",)
        client = HttpClient(engine.url, None)
        assert await prompt_tokens(client, {"model": "m", "prompt": "x"}) == [1, 2]
        client.close()
        [request] = engine.requests
        assert request.headers["content-type"] == "application/json"  # vLLM refuses any other


@pytest.mark.parametrize(
    "address", ["tcp://*:5557", "tcp://u@h:1", "tcp://h:1?x", "tcp://h:1/", "ipc://", "h:1"]
)
def test_an_address_that_a_socket_would_refuse_is_refused(address):
    with pytest.raises(ValueError, match="tcp://host:port"):
        checked_kv_address(address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5557", "tcp://[::1]:1", "ipc:///tmp/kv"])
def test_an_address_that_a_socket_takes_is_taken(address):
    assert checked_kv_address(address) == address
