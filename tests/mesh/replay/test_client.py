"""One request against a real server: what it sends, and which end each answer is."""

from collections.abc import Awaitable, Callable

import orjson
import pytest
from aiohttp import web

from mesh.replay.client import (
    EndpointClient,
    EndpointError,
    choose_model,
    new_session,
    request_body,
)
from mesh.replay.tally import RequestOutcome, RequestResult
from tests.mesh.replay import endpoint as scripts
from tests.mesh.replay.endpoint import Endpoint, serving
from tests.mesh.replay.test_stream import DONE, ROLE, STOP, WORD
from tests.support.ports import free_ports

BODY = request_body("test/model", "the and for are", 5)


async def ask(url: str, timeout_s: float = 20.0) -> RequestResult:
    now = iter(float(n) for n in range(1000))
    async with new_session(timeout_s=timeout_s) as session:
        return await EndpointClient(session, {"us": url}, lambda: next(now)).send("us", BODY, -2.0)


async def test_a_complete_answer_is_timed_from_when_it_left() -> None:
    async with serving(Endpoint()) as server:
        answer = await ask(server.url)
    assert answer.outcome is RequestOutcome.OK
    assert answer.late_s == 2.0
    assert answer.ttft_s and answer.e2e_s
    assert 1.0 <= answer.ttft_s < answer.e2e_s
    assert len(answer.gaps_s) == 4
    assert answer.usage and answer.usage.output_tokens == 5


async def test_the_request_is_a_streamed_chat_that_runs_to_its_length() -> None:
    async with serving(Endpoint()) as server:
        await ask(server.url)
    assert server.requests == [
        {
            "model": "test/model",
            "messages": [{"role": "user", "content": "the and for are"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,
        }
    ]
    assert orjson.loads(request_body("m", "x", 0))["max_tokens"] == 1


@pytest.mark.parametrize(
    ("behave", "outcome", "reason"),
    [
        (scripts.status(429), RequestOutcome.SHED, "status_429"),
        (scripts.status(503), RequestOutcome.SHED, "status_503"),
        (scripts.status(500), RequestOutcome.FAILED, "status_500"),
        (scripts.status(404), RequestOutcome.FAILED, "status_404"),
        (scripts.status(307), RequestOutcome.FAILED, "status_307"),
        (scripts.plain_json, RequestOutcome.FAILED, "bad_stream"),
        (scripts.body(ROLE, b"data: {\n\n", DONE), RequestOutcome.FAILED, "bad_stream"),
        (scripts.body(WORD, b'data: {"error":{}}\n\n', DONE), RequestOutcome.FAILED, "truncated"),
        (
            scripts.body(WORD, b'data: {"error":"x"}\n\n', DONE),
            RequestOutcome.FAILED,
            "error_event",
        ),
        (scripts.body(WORD, STOP), RequestOutcome.FAILED, "truncated"),
        (scripts.body(), RequestOutcome.FAILED, "truncated"),
        (scripts.abort_inside, RequestOutcome.FAILED, "truncated"),
        (scripts.abort_at_once, RequestOutcome.FAILED, "connection_lost"),
        (scripts.body(WORD, STOP, DONE), RequestOutcome.OK, ""),
    ],
)
async def test_which_end_an_answer_is(
    behave: Callable[[Endpoint, web.Request], Awaitable[web.StreamResponse]],
    outcome: RequestOutcome,
    reason: str,
) -> None:
    async with serving(Endpoint()) as server:
        server.behave = behave
        answer = await ask(server.url)
    assert (answer.outcome, answer.reason) == (outcome, reason)
    assert (answer.e2e_s is None) == (outcome is not RequestOutcome.OK)


@pytest.mark.parametrize("behave", [scripts.silent, scripts.stall_inside])
async def test_an_answer_that_takes_too_long_has_failed(
    behave: Callable[[Endpoint, web.Request], Awaitable[web.StreamResponse]],
) -> None:
    async with serving(Endpoint()) as server:
        server.behave = behave
        answer = await ask(server.url, timeout_s=0.3)
    assert (answer.outcome, answer.reason) == (RequestOutcome.FAILED, "timeout")


async def test_a_refused_connection_is_a_failure_of_its_own() -> None:
    [port] = free_ports(1)
    answer = await ask(f"http://127.0.0.1:{port}")
    assert (answer.outcome, answer.reason) == (RequestOutcome.FAILED, "no_connection")


async def test_the_model_is_the_one_that_all_endpoints_serve() -> None:
    async with (
        serving(Endpoint()) as us,
        serving(Endpoint()) as eu,
        new_session(timeout_s=20) as session,
    ):
        both = {"us": us.url, "eu": eu.url}
        assert await choose_model(session, both, None) == "test/model"
        eu.model = "other"
        with pytest.raises(EndpointError, match=r"eu .* doesn't serve 'test/model'.*other"):
            await choose_model(session, both, None)
        with pytest.raises(EndpointError, match="doesn't serve 'mine'"):
            await choose_model(session, both, "mine")


async def test_an_endpoint_that_is_none_is_named() -> None:
    async with serving(Endpoint()) as server, new_session(timeout_s=20) as session:
        with pytest.raises(EndpointError, match="answered 404"):
            await choose_model(session, {"us": f"{server.url}/elsewhere"}, None)
        [port] = free_ports(1)
        with pytest.raises(EndpointError, match=f"{port}/v1/models doesn't answer .* running"):
            await choose_model(session, {"us": f"http://127.0.0.1:{port}"}, None)
