"""One region over real NATS: router and agents of this process, engines over real HTTP."""

import asyncio

import aiohttp
import openai
import orjson
import pytest

from infra.bus import BusAddress, connect
from mesh.http.answer_writer import AnswerWriter
from schemas import subjects
from schemas.exchange import WINDOW_BYTES
from tests.support.flushed import flushed
from tests.support.raw_http import connections
from tests.support.scripted_engine import (
    cut_after,
    event,
    fail,
    hang,
    opened,
    raw_stream,
    say,
    scripted_engine,
)
from tests.support.small_mesh import chat, client, one_replica, post, set_all
from tests.support.until import PATIENCE_S


async def test_the_official_client_streams(one):
    set_all(one, say("one ", "two"))
    async with openai.AsyncOpenAI(base_url=one.urls["us"] + "/v1", api_key="none") as api:
        stream = await api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        words = [c.choices[0].delta.content async for c in stream if c.choices]
        plain = await api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}]
        )
        names = [model.id for model in (await api.models.list()).data]
    assert words == ["one ", "two"]
    assert plain.choices[0].message.content == "one two"
    assert names == ["tiny"]


async def test_a_wish_that_nobody_can_read_is_told(one):
    async with openai.AsyncOpenAI(base_url=one.urls["us"] + "/v1", api_key="none") as api:
        for headers in ({"x-mesh-priority": "urgent"}, {"x-mesh-slo-ttft-ms": "soon"}):
            with pytest.raises(openai.BadRequestError) as caught:
                await api.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": "hi"}],
                    extra_headers=headers,
                )
            assert [caught.value.param] == list(headers)
    assert [engine.seen for engine in one.engines] == [[], []]


async def test_engine_bytes_pass_untouched(one):
    odd = b'data: {"choices": [ {"delta":{"content":"\xc3\xa9"}}]}\r\n\r\n: comment\n\n'
    odd += b"data: [DONE]\n\n"
    set_all(one, raw_stream(odd[:20], odd[20:41], odd[41:]))
    status, body, headers = await post(one, chat(stream=True))
    assert (status, body) == (200, odd)
    assert headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        (
            "/v1/chat/completions",
            b'{ "model":"tiny",  "messages":[{"role":"user","content":"x"}] ,"unknown":{"a":1.50}}',
        ),
        ("/v1/completions", b'{ "model":"tiny",  "prompt_embeds":["QUJD"] ,"unknown":1.50}'),
    ],
)
async def test_the_body_reaches_the_engine_byte_for_byte(one, path, raw):
    async with client() as session, session.post(one.urls["us"] + path, data=raw) as answer:
        assert answer.status == 200
    seen = [body for engine in one.engines for body in engine.seen]
    assert seen == [orjson.loads(raw)]
    lengths = [int(h["Content-Length"]) for e in one.engines for h in e.headers]
    assert lengths == [len(raw)]


async def test_request_id_and_decision_come_back(one):
    status, _, headers = await post(one, chat(), **{"x-request-id": "abc-1", "x-mesh-debug": "1"})
    decision = orjson.loads(headers["x-mesh-decision"])
    assert status == 200
    assert headers["x-request-id"] == "abc-1"
    assert decision["request"] == "abc-1"
    assert decision["placement"] == "local"
    assert decision["replica"] in ("us-0", "us-1")
    assert {candidate["name"] for candidate in decision["candidates"]} == {"us-0", "us-1"}


async def test_nobody_can_guess_where_an_answer_goes(one, nats_server):
    # Every agent may publish to any inbox: only not knowing the others keeps it to its own.
    spy = await connect(BusAddress(nats_server.url), name="spy", inbox_prefix="_INBOX.spy")
    work = await spy.subscribe(subjects.work("us", subjects.ANY))
    await flushed(spy)
    assert [(await post(one, chat()))[0] for _ in range(3)] == [200] * 3
    inboxes = [(await work.next_msg(timeout=PATIENCE_S)).reply for _ in range(3)]
    tokens = [subjects.parse_inbox(inbox).stream for inbox in inboxes]
    assert len({token[:8] for token in tokens}) == 3
    assert all(len(token) >= 24 for token in tokens)
    await spy.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_resets_before_its_first_byte_is_replaced(one, stream):
    first, second = one.engines
    first.behaviour = cut_after(b"")
    second.behaviour = say("fine")
    for _ in range(2):  # round robin meets the bad one in one of two
        status, body, _ = await post(one, chat(stream=stream))
        assert status == 200
        assert b"fine" in body
    assert first.seen


