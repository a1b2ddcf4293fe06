"""How the profiler sees an engine: which API it uses, how many tokens its prompts have, and which
engines it refuses."""

import contextlib
import random
from collections.abc import AsyncIterator

import orjson
import pytest

from agents.config import EngineConfig
from agents.profiler.engine import STREAMS_MAX, ProfiledEngine
from agents.profiler.stream import LINE_BYTES_MAX, EngineUnusable, Stream
from tests.agents.scripted_engine import Conversation, Script, ScriptedEngine, plain
from tests.agents.simserver.support import MODEL, config, faults, running

EVENTS = "text/event-stream"


def event(choice: dict[str, object] | None = None, **more: object) -> bytes:
    choices = [] if choice is None else [choice]
    return b"data: " + orjson.dumps({"choices": choices, **more}) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event(usage=counts)


@contextlib.asynccontextmanager
async def scripted(script: Script, models: list[str], **options: object) -> AsyncIterator[tuple]:
    """An engine of a test's own, and the profiler's client of it."""
    server = ScriptedEngine(script, models=models)
    await server.start()
    settings = EngineConfig(engine_kind="vllm", engine_url=server.url, **options)
    engine = ProfiledEngine(settings, random.Random(1))
    try:
        yield server, engine
    finally:
        await engine.close()
        await server.stop()


def always(answer: bytes) -> Script:
    return lambda conversation: conversation.send(answer)


@pytest.mark.parametrize(
    ("answer", "models", "says"),
    [
        (plain(200, b"{}"), [], "lists no model"),
        (plain(200, b'{"choices": []}'), ["m"], "no event stream on /v1/completions"),
        (plain(404, b'{"detail": "Not Found"}'), ["m"], "HTTP 404 on /v1/chat/completions"),
        (plain(400, b'{"error": {"message": "odd"}}'), ["m"], "on /v1/chat/completions: odd"),
        (plain(503, b"loading"), ["m"], "HTTP 503 on /v1/completions: loading"),
        (plain(200, b"data: [DONE]\n\n", EVENTS), ["m"], "without a token"),
        (plain(200, b'data: {"error": {"message": "no"}}\n\n', EVENTS), ["m"], "request: no"),
        (
            plain(200, event({"text": "abcd"}) * 2 + usage(9, 8), EVENTS),
            ["m"],
            "sends 4.0 tokens in one event",
        ),
        (plain(200, b"data: " + b"x" * (LINE_BYTES_MAX + 1), EVENTS), ["m"], "more than 1048576"),
    ],
)
async def test_engines_that_can_t_be_profiled(answer, models, says):
    async with scripted(always(answer), models) as (_, engine):
        with pytest.raises(EngineUnusable) as refused:
            await engine.connect()
    assert says in str(refused.value)


async def test_chat_is_used_where_there_are_no_completions_and_refused_fields_are_left_out():
    async def script(conversation: Conversation) -> None:
        body = orjson.loads(conversation.request.body)
        if conversation.request.path != "/v1/chat/completions":
            await conversation.send(plain(404, b"{}"))
        elif "ignore_eos" in body:
            await conversation.send(plain(400, b'{"error": {"message": "ignore_eos"}}'))
        else:
            # A template of 7 tokens, and three tokens for two words.
            words = len(body["messages"][0]["content"].split())
            first = event({"delta": {"role": "assistant", "content": ""}})
            tokens = event({"delta": {"content": "a"}}) * 16
            last = event({"delta": {}, "finish_reason": "length"})
            data = first + tokens + last + usage(7 + words * 3 // 2, 16) + b"data: [DONE]\n\n"
            await conversation.send(plain(200, data, EVENTS))

    async with scripted(script, ["m"]) as (server, engine):
        await engine.connect()
        stream = Stream(307, 5)
        engine.start(stream, priority=4)
        await stream.reached()
        body = orjson.loads(server.requests[-1].body)
    assert stream.is_whole and len(stream.token_at) == 16
    assert stream.usage.prompt_tokens == 307
    assert (body["max_tokens"], body["priority"], body["stream"]) == (5, 4, True)


@pytest.mark.parametrize(
    ("choice", "is_token"),
    [
        ({"text": "a"}, True),
        ({"text": "", "finish_reason": None}, True),  # a token that is no whole character
        ({"text": "", "finish_reason": "length"}, False),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"role": "assistant", "content": None}}, False),
        ({"delta": {"role": "assistant", "content": "a"}}, True),
        ({"delta": {"content": "a"}, "finish_reason": "stop"}, True),
        ({"delta": {"content": ""}}, True),
        ({"delta": {"reasoning_content": "a"}}, True),
        ({"delta": {"reasoning": "a"}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
        ({}, False),
        (None, False),
        ("odd", False),
    ],
)
def test_which_events_are_tokens(choice, is_token):
    stream = Stream(1, 1)
    data = b": comment\r\n\r\n" + b"data: " + orjson.dumps({"choices": [choice]}) + b"\r\n\r\n"
    for at in range(len(data)):  # however the bytes are cut
        stream.feed(data[at : at + 1])
    stream.feed(b"data: [DONE]\n\ndata: nonsense\n\n")
    assert len(stream.token_at) == is_token


