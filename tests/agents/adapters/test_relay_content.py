"""Content and other bytes of answers, over real HTTP: what is sent on, and what shows work."""

import asyncio

import pytest

from schemas.exchange import Outcome
from schemas.http import CHAT
from tests.agents.adapters.test_relay import calling, cut_after, events, whole
from tests.agents.scripted_engine import (
    CHUNKED,
    LAST_CHUNK,
    Conversation,
    Script,
    chunk,
    plain,
)

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
COMMENT = b": keep-alive\n\n"
ERROR = b'data: {"error": {"message": "no", "code": 503}}\n\n'


@pytest.mark.parametrize("before", [ROLE, COMMENT, COMMENT + ROLE])
async def test_an_engine_that_is_lost_before_content_has_sent_nothing(before) -> None:
    """So the request can be placed again, unseen."""
    async with calling(cut_after(CHUNKED + chunk(before)), CHAT) as (made, _):
        ended = await made.relay.run()
        assert (made.kinds, ended.outcome, made.began) == ("E", Outcome.ENGINE_LOST, [])
        assert made.client.last_content_at < 0.0


async def test_an_error_behind_the_role_is_an_http_error() -> None:
    async with calling(whole(events(ROLE, ERROR)), CHAT) as (made, _):
        await made.relay.run()
    assert (made.kinds, made.head.status) == ("HDE", 503)


async def test_a_page_where_json_was_promised_is_no_answer() -> None:
    """A proxy before the engine that wants a login answers 200 with one."""
    page = plain(200, b"<html>Sign in</html>", content_type="text/html")
    async with calling(whole(page), CHAT) as (made, _):
        ended = await made.relay.run()
    assert (made.kinds, ended.outcome) == ("E", Outcome.ENGINE_BROKEN)


async def test_what_comes_before_content_is_sent_with_it() -> None:
    async with calling(whole(events(COMMENT, ROLE, TEXT, STOP)), CHAT) as (made, _):
        ended = await made.relay.run()
    assert (ended.outcome, made.text) == (Outcome.DONE, COMMENT + ROLE + TEXT + STOP)


async def test_comments_of_an_engine_that_computes_nothing_pass_and_are_no_sign_of_work() -> None:
    goes_on = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED + chunk(ROLE) + chunk(TEXT))
        await goes_on.wait()
        goes_on.clear()
        await talk.send(chunk(COMMENT[:5]))
        await talk.send(chunk(COMMENT[5:] + COMMENT))
        await goes_on.wait()
        await talk.send(chunk(STOP) + LAST_CHUNK)

    async with calling(script, CHAT) as (made, _):
        running = asyncio.create_task(made.relay.run())
        await made.until(lambda: made.text == ROLE + TEXT)
        content_at = made.client.last_content_at
        assert content_at > 0.0
        goes_on.set()
        await made.until(lambda: made.text == ROLE + TEXT + COMMENT + COMMENT)
        assert made.client.last_content_at == content_at
        goes_on.set()
        assert (await running).outcome is Outcome.DONE
        assert made.client.last_content_at > content_at


@pytest.mark.parametrize(("body", "kinds"), [(b" \n{}", "HDE"), (b" \n", "HDE")])
async def test_white_space_of_a_plain_answer_is_no_sign_of_work(body, kinds) -> None:
    async with calling(whole(plain(200, body)), CHAT) as (made, _):
        await made.relay.run()
        assert (made.kinds, made.text) == (kinds, body)
        assert (made.client.last_content_at > 0.0) is (body != b" \n")


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\nconnection: close\r\n\r\n"
EVENTS, JSON = HEAD % b"text/event-stream", HEAD % b"application/json"


def closing(answer: bytes) -> Script:
    """The body ends with the connection."""

    async def script(talk: Conversation) -> None:
        await talk.send(answer)
        talk.close()

    return script


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (closing(EVENTS + ROLE + TEXT), Outcome.ENGINE_BROKEN),
        (closing(EVENTS + ROLE + TEXT + STOP), Outcome.DONE),
        (whole(events(ROLE, TEXT)), Outcome.ENGINE_BROKEN),  # by a proxy whose upstream broke
        (whole(events(ROLE, TEXT, STOP)), Outcome.DONE),
        (whole(events(ROLE, TEXT, b"data: [DONE]\n\n")), Outcome.DONE),
        (whole(events(ROLE, TEXT, b"data: {what\n\n", STOP)), Outcome.DONE),
        (closing(JSON + b'{"choices": [{"text": "a'), Outcome.ENGINE_BROKEN),
        (closing(JSON + b'{"choices": [{"text": "a"}'), Outcome.ENGINE_BROKEN),
        (closing(JSON + b'{"choices": [{"text": "a"}]}\n'), Outcome.DONE),
        (closing(HEAD % b"text/plain" + b"{"), Outcome.DONE),
        (whole(plain(200, b'{"choices": [')), Outcome.ENGINE_BROKEN),  # of the announced length
    ],
)
async def test_what_is_cut_where_framing_does_not_tell_is_broken(script, outcome) -> None:
    async with calling(script, CHAT, kind="vllm") as (made, _):
        ended = await made.relay.run()
        assert (made.kinds[0], ended.outcome) == ("H", outcome)


async def test_a_stream_that_ends_without_content_can_be_placed_again() -> None:
    async with calling(whole(events(ROLE)), CHAT) as (made, _):
        ended = await made.relay.run()
    assert (made.kinds, ended.outcome) == ("E", Outcome.ENGINE_BROKEN)
