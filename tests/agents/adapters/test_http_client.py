"""Connections that are kept, and requests as an engine sees them."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator

import pytest

from agents.adapters import http_client
from agents.adapters.http_client import HttpClient, HttpLost
from tests.agents.scripted_engine import (
    CHUNKED,
    Conversation,
    Script,
    ScriptedEngine,
    chunk,
    plain,
    running,
)


async def answers(talk: Conversation) -> None:
    await talk.send(plain(200, b"{}"))


def says_and_sees(answer: bytes, hung_up: asyncio.Event) -> Script:
    """An engine that answers so, and sees its client hang up."""

    async def script(talk: Conversation) -> None:
        await talk.send(answer)
        await talk.hung_up()
        hung_up.set()

    return script


@contextlib.asynccontextmanager
async def client_of(
    script: Script, prefix: str = "", login: str = ""
) -> AsyncIterator[tuple[HttpClient, ScriptedEngine]]:
    async with running(script) as engine:
        client = HttpClient(f"http://{login}127.0.0.1:{engine.port}{prefix}")
        try:
            yield client, engine
        finally:
            client.close()


async def ask(client: HttpClient, body: bytes = b"{}", **headers: str) -> object:
    """Ask, read it all, and release. The connection, to be compared with others."""
    connection = await client.request("POST", "/v1/completions", headers, body)
    try:
        while await connection.read():
            pass
    finally:
        client.release(connection)
    return connection


async def test_what_the_engine_sees() -> None:
    async with client_of(answers, prefix="/a b", login="me%40x:s%3Ay@") as (client, engine):
        await ask(client, **{"X-Request-Id": "q-1"})
    request = engine.requests[0]
    assert (request.method, request.path) == ("POST", "/a%20b/v1/completions")
    assert request.headers == {
        "host": f"127.0.0.1:{engine.port}",
        "authorization": "Basic " + base64.b64encode(b"me@x:s:y").decode(),
        "x-request-id": "q-1",
        "content-length": "2",
    }
    assert request.body == b"{}"


async def test_a_large_body_arrives_whole() -> None:
    body = bytes(range(256)) * 64 * 1024
    async with client_of(answers) as (client, engine):
        await ask(client, body)
    assert engine.requests[0].body == body


async def test_one_after_the_other_shares_a_connection_and_two_at_once_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "KEEPALIVE_S", 60.0)
    async with client_of(answers) as (client, _):
        first = await ask(client)
        assert await ask(client) is first
        both = await asyncio.gather(ask(client), ask(client))
        assert both[0] is not both[1]
        assert await ask(client) in both


async def test_one_that_is_idle_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "KEEPALIVE_S", 0.05)
    closed = asyncio.Event()
    async with client_of(says_and_sees(plain(200, b"{}"), closed)) as (client, _):
        first = await ask(client)
        await closed.wait()
        assert first.is_closing
        assert not client._idle


async def test_one_that_the_engine_closed_is_not_used_again() -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(plain(200, b"{}"))
        talk.close()

    async with client_of(script) as (client, _):
        first = await ask(client)
        while not first.is_closing:
            await asyncio.sleep(0)
        assert await ask(client) is not first


def closes_instead_of_answering(turns: frozenset[int], also: bytes = b"") -> Script:
    """An engine that answers, but to its requests number `turns` sends `also` and closes."""
    turn = 0

    async def script(talk: Conversation) -> None:
        nonlocal turn
        turn += 1
        if turn in turns:
            if also:
                await talk.send(also)
            talk.close()
        else:
            await talk.send(plain(200, b"{}"))

    return script


async def test_a_kept_connection_that_closes_under_a_request_costs_no_answer() -> None:
    async with client_of(closes_instead_of_answering(frozenset({2}))) as (client, engine):
        first = await ask(client)
        assert await ask(client, b"[1]") is not first
    assert [request.body for request in engine.requests] == [b"{}", b"[1]", b"[1]"]


async def test_what_an_engine_may_have_computed_before_it_closed_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "CLOSED_IN_PASSING_S", -1.0)
    async with client_of(closes_instead_of_answering(frozenset({2}))) as (client, engine):
        await ask(client)
        with pytest.raises(HttpLost, match="before its answer"):
            await ask(client)
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    ("script", "sent"),
    [
        pytest.param(closes_instead_of_answering(frozenset({1})), 1, id="a new connection"),
        pytest.param(closes_instead_of_answering(frozenset({2, 3})), 3, id="twice"),
        pytest.param(
            closes_instead_of_answering(frozenset({2}), b"HTTP/1.1 200 OK\r\n"), 2, id="inside"
        ),
    ],
)
async def test_a_request_is_sent_again_only_over_a_kept_connection_and_once(script, sent) -> None:
    async with client_of(script) as (client, engine):
        with pytest.raises(HttpLost, match="before its answer"):
            await ask(client)
            await ask(client)
        assert len(engine.requests) == sent
        assert not client._idle


async def test_an_answer_that_is_left_closes_its_connection() -> None:
    gone = asyncio.Event()
    async with client_of(says_and_sees(CHUNKED + chunk(b"data: 1\n\n"), gone)) as (client, _):
        connection = await client.request("POST", "/v1/completions", {}, b"{}")
        await connection.read()
        client.release(connection)
        await gone.wait()


async def test_what_rests_is_closed_with_the_client() -> None:
    closed = asyncio.Event()
    async with client_of(says_and_sees(plain(200, b"{}"), closed)) as (client, _):
        await ask(client)
        client.close()
        await closed.wait()


async def test_no_host_has_such_a_name() -> None:
    with pytest.raises(HttpLost, match=r"no connection to a\.\.b:80"):
        await ask(HttpClient("http://a..b"))


async def test_nobody_there() -> None:
    async with client_of(answers) as (client, engine):
        await engine.stop()
        with pytest.raises(HttpLost, match=rf"no connection to 127.0.0.1:{engine.port}: ."):
            await ask(client)


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nb", "a\0"])
async def test_a_header_ends_where_its_line_does(value) -> None:
    async with client_of(answers) as (client, engine):
        with pytest.raises(ValueError, match="line end"):
            await ask(client, odd=value)
    assert engine.requests == []