async def test_every_prompt_is_new_and_its_length_is_what_was_wanted():
    async with running(config()) as server:
        settings = EngineConfig(engine_kind="vllm", engine_url=server.url)
        engine = ProfiledEngine(settings, random.Random(7))
        try:
            await engine.connect()
            assert engine.model == MODEL and engine.context_tokens > 1000
            streams = [Stream(tokens, 3) for tokens in (16, 500, 500)]
            for stream in streams:
                engine.start(stream)
                await stream.reached()
        finally:
            await engine.close()
    assert [stream.usage.prompt_tokens for stream in streams] == [16, 500, 500]
    assert [len(stream.token_at) for stream in streams] == [3, 3, 3]
    assert streams[2].usage.cached_tokens == 0


async def test_cancelling_a_request_ends_it_at_the_engine_and_there_is_a_limit():
    async with running(config(time_scale=1.0)) as server:
        settings = EngineConfig(engine_kind="vllm", engine_url=server.url)
        engine = ProfiledEngine(settings, random.Random(7))
        try:
            await engine.connect()
            stream = Stream(10, 5000)
            engine.start(stream)
            await stream.reached(1)
            await engine.idle()
            assert stream.has_ended and not stream.is_whole
            assert engine.reading.running == 0
            tasks = [engine.start(Stream(1, 1)) for _ in range(STREAMS_MAX)]
            with pytest.raises(EngineUnusable, match="more than the engine serves"):
                engine.start(Stream(1, 1))
            for task in tasks:
                task.cancel()
        finally:
            await engine.close()


async def test_an_engine_that_is_used_by_others_is_refused(monkeypatch):
    monkeypatch.setattr("agents.profiler.engine.IDLE_TIMEOUT_S", 0.2)
    async with running(config()) as server:
        settings = EngineConfig(engine_kind="vllm", engine_url=server.url)
        ours, theirs = (ProfiledEngine(settings, random.Random(seed)) for seed in (1, 2))
        try:
            await ours.connect()
            await theirs.connect()
            stream = Stream(10, 30_000)  # half a minute long
            theirs.start(stream)
            await stream.reached(1)
            with pytest.raises(EngineUnusable, match="that nobody else uses"):
                await ours.idle()
        finally:
            await ours.close()
            await theirs.close()


async def test_an_engine_that_goes_silent_is_refused(monkeypatch):
    monkeypatch.setattr("agents.profiler.stream.SILENCE_S", 0.3)
    hung = config(time_scale=1.0, faults=faults(hang="engine"))
    async with running(hung) as server:
        settings = EngineConfig(engine_kind="vllm", engine_url=server.url)
        engine = ProfiledEngine(settings, random.Random(1))
        try:
            with pytest.raises(EngineUnusable, match="sent no token for"):
                await engine.connect()
        finally:
            await engine.close()