async def test_an_engine_that_breaks_after_its_first_byte_ends_in_an_error_event(one):
    gate = asyncio.Event()
    set_all(one, cut_after(event("begun") + b'data: {"half', gate))
    async with client() as session:
        url = one.urls["us"] + "/v1/chat/completions"
        async with session.post(url, json=chat(stream=True)) as answer:
            assert await answer.content.readany() == event("begun")
            gate.set()
            rest = await answer.content.read()
    assert orjson.loads(rest.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert b"[DONE]" not in rest and b"half" not in rest


async def test_the_official_client_raises_when_a_stream_breaks(one):
    gate = asyncio.Event()
    set_all(one, cut_after(event("begun"), gate))
    async with openai.AsyncOpenAI(
        base_url=one.urls["us"] + "/v1", api_key="none", max_retries=0
    ) as api:
        stream = await api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError):
            async for _ in stream:
                gate.set()


async def test_garbage_instead_of_events_is_placed_again(one):
    first, second = one.engines
    first.behaviour = raw_stream(b"<html>gateway down</html>")
    second.behaviour = say("fine")
    for _ in range(2):
        status, body, _ = await post(one, chat(stream=True))
        assert (status, b"fine" in body, b"html" in body) == (200, True, False)


async def test_engine_4xx_passes_as_it_is(one):
    set_all(one, fail(422, "bad temperature"))
    status, body, _ = await post(one, chat())
    assert status == 422
    assert orjson.loads(body)["error"]["message"] == "bad temperature"
    assert sum(len(engine.seen) for engine in one.engines) == 1  # not tried twice


async def test_engine_5xx_is_placed_again_and_passed_on_when_all_fail(one):
    first, second = one.engines
    first.behaviour, second.behaviour = fail(500), say("fine")
    for _ in range(2):
        assert (await post(one, chat()))[0] == 200
    second.behaviour = fail(503, "loading")
    status, body, _ = await post(one, chat())
    assert status in (500, 503)
    assert "engine says no" in body.decode() or "loading" in body.decode()


async def test_a_dead_engine_takes_no_more_work(one):
    first, second = one.engines
    second.behaviour = say("fine")
    await first.stop()
    for _ in range(4):
        status, body, _ = await post(one, chat(stream=True))
        assert (status, b"fine" in body) == (200, True)


async def test_an_error_of_our_own_frees_the_engine_and_leaves_nothing(one, monkeypatch):
    def fails(*arguments) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(AnswerWriter, "_start_stream", fails)
    set_all(one, hang(event("begun")))
    status, body, headers = await post(one, chat(stream=True))
    assert (status, orjson.loads(body)["error"]["code"]) == (500, "internal_error")
    assert headers["x-mesh-region"] == "us" and headers["x-request-id"]
    await one.until(lambda: any(e.hung_up.is_set() for e in one.engines), "the engine to be freed")
    assert not one.routers["us"].core.inflight
    assert one.routers["us"].requests.open_requests == 0


async def test_held_requests_go_out_first_come_first_served(one, nats_server):
    spy = await connect(BusAddress(nats_server.url), name="spy", inbox_prefix="_INBOX.spy")
    work = await spy.subscribe(subjects.work("us", "us-0"))
    await flushed(spy)
    for engine in one.engines:
        engine.waiting = 1
    await one.until_ready("us", 0)
    core = one.routers["us"].core
    tasks = []
    for number in range(3):
        tasks.append(asyncio.create_task(post(one, chat(f"request {number}"))))
        await one.until(lambda n=number: len(core.held) == n + 1, "it to be held")
    one.engines[0].waiting = 0
    results = await asyncio.gather(*tasks)
    assert [status for status, _, _ in results] == [200] * 3
    # On the bus: each goes to its engine on a connection of its own, and may overtake another.
    sent = [orjson.loads((await work.next_msg(timeout=PATIENCE_S)).data) for _ in tasks]
    order = [body["messages"][0]["content"] for body in sent]
    assert order == ["request 0", "request 1", "request 2"]
    await spy.close()


