"""What each end of an answer over real HTTP says about the engine."""

import asyncio
import socket
import time

import pytest

from agents.adapters.engine import EngineClient
from agents.adapters.engine_kinds import KINDS
from agents.core.engine_results import ANSWERED, NOTHING_SAID, Verdict
from schemas.engine_routes import SERVER_PATHS
from schemas.exchange import Outcome, Refusal, Refused
from tests.agents.adapters.test_relay import Call, call, calling, cut_after, whole
from tests.agents.scripted_engine import (
    CHUNKED,
    LAST_CHUNK,
    Conversation,
    ScriptedEngine,
    chunk,
    plain,
    running,
)

ERROR = b'{"error":{"message":"no","type":"%s","code":%d}}'
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'


def stream(*events: bytes) -> bytes:
    return CHUNKED + b"".join(map(chunk, events)) + LAST_CHUNK


def busy(retry_after: bytes) -> bytes:
    return (
        b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\nRetry-After: "
        + retry_after
        + b"\r\n\r\n{}"
    )


def failed(what: str) -> Verdict:
    return Verdict(failure=what)


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        (plain(200, b"{}"), ANSWERED),
        (stream(EVENT, b"data: [DONE]\n\n"), ANSWERED),
        (plain(400, b"{}"), NOTHING_SAID),
        (plain(404, b"{}"), NOTHING_SAID),
        (plain(501, b"{}"), NOTHING_SAID),
        (plain(401, b"{}"), failed("HTTP 401")),
        (plain(500, b"{}"), failed("HTTP 500")),
        (plain(503, b""), failed("HTTP 503")),
        (plain(429, b"{}"), Verdict(too_many_s=1.0)),
        (busy(b"7"), Verdict(too_many_s=7.0)),
        (busy(b"999999"), Verdict(too_many_s=60.0)),
        (plain(200, b""), failed("an empty answer")),
        (stream(), failed("an empty answer")),
        (plain(200, b"<html>", "text/event-stream"), failed("a broken answer")),
        (b"nonsense\r\n\r\n", failed("a broken answer")),
        (b"", failed("closed its connection without an answer")),
        (stream(b"data: " + ERROR % (b"server_error", 500)), failed("an error as its first event")),
        (stream(b"data: " + ERROR % (b"invalid_request_error", 400)), NOTHING_SAID),
        (stream(b"data: " + ERROR % (b"rate_limit_error", 429)), Verdict(too_many_s=1.0)),
        (
            stream(EVENT, b"data: " + ERROR % (b"server_error", 500) + b"\n\n"),
            failed("an error inside its stream"),
        ),
        (CHUNKED + chunk(EVENT), failed("a cut answer")),
    ],
)
async def test_what_an_end_says(response, verdict) -> None:
    made, ended, _ = await call(cut_after(response) if response else closes)
    assert ended.verdict == verdict, made.end


async def closes(talk: Conversation) -> None:
    talk.close()


async def test_an_engine_that_takes_no_connection() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        client = EngineClient(
            api_url=url, metrics_url=url, kind=KINDS["openai"], clock=time.monotonic
        )
        ended = await Call(ScriptedEngine(closes), client, {}).relay.run()
        client.close()
    assert (ended.outcome, ended.verdict) == (Outcome.ENGINE_LOST, failed("no connection"))


@pytest.mark.parametrize("path", sorted(SERVER_PATHS))
@pytest.mark.parametrize(("status", "verdict"), [(200, NOTHING_SAID), (500, failed("HTTP 500"))])
async def test_what_the_http_server_answers_alone_is_no_answer(path, status, verdict) -> None:
    async with calling(whole(plain(status, b"{}")), path=path) as (made, engine):
        engine.also_serves = (path,)
        ended = await made.relay.run()
    assert (ended.outcome, ended.verdict) == (Outcome.DONE, verdict)


PLACED_AGAIN = Refused(Refusal.ENGINE_DOWN, "us", "g0", -1, -1)


@pytest.mark.parametrize(
    ("outcome", "refused", "verdict"),
    [
        (Outcome.CANCELLED, None, NOTHING_SAID),
        (Outcome.DEADLINE, None, NOTHING_SAID),
        (Outcome.PREEMPTED, None, NOTHING_SAID),
        (Outcome.ENGINE_LOST, None, failed("no answer in time")),  # a hang for long
        (Outcome.ENGINE_LOST, PLACED_AGAIN, NOTHING_SAID),  # an alarm, which may be false
    ],
)
async def test_an_answer_that_the_agent_ended(outcome, refused, verdict) -> None:
    reached = asyncio.Event()

    async def silent(talk: Conversation) -> None:
        reached.set()
        await talk.hung_up()

    async with calling(silent) as (made, _):
        running_relay = asyncio.create_task(made.relay.run())
        await reached.wait()
        made.relay.abort(outcome, "why", refused)
        ended = await running_relay
    assert (ended.outcome, ended.verdict) == (outcome, verdict)


async def test_a_client_error_is_doubted_where_the_last_requests_all_had_one() -> None:
    statuses = [400, 400, 422, 400, 429, 422, 200, 400, 404]
    answers = iter(statuses)

    async def script(talk: Conversation) -> None:
        await talk.send(plain(next(answers), b"{}"))

    doubted = []
    async with running(script) as engine:
        client = EngineClient(
            api_url=engine.url, metrics_url=engine.url, kind=KINDS["openai"], clock=time.monotonic
        )
        for _ in statuses:
            made = Call(engine, client, {})
            await made.relay.run()
            doubted.append(made.head.doubted)
        client.close()
    assert doubted == [0, 1, 1, 1, 0, 1, 0, 0, 1]
