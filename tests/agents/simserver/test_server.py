"""The server over real HTTP, mostly through the official OpenAI client."""

import asyncio
import io
import json

import aiohttp
import openai
import pytest
from aiohttp import web

from agents.simserver.metrics import PageKind
from agents.simserver.prompt_work import RENDER
from infra.process import end_all
from tests.agents.simserver.support import MODEL, Engine, chat, config, faults, running


def sdk(engine: Engine) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)


STORY = "Once upon a time there was a region with no replicas left. " * 20


async def test_models_and_health():
    async with running() as engine, sdk(engine) as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL, "sim/alias"]
        async with engine.http.get(f"{engine.url}/health") as response:
            assert response.status == 200


async def test_a_chat_streams_the_text_that_a_whole_answer_has():
    async with running() as engine, sdk(engine) as client:
        messages = [{"role": "user", "content": STORY}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=40,
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens == len(text) // 4
    assert usage.prompt_tokens == whole.usage.prompt_tokens == len(STORY) // 4 + 3
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 16 * 16


async def test_a_chat_is_rendered_into_the_tokens_that_it_counts_as():
    async with running() as engine:
        chat_body = {"model": MODEL, "messages": [{"role": "user", "content": STORY}]}
        status, rendered = await engine.post(RENDER, chat_body)
        _, counted = await engine.post("/tokenize", chat_body)
        assert status == 200 and rendered["token_ids"] == counted["tokens"]
        assert len(rendered["token_ids"]) == len(STORY) // 4 + 3
        status, _ = await engine.post(RENDER, {"messages": []})
        assert status == 400


async def test_without_include_usage_no_chunk_has_usage():
    async with running() as engine, sdk(engine) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
        )
        async for chunk in stream:
            assert chunk.choices
            assert chunk.usage is None


async def test_the_next_turn_of_a_chat_hits_the_cache_beyond_its_own_prompt():
    async with running() as engine, sdk(engine) as client:
        messages = [{"role": "user", "content": STORY}]
        first = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=80, extra_body={"ignore_eos": True}
        )
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "Go on."},
        ]
        second = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    known = first.usage.total_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == known // 16 * 16


async def test_completions_of_text_and_of_token_ids():
    async with running() as engine, sdk(engine) as client:
        text = await client.completions.create(model=MODEL, prompt="abcdefgh", max_tokens=5)
        ids = [int.from_bytes(part, "little") for part in (b"abcd", b"efgh")]
        same = await client.completions.create(model=MODEL, prompt=ids, max_tokens=5)
        stream = await client.completions.create(
            model=MODEL, prompt="abcdefgh", max_tokens=5, stream=True
        )
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert text.choices[0].text == same.choices[0].text == streamed
    assert text.usage.prompt_tokens == same.usage.prompt_tokens == 2


async def test_a_response_is_named_after_the_request_id_that_came_with_it():
    async with running() as engine, sdk(engine) as client:
        ask = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        named = await client.chat.completions.create(
            **ask, extra_headers={"x-request-id": "from-the-mesh-1"}
        )
        unsafe = await client.chat.completions.create(**ask, extra_headers={"x-request-id": '"\\'})
        other = await client.chat.completions.create(**ask)
    assert named.id == "chatcmpl-from-the-mesh-1"
    assert len({named.id, unsafe.id, other.id}) == 3
    assert '"' not in unsafe.id


async def test_stop_sequences_end_the_stream_and_are_not_shown():
    async with running() as engine, sdk(engine) as client:
        messages = [{"role": "user", "content": "hi"}]
        ask = {"model": MODEL, "messages": messages, "max_tokens": 30}
        ask["extra_body"] = {"ignore_eos": True}
        full = (await client.chat.completions.create(**ask)).choices[0].message.content
        stop = full[50:54]
        stream = await client.chat.completions.create(**ask, stop=[stop], stream=True)
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == full[: full.find(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_bad_requests_come_back_as_the_sdks_own_errors():
    async with running() as engine, sdk(engine) as client:
        messages = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.NotFoundError, match=r"sim/tiny, sim/alias"):
            await client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError, match="only n = 1"):
            await client.chat.completions.create(model=MODEL, messages=messages, n=3)
        with pytest.raises(openai.BadRequestError, match="shorten the prompt"):
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x" * 4 * 38_000}]
            )


