"""Answers on paths that some engines lack: whose a 404 is, early errors, and where usage is."""

import pytest

from agents.core.events import RelayEnded, TokenUsage
from schemas.exchange import H_KEEPER, H_MODEL, Head, Outcome, Refusal, Refused
from schemas.subjects import encode_model
from schemas.wire import decode_as
from tests.agents.adapters.test_relay import Call, calling, events, whole
from tests.agents.scripted_engine import MODEL, Script, plain


async def _embedded(script: Script) -> tuple[Call, RelayEnded]:
    async with calling(script, path="/v1/embeddings") as (made, engine):
        engine.embeds = True
        ended = await made.relay.run()
    return made, ended


async def _messages(script: Script) -> tuple[Call, RelayEnded]:
    async with calling(script, path="/v1/messages") as (made, engine):
        engine.also_serves = ("/v1/messages",)
        ended = await made.relay.run()
    return made, ended


async def test_what_an_engine_does_not_support_in_a_request_is_its_answer() -> None:
    made, ended = await _messages(lambda talk: talk.send(plain(501, b'{"error":{}}')))
    assert (made.kinds, ended.outcome) == ("HDE", Outcome.DONE)
    assert decode_as(Head, made.frames[0][2]).status == 501


async def test_an_error_after_opening_events_is_an_http_error() -> None:
    start = b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n'
    error = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"no"}}\n\n'
    made, _ = await _messages(whole(events(start, error)))
    assert made.kinds == "HDE"
    assert decode_as(Head, made.frames[0][2]).status == 500


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_engine_without_the_path_refuses_what_another_may_serve(status) -> None:
    made, ended = await _embedded(lambda talk: talk.send(plain(status, b"{}")))
    assert made.kinds == "R"
    assert decode_as(Refused, made.frames[0][2]).reason == Refusal.WRONG_MODEL
    assert (ended.outcome, made.began) == (Outcome.ENGINE_LOST, [])  # its models are read again


async def test_other_errors_of_that_path_are_the_clients() -> None:
    made, _ = await _embedded(lambda talk: talk.send(plain(400, b'{"error":"too long"}')))
    assert (made.kinds, made.head.status, made.text) == ("HDE", 400, b'{"error":"too long"}')


async def test_the_usage_of_vectors_is_read_at_either_end() -> None:
    usage, vectors = b'"usage":{"prompt_tokens":7}', b'"data":["' + b"x" * 100_000 + b'"]'
    for body in (b"{%s,%s}" % (usage, vectors), b"{%s,%s}" % (vectors, usage)):
        made, ended = await _embedded(lambda talk, body=body: talk.send(plain(200, body)))
        assert made.text == body
        assert ended.usage == TokenUsage(prompt_tokens=7)


async def test_404_on_a_path_that_the_engine_turned_out_to_have_is_the_answer() -> None:
    answers = iter([plain(200, b"{}")] * 2 + [plain(404, b'{"error":"no such model"}')])
    async with calling(lambda talk: talk.send(next(answers)), path="/v1/messages") as (
        made,
        engine,
    ):
        engine.also_serves = ("/v1/messages",)
        client = made.relay._engine
        await client.scrape()
        assert client.lacks("/v1/messages")  # an earlier request's answer
        await client.scrape()
        await made.relay.run()
    assert (made.kinds, made.head.status) == ("HDE", 404)


ERROR_FIRST = events(b'data: {"error":{"message":"no","code":500}}\n\n')
MESSAGES, EMBEDDINGS, RESPONSES = "/v1/messages", "/v1/embeddings", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "more", "response", "has"),
    [
        (MESSAGES, {}, plain(200, b'{"a":1}'), True),
        (MESSAGES, {}, plain(404, b"{}"), False),
        (EMBEDDINGS, {}, plain(501, b"{}"), False),
        (MESSAGES, {}, plain(501, b"{}"), None),  # a field that it does not support
        (RESPONSES, {H_KEEPER: "us/g0"}, plain(404, b"{}"), None),  # of what it was to keep
        (MESSAGES, {}, plain(404, b'{"error":"model not found"}'), None),
        (MESSAGES, {}, plain(400, b"{}"), None),
        (MESSAGES, {}, ERROR_FIRST, None),
        (MESSAGES, {}, plain(200, b""), None),
        (MESSAGES, {}, plain(200, b"<html>"), None),
    ],
)
async def test_what_an_answer_teaches_about_its_path(path, more, response, has) -> None:
    headers = {H_MODEL: encode_model(MODEL), **more}
    async with calling(whole(response), path=path, **headers) as (made, engine):
        engine.also_serves, engine.embeds = (path,), True
        routes = made.client.optional.routes
        routes.listed((MODEL, "another"), on_demand=True, now=0.0)
        await made.relay.run()
        lacking = routes.known().lacking.get(MODEL, ())
    learned = {(each, True) for each in routes.paths} | {(each, False) for each in lacking}
    assert learned == (set() if has is None else {(path, has)})
