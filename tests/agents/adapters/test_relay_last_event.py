"""What the last event of an answer decides, and errors that an engine sends as an event."""

import asyncio
import json

import pytest

from agents.core.engine_results import NOTHING_SAID
from agents.core.events import RelayBegan, TokenUsage
from schemas.exchange import Outcome
from tests.agents.adapters.test_relay import call, calling, events, whole
from tests.agents.scripted_engine import CHUNKED, Conversation, chunk, plain


@pytest.mark.parametrize("how", ["abort", "cut"])
async def test_nothing_cuts_an_answer_that_is_complete(how) -> None:
    """Its last event has come and the end of the connection's body has not."""
    go = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n"))
        await go.wait()
        talk.cut()

    async with calling(script) as (made, _):
        relay = asyncio.create_task(made.relay.run())
        await made.until(lambda: b"[DONE]" in made.text)
        if how == "abort":
            made.relay.abort(Outcome.CANCELLED, "nobody was received")
        else:
            go.set()
        ended = await relay
        go.set()
    assert (ended.outcome, made.end.outcome, made.end.detail) == (Outcome.DONE, Outcome.DONE, "")


TORN = b"event: response.completed\ndata: " + b"x" * 40_000


@pytest.mark.parametrize("event", [TORN, TORN[:26]])
async def test_an_abort_inside_an_event_is_no_fault_of_the_engine(event) -> None:
    async def script(talk: Conversation) -> None:
        first = b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'
        await talk.send(CHUNKED + chunk(first) + chunk(event))
        await talk.hung_up()

    async with calling(script, path="/v1/responses") as (made, engine):
        engine.also_serves = ("/v1/responses",)
        relay = asyncio.create_task(made.relay.run())
        await made.until(lambda: made.text.endswith(event))
        made.relay.abort(Outcome.CANCELLED, "nobody was received")
        ended = await relay
    assert (ended.outcome, ended.verdict) == (Outcome.CANCELLED, NOTHING_SAID)


async def test_an_abort_after_the_last_byte_of_a_plain_answer_comes_too_late() -> None:
    async with calling(whole(plain(200, b"{}"))) as (made, _):

        async def waits(event: RelayBegan) -> None:
            while not made.relay._response.is_ended:
                await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(made.relay.abort, Outcome.CANCELLED, "late")

        made.relay._began = waits
        ended = await made.relay.run()
    assert ended.outcome is Outcome.DONE


ERROR = b'{"error": {"message": "EngineCore died", "type": "InternalServerError", "code": %d}}'


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("torn_at", [0, 4, 20])
async def test_a_stream_that_begins_with_an_error_is_that_http_error(status, torn_at) -> None:
    event = b"data: " + ERROR % status + b"\n\n"
    parts = [part for part in (event[:torn_at], event[torn_at:], b"data: [DONE]\n\n") if part]
    made, ended, _ = await call(whole(events(*parts)))
    assert (made.kinds, made.head.status, made.head.content_type) == (
        "HDE",
        status,
        "application/json",
    )
    assert json.loads(made.text) == json.loads(ERROR % status)
    assert (ended.outcome, ended.streamed, ended.usage) == (Outcome.DONE, False, TokenUsage())


@pytest.mark.parametrize("done", [b"", b"data: [DONE]\n\n"])
async def test_a_stream_that_ends_with_an_error_has_failed(done) -> None:
    """The client gets it as it came; the end says what became of the answer."""
    parts = (b"data: 1\n\n", b"data: " + ERROR % 500 + b"\n\n", done)
    made, ended, _ = await call(whole(events(*(part for part in parts if part))))
    assert made.text == b"".join(parts)
    assert ended.outcome is Outcome.ENGINE_FAILED
    assert (made.head.status, made.end.detail) == (200, "EngineCore died")