async def test_http_errors_have_openais_shape():
    async with running() as engine:
        status, body = await engine.post("/v1/unheard-of", {})
        assert (status, body["error"]["code"]) == (404, None)
        status, body = await engine.post("/v1/completions", {"model": "other", "prompt": "a"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        async with engine.http.get(f"{engine.url}/v1/completions") as response:
            assert response.status == 405
            assert "error" in await response.json()
        async with engine.http.post(
            f"{engine.url}/v1/completions", data=io.BytesIO(bytes(32 * 1024 * 1024 + 1))
        ) as response:
            assert response.status == 413
            assert "33554432 bytes" in (await response.json())["error"]["message"]


async def test_a_client_that_hangs_up_frees_its_memory_at_once():
    async with running(config(time_scale=1.0)) as engine:
        body = chat(STORY, max_tokens=2000, ignore_eos=True, stream=True)
        async with engine.http.post(f"{engine.url}/v1/chat/completions", json=body) as response:
            await response.content.readany()
            numbers = await engine.metrics()
            assert numbers["vllm:num_requests_running"] == 1
            assert numbers["vllm:kv_cache_usage_perc"] > 0
        numbers = await engine.until(lambda seen: seen["vllm:num_requests_running"] == 0)
        assert numbers["vllm:kv_cache_usage_perc"] == 0
        assert numbers["vllm:generation_tokens_total"] < 100


async def test_a_client_that_hangs_up_before_its_first_byte_is_forgotten():
    async with running(config(faults=faults(hang="engine"))) as engine:
        asking = asyncio.create_task(engine.post("/v1/chat/completions", chat()))
        waiting = asyncio.create_task(engine.post("/v1/chat/completions", chat(stream=True)))
        await engine.until(lambda seen: open_requests(seen) == 2)
        asking.cancel()
        waiting.cancel()
        await engine.until(lambda seen: open_requests(seen) == 0)
        await asyncio.gather(asking, waiting, return_exceptions=True)


async def test_a_client_whose_end_comes_between_two_writes_is_one_line(monkeypatch, caplog):
    write = web.StreamResponse.write

    async def leaves(self, data):
        self._req.transport.abort()  # what a reset does to it
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", leaves)
    async with running() as engine:
        with pytest.raises(aiohttp.ClientError):
            await engine.post("/v1/chat/completions", chat(stream=True))
        await engine.until(lambda seen: open_requests(seen) == 0)
    [record] = caplog.records
    assert record.getMessage().endswith(": its client left before the end of the answer")
    assert record.exc_info is None


def open_requests(numbers: dict[str, float]) -> float:
    return numbers["vllm:num_requests_running"] + numbers["vllm:num_requests_waiting"]


async def test_requests_share_the_batch_and_the_rest_waits():
    async with running(config(time_scale=1.0, max_seqs=2)) as engine:
        body = chat(max_tokens=500, ignore_eos=True)
        asking = [asyncio.create_task(engine.post("/v1/chat/completions", body)) for _ in range(5)]
        await engine.until(
            lambda seen: (
                (seen["vllm:num_requests_running"], seen["vllm:num_requests_waiting"]) == (2, 3)
            )
        )
        await end_all(asking)
        await engine.until(lambda seen: seen["vllm:num_requests_waiting"] == 0)


async def test_time_scale_is_how_many_times_faster_it_runs():
    loop = asyncio.get_running_loop()
    async with running(config(time_scale=50.0)) as engine:
        body = chat("x" * 4 * 509, max_tokens=200, ignore_eos=True)
        began = loop.time()
        status, answer = await engine.post("/v1/chat/completions", body)
        took_s = loop.time() - began
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 512
    unscaled_s = 0.301 + 199 * 0.0457  # prefill, and decode iterations
    assert unscaled_s / 50 <= took_s < unscaled_s


async def test_sglangs_page_and_no_page():
    async with running(config(metrics=PageKind.SGLANG)) as engine:
        await engine.post("/v1/chat/completions", chat(max_tokens=4, ignore_eos=True))
        numbers = await engine.metrics()
        assert numbers["sglang:generation_tokens_total"] == 4
        assert numbers["sglang:max_total_num_tokens"] == 38_000
    async with (
        running(config(metrics=PageKind.NONE)) as engine,
        engine.http.get(f"{engine.url}/metrics") as response,
    ):
        assert response.status == 404


async def stream_until_it_breaks(engine: Engine, **more: object) -> tuple[bytes, bool]:
    """What came of one stream, and whether HTTP ended it properly."""
    received = b""
    body = chat(max_tokens=20, ignore_eos=True, stream=True, **more)
    try:
        async with engine.http.post(f"{engine.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            async for part in response.content.iter_any():
                received += part
    except aiohttp.ClientPayloadError:
        return received, False
    return received, True


def contents(received: bytes) -> list[str]:
    events = [json.loads(e[6:]) for e in received.split(b"\n\n") if e.startswith(b"data: {")]
    return [text for e in events if (text := e["choices"][0]["delta"].get("content"))]


async def test_a_stream_cut_in_the_middle_of_an_event():
    async with running(config(faults=faults(stream="cut", stream_after_tokens=3))) as engine:
        received, proper = await stream_until_it_breaks(engine)
        await engine.until(lambda seen: seen["vllm:num_requests_running"] == 0)
    whole, _, half = received.rpartition(b"\n\n")
    assert not proper
    assert len(contents(whole)) == 3
    with pytest.raises(json.JSONDecodeError):
        json.loads(half.removeprefix(b"data: "))


async def test_garbage_instead_of_events():
    switches = faults(stream="garbage", stream_after_tokens=0)
    async with running(config(faults=switches)) as engine:
        received, proper = await stream_until_it_breaks(engine)
    assert proper
    assert received.startswith(b"<html>")


async def test_a_clean_end_without_done():
    switches = faults(stream="no_done", stream_after_tokens=4)
    async with running(config(faults=switches)) as engine:
        received, proper = await stream_until_it_breaks(engine)
    assert proper
    assert len(contents(received)) == 4
    assert b"[DONE]" not in received


async def test_errors_at_a_rate_and_healing():
    async with running(config(faults=faults(error_rate=1, error_status=503))) as engine:
        status, body = await engine.post("/v1/chat/completions", chat())
        assert (status, body["error"]["type"]) == (503, "server_error")
        async with engine.http.delete(f"{engine.url}/sim/faults") as response:
            assert (await response.json())["error_rate"] == 0
        status, _ = await engine.post("/v1/chat/completions", chat(max_tokens=1))
        assert status == 200


async def test_faults_are_set_one_by_one_at_run_time():
    async with running() as engine:
        await engine.post("/sim/faults", {"slow": 3})
        status, now = await engine.post("/sim/faults", {"error_rate": 0.5})
        assert (status, now["slow"], now["error_rate"]) == (200, 3.0, 0.5)
        async with engine.http.get(f"{engine.url}/sim/faults") as response:
            assert await response.json() == now
        for bad in ({"slow": 0}, {"sloww": 2}, [1]):
            status, body = await engine.post("/sim/faults", bad)
            assert (status, body["error"]["type"]) == (400, "invalid_request_error")


async def test_a_hang_stops_a_stream_midway_and_goes_on_when_healed():
    async with running(config(faults=faults(slow=50))) as engine:
        body = chat(max_tokens=120, ignore_eos=True, stream=True)
        async with engine.http.post(f"{engine.url}/v1/chat/completions", json=body) as response:
            received = await response.content.readany()
            await engine.post("/sim/faults", {"hang": "engine"})
            tokens = (await engine.metrics())["vllm:generation_tokens_total"]
            assert tokens < 120
            # A healthy engine, as slow, would send a token every 46 ms.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    while True:
                        received += await response.content.readany()
            assert (await engine.metrics())["vllm:generation_tokens_total"] == tokens
            await engine.post("/sim/faults", {"hang": "off", "slow": 1})
            received += await response.content.read()
    assert len(contents(received)) == 120


async def test_a_hung_server_answers_nothing_but_its_switches():
    async with running() as engine:
        await engine.post("/sim/faults", {"hang": "server"})
        health = asyncio.create_task(engine.metrics())
        _, pending = await asyncio.wait([health], timeout=0.1)
        assert pending
        await engine.post("/sim/faults", {"hang": "off"})
        assert await asyncio.wait_for(health, 20)


async def test_a_slow_engine_takes_that_much_longer():
    loop = asyncio.get_running_loop()
    async with running(config(time_scale=50.0, faults=faults(slow=10))) as engine:
        began = loop.time()
        await engine.post("/v1/chat/completions", chat(max_tokens=10, ignore_eos=True))
        assert loop.time() - began >= (0.045 + 9 * 0.0457) / 5
