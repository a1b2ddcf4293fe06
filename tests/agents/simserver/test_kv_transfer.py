"""Simulated engines with a part in pairs, over real HTTP, as vLLM's and SGLang's are asked."""

import asyncio

import aiohttp
import pytest

from agents.simserver.kv_transfer import KvSettings
from schemas.kv_transfer import KvRole, TransferKind
from tests.agents.simserver.support import MODEL, config, running

NIXL, _, SGLANG = TransferKind
PREFILL, DECODE = KvRole
CHAT = "/v1/chat/completions"
ASKS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}


def engine(role: KvRole, kind: TransferKind = NIXL, *, timeout_s: float = 480.0):
    return running(config(kv=KvSettings(role, kind, timeout_s)))


def chat(words: int = 200, **fields: object) -> dict:
    messages = [{"role": "user", "content": "word " * words}]
    return {"model": MODEL, "messages": messages, "max_tokens": 4, **fields}


def is_free(numbers: dict[str, float]) -> bool:
    return numbers["vllm:kv_cache_usage_perc"] == 0 and numbers["vllm:num_requests_running"] == 0


async def test_a_prompt_is_computed_here_and_answered_there():
    async with engine(PREFILL) as first, engine(DECODE) as second:
        status, answer = await first.post(CHAT, chat(max_tokens=1, kv_transfer_params=ASKS))
        params = answer["kv_transfer_params"]
        assert status == 200 and answer["usage"]["completion_tokens"] == 1
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert len(params["remote_block_ids"][0]) == answer["usage"]["prompt_tokens"] // 16
        assert not is_free(await first.metrics()), "its cache is kept"
        status, answer = await second.post(CHAT, chat(kv_transfer_params=params))
        usage = answer["usage"]
        assert (status, usage["completion_tokens"]) == (200, 4)
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16
        assert is_free(await first.metrics())
        status, answer = await second.post(CHAT, chat(kv_transfer_params=params))
        assert status == 500 and "could not be fetched" in answer["error"]["message"]


async def test_a_cache_that_nobody_fetches_is_given_up():
    async with engine(PREFILL, timeout_s=10.0) as first:
        await first.post(CHAT, chat(max_tokens=1, kv_transfer_params=ASKS))
        await first.until(is_free)


async def test_a_short_prompt_and_a_plain_request_hand_out_nothing():
    async with engine(PREFILL) as first:
        short = {"model": MODEL, "prompt": "hi", "max_tokens": 1, "kv_transfer_params": ASKS}
        assert (await first.post("/v1/completions", short))[1]["kv_transfer_params"] is None
        assert (await first.post(CHAT, chat(max_tokens=1)))[1]["kv_transfer_params"] is None


@pytest.mark.parametrize("missing", ["remote_block_ids", "remote_host", "remote_engine_id"])
async def test_a_decode_engine_requires_what_was_handed_out_whole(missing):
    whole = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1]]}
    whole |= {"remote_host": "127.0.0.1", "remote_port": 9}
    async with engine(DECODE) as second:
        status, answer = await second.post(CHAT, chat(kv_transfer_params=whole | {missing: None}))
        assert status == 400 and missing in answer["error"]["message"]


async def test_a_prefill_engine_that_is_gone_is_the_decode_engines_error():
    async with engine(DECODE) as second:
        async with engine(PREFILL) as first:
            asked = chat(max_tokens=1, kv_transfer_params=ASKS)
            params = (await first.post(CHAT, asked))[1]["kv_transfer_params"]
        status, answer = await second.post(CHAT, chat(kv_transfer_params=params))
        assert status == 500 and "could not be fetched" in answer["error"]["message"]
        assert is_free(await second.metrics())


def in_room(url: str, room: int = 77) -> dict:
    host, port = url.removeprefix("http://").split(":")
    return {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": room}


@pytest.mark.parametrize("first_goes", [PREFILL, DECODE])
async def test_both_engines_meet_in_the_room_whoever_comes_first(first_goes):
    async with engine(PREFILL, SGLANG) as first, engine(DECODE, SGLANG) as second:
        ends = [first, second] if first_goes is PREFILL else [second, first]
        body = chat(**in_room(first.url))
        early = asyncio.create_task(ends[0].post(CHAT, body))
        await ends[0].until(lambda numbers: numbers["vllm:num_requests_running"] == 0)
        answers = await asyncio.gather(early, ends[1].post(CHAT, body))
        assert [status for status, _ in answers] == [200, 200]
        assert is_free(await first.metrics())


@pytest.mark.parametrize("role", list(KvRole))
async def test_the_other_engine_that_never_comes_is_an_error_after_a_while(role):
    async with engine(role, SGLANG, timeout_s=5.0) as lonely:
        status, answer = await lonely.post(CHAT, chat(**in_room(lonely.url)))
        assert status == 500, answer
        assert is_free(await lonely.metrics())


async def test_an_sglang_engine_requires_a_room():
    async with engine(DECODE, SGLANG) as second:
        status, answer = await second.post(CHAT, chat())
        assert status == 400 and "bootstrap_room" in answer["error"]["message"]


async def test_a_client_that_hangs_up_leaves_the_room():
    async with engine(PREFILL, SGLANG) as first:
        timeout = aiohttp.ClientTimeout(total=0.5)
        with pytest.raises(asyncio.TimeoutError):
            async with aiohttp.ClientSession(timeout=timeout) as http:
                await http.post(first.url + CHAT, json=chat(**in_room(first.url)))
        await first.until(is_free)
