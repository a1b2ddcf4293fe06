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
from agents.core.kv_events import BlocksStored, Tier
from agents.runtime.held_prompts import LATE_S, LATE_TOKENS_MAX, WAITING_MAX, HeldPrompts
from infra.process import end_all
from schemas.held import HASHES_MAX, HeldDelta, PromptBlocks
from tests.agents.scripted_engine import plain, running
from tests.support.ports import free_ports
from tests.support.until import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Following(HeldPrompts):
    published: list[HeldDelta]
    engine_blocks: HeldBlocks
    now_s = 0.0


@contextlib.asynccontextmanager
async def following():
    """An agent whose engine is not there."""
    events, api = free_ports(2)
    client = HttpClient(f"http://127.0.0.1:{api}", None)
    cache = EngineCache(HeldBlocks())
    source = KvEventSource(cache, f"tcp://127.0.0.1:{events}", None, "")

    async def publish(message) -> None:
        held.published.append(message)

    held = Following(source, HeldLog(cache.held, 1), client, publish, lambda: held.now_s)
    held.published, held.engine_blocks = [], cache.held
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


def ended_before_its_events(held: Following) -> None:
    """A prompt of two engine blocks, of whose two text blocks the routers know."""
    held.engine_blocks.block_tokens, held.engine_blocks.is_whole = 2, True
    held.received(PromptBlocks("inbox", 2.0, (71, 72)))
    held.started("inbox", COMPLETIONS, orjson.dumps({"model": "m", "prompt": [1, 2, 3, 4]}))
    held.ended("inbox")


async def test_a_prompt_whose_events_come_after_its_answer_is_not_lost():
    async with following() as (held, _):
        ended_before_its_events(held)
        await until(lambda: held.waiting == 1)
        event = BlocksStored((8, 9), None, (1, 2, 3, 4), 2, Tier.GPU, "", True)
        held.engine_blocks.apply([event])
        held.now_s = LATE_S / 2
        await until(lambda: bool(held.published))
        [delta] = held.published
        assert (set(delta.gpu), delta.lost) == ({71, 72}, ())


async def test_a_prompt_whose_events_never_come_is_lost():
    async with following() as (held, _):
        ended_before_its_events(held)
        await until(lambda: held.waiting == 1)
        assert held.published == []
        held.now_s = LATE_S
        await until(lambda: bool(held.published))
        assert (held.published[0].gpu, set(held.published[0].lost)) == ((), {71, 72})
        assert held.waiting == 0


async def test_no_prompt_waits_while_not_all_that_the_engine_holds_is_known():
    async with following() as (held, _):
        held.engine_blocks.apply([BlocksStored((8,), None, (1, 2), 2, Tier.GPU, "", True)])
        ended_before_its_events(held)
        held.engine_blocks.is_whole = False
        await until(lambda: bool(held.published))
        [delta] = held.published
        assert (delta.gpu, delta.lost, held.waiting) == ((71,), (), 0)


async def test_prompts_wait_no_longer_once_events_are_lost():
    async with following() as (held, _):
        ended_before_its_events(held)
        await until(lambda: held.waiting == 1)
        held.engine_blocks.forget()
        held.now_s = LATE_S / 2
        await until(lambda: held.waiting == 0)
        assert held.published == [] and not held.engine_blocks.changes


def ended_with(held: Following, text: int, tokens: int) -> None:
    """A prompt of one text block and so many tokens, of which no event has come."""
    held.engine_blocks.block_tokens, held.engine_blocks.is_whole = 1024, True
    held.received(PromptBlocks("inbox", 1.0, (text,)))
    body = orjson.dumps({"model": "m", "prompt": [text] * tokens})
    held.started("inbox", COMPLETIONS, body)
    held.ended("inbox")


async def test_the_oldest_late_prompts_are_settled_above_the_limit_of_tokens():
    async with following() as (held, _):
        ended_with(held, 1, LATE_TOKENS_MAX // 2)
        ended_with(held, 2, LATE_TOKENS_MAX // 4)
        ended_with(held, 3, LATE_TOKENS_MAX // 4)
        await until(lambda: held.waiting == 3)
        assert held.published == []
        ended_with(held, 4, LATE_TOKENS_MAX // 2 + 1)
        await until(lambda: bool(held.published))
        assert held.published[0].lost == (1, 2)
        assert held.waiting == 2
        held.now_s = LATE_S
        await until(lambda: held.waiting == 0)
        ended_with(held, 5, LATE_TOKENS_MAX)  # as much room as at first
        await until(lambda: held.waiting == 1)


async def test_the_oldest_late_prompt_is_settled_above_the_limit_of_prompts():
    async with following() as (held, _):
        for text in range(WAITING_MAX):
            ended_with(held, text, 1024)
        await until(lambda: held.waiting == WAITING_MAX)
        assert held.published == []
        ended_with(held, WAITING_MAX, 1024)
        await until(lambda: bool(held.published))
        assert (held.published[0].lost, held.waiting) == ((0,), WAITING_MAX)


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
