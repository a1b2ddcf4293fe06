"""Token counts that no client asked for: asked of the engine, and kept out of the answer."""

import pytest

from agents.core.events import TokenUsage
from schemas.exchange import H_ADD_USAGE, Outcome
from tests.agents.adapters.test_relay import USAGE, call, calling
from tests.agents.scripted_engine import CHUNKED, LAST_CHUNK, Conversation, chunk, plain

COUNTED = b'data: {"choices":[],' + USAGE[1:] + b"\n\n"
ASKED = b'{"prompt": "hi","stream_options":{"include_usage":true}}'


@pytest.mark.parametrize(
    ("kind", "asks_usage", "headers", "asked"),
    [
        ("vllm", None, {H_ADD_USAGE: "1"}, True),
        ("sglang", None, {H_ADD_USAGE: "1"}, True),
        ("openai", True, {H_ADD_USAGE: "1"}, True),
        ("vllm", None, {}, False),
        ("vllm", False, {H_ADD_USAGE: "1"}, False),
        ("llamacpp", None, {H_ADD_USAGE: "1"}, False),
        ("openai", None, {H_ADD_USAGE: "1"}, False),
    ],
)
async def test_token_counts_are_asked_for_and_only_then_taken_out(
    kind, asks_usage, headers, asked
) -> None:
    others = [b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n"]

    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED)
        for part in (others[0], COUNTED[:20], COUNTED[20:] + others[1][:4], others[1][4:]):
            await talk.send(chunk(part))
        await talk.send(LAST_CHUNK)

    made, ended, engine = await call(script, kind, asks_usage, **headers)
    assert engine.requests[0].body == (ASKED if asked else b'{"prompt": "hi"}')
    assert made.text == b"".join(others if asked else [others[0], COUNTED, others[1]])
    assert (ended.outcome, ended.usage) == (Outcome.DONE, TokenUsage(9, 4, 2))


async def test_an_engine_that_dies_inside_the_event_breaks_the_stream_as_any_other() -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED + chunk(b'data: {"choices":[{"text":"a"}]}\n\n' + COUNTED[:30]))
        talk.cut()

    made, ended, _ = await call(script, "vllm", **{H_ADD_USAGE: "1"})
    assert ended.outcome is Outcome.ENGINE_LOST
    assert made.text == b'data: {"choices":[{"text":"a"}]}\n\n' + COUNTED[:30]


async def test_an_answer_that_is_no_stream_keeps_its_counts() -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(plain(200, b'{"choices":[],' + USAGE[1:]))

    made, ended, _ = await call(script, "vllm", **{H_ADD_USAGE: "1"})
    assert made.text == b'{"choices":[],' + USAGE[1:]
    assert ended.usage == TokenUsage(9, 4, 2)


# SGLang 0.5.17 with --enable-cache-report, of a prompt of which it had nothing cached.
UNCACHED = (
    b'{"usage":{"prompt_tokens":17,"total_tokens":21,"completion_tokens":4,'
    b'"prompt_tokens_details":null,"reasoning_tokens":0},"metadata":{"weight_version":"default"}}'
)


@pytest.mark.parametrize(
    ("settings", "answer", "cached"),
    [
        (b'{"enable_cache_report":true}', UNCACHED, 0),
        (b'{"enable_cache_report":true}', b"{" + USAGE[1:], 4),
        (b'{"enable_cache_report":true}', b'{"choices":[]}', -1),
        (b'{"enable_cache_report":false}', UNCACHED, -1),
        (b"{}", UNCACHED, -1),
    ],
)
async def test_sglang_that_reports_cached_tokens_had_none_where_it_leaves_them_out(
    settings, answer, cached
) -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(plain(200, answer))

    async with calling(script, kind="sglang") as (made, engine):
        engine.pages |= {"/server_info": settings, "": b"sglang:num_running_reqs 0.0"}
        await made.client.scrape()
        ended = await made.relay.run()
    assert ended.usage.cached_tokens == cached