async def test_an_agent_restarted_with_another_model_is_known_by_it(one, nats_server):
    await one.kill_agent("us-0")
    async with scripted_engine("other") as engine:
        await one.agent("us", "us-0", engine)
        core = one.routers["us"].core
        await one.until(lambda: "other" in core.models(), "the new model to be known")
        assert (await post(one, chat() | {"model": "other"}))[0] == 200
        for _ in range(3):  # and the old one never reaches the new engine
            assert (await post(one, chat()))[0] == 200
        assert [body["model"] for body in engine.seen] == ["other"]
        await one.kill_agent("us-0")


async def test_all_full_and_no_room_to_hold_is_shed_with_retry_after(nats_server):
    async with one_replica(nats_server, policy="least-load", hold_max=1, hold_s_max=1.0) as mesh:
        [engine] = mesh.engines
        engine.waiting = 5
        await mesh.until_ready("us", 0)
        held = asyncio.create_task(post(mesh, chat()))
        await mesh.until(lambda: len(mesh.routers["us"].core.held) == 1, "one to be held")
        status, body, headers = await post(mesh, chat())
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert orjson.loads(body)["error"]["code"] == "saturated"
        status, _, headers = await held  # and the held one when its time is up
        assert status == 429
        assert int(headers["retry-after"]) >= 1


async def test_drain_finishes_what_runs_and_refuses_the_new(one):
    gate = asyncio.Event()
    set_all(one, hang(event("begun"), gate))
    body = orjson.dumps(chat())
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    async with client() as session, connections(one.urls["us"], 1) as [(reader, writer)]:
        url = one.urls["us"] + "/v1/chat/completions"
        async with session.post(url, json=chat(stream=True)) as answer:
            await answer.content.readany()
            writer.write((head % len(body)).encode() + body[:-1])
            router = one.routers["us"]
            draining = asyncio.create_task(router.drain())
            await one.until(lambda: router.core.draining, "the drain to begin")
            with pytest.raises(aiohttp.ClientConnectorError):
                await post(one, chat())
            writer.write(body[-1:])
            refused = (await reader.read()).lower()
            assert refused.startswith(b"http/1.1 503") and b'"code":"draining"' in refused
            assert b"retry-after" in refused and b"connection: close" in refused
            gate.set()
            assert b"[DONE]" in await answer.content.read()
            await draining


async def test_who_is_cut_off_by_the_end_of_a_drain_is_told_so(one, monkeypatch):
    monkeypatch.setattr("mesh.runtime.router.ERRORS_SENT_S", 240.0)
    gate, gone = asyncio.Event(), asyncio.Event()

    async def behaviour(request, body):
        try:
            return await hang(event("begun"), gate)(request, body)
        finally:
            gone.set()

    set_all(one, behaviour)
    router = one.routers["us"]
    object.__setattr__(router._config, "drain_s", 0.2)
    async with client() as session:
        url = one.urls["us"] + "/v1/chat/completions"
        async with session.post(url, json=chat(stream=True)) as answer:
            await answer.content.readany()
            await router.drain()
            *_, last = (await answer.content.read()).split(b"data: ")
            assert orjson.loads(last)["error"]["code"] == "draining"
    await gone.wait()  # and nobody works for it any more


async def test_a_slow_reader_stops_the_engine_not_the_router(one):
    flood = 64 * 1024 * 1024
    sent = 0

    async def behaviour(request, body):
        nonlocal sent
        stream = await opened(request)
        block = b": " + b"x" * 16381 + b"\n" + b"\n"
        while sent < flood:
            await stream.write(block)
            sent += len(block)
        return stream

    set_all(one, behaviour)
    host, port = one.urls["us"].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, port)
    body = orjson.dumps(chat(stream=True))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    router = one.routers["us"]
    # The agent was given credit: what it may send without is a window.
    await one.until(lambda: sent > 2 * WINDOW_BYTES, "the answer to flow")
    previous = -1
    while sent != previous:  # the pressure has reached the engine when it sends no more
        previous = sent
        await asyncio.sleep(0.5)
    assert sent < flood // 3  # what windows and socket buffers on the way hold
    assert router.requests.buffered_bytes() < 1024 * 1024
    writer.transport.abort()
    await one.until(lambda: router.requests.open_requests == 0, "no request to be open")
