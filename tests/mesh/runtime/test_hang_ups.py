"""A client that hangs up, at every point of the exchange: nothing of its request is left."""

import asyncio
from dataclasses import replace

import pytest
from aiohttp import web

from agents.core.stream_errors import EVENT_BYTES_MAX
from infra.bus import BusAddress, connect
from infra.process import end_all
from schemas import subjects
from schemas.state import encode_state
from tests.support.scripted_engine import ScriptedEngine, cut_after, event, hang
from tests.support.small_mesh import chat, client, set_all


async def half_error(request, body):
    """An error answer that never ends."""
    stream = web.StreamResponse(status=500, headers={"content-type": "application/json"})
    await stream.prepare(request)
    await stream.write(b'{"error": {"message": ')
    await asyncio.Event().wait()
    return stream


async def hang_up(mesh, ready, what: str) -> None:
    """Ask, wait until `ready()`, and hang up; nothing of the request must be left."""
    async with client() as session:
        url = mesh.urls["us"] + "/v1/chat/completions"
        task = asyncio.create_task(session.post(url, json=chat(stream=True)))
        await mesh.until(ready, what)
        assert not task.done()
        await end_all([task])
    await until_nothing_is_left(mesh)


async def until_nothing_is_left(mesh) -> None:
    router = mesh.routers["us"]
    await mesh.until(lambda: router.requests.open_requests == 0, "no request to be open")
    assert not router.core.inflight
    assert len(router.core.held) == 0
    assert router.requests.bodies.taken_bytes == 0


@pytest.mark.parametrize(
    ("behaviour", "has_bytes"),
    [
        (hang(), False),
        (hang(b'data: {"choices":[{"half'), False),
        (hang(b'data: {"choices":[{"half' + b"f" * EVENT_BYTES_MAX), True),
        (half_error, True),
    ],
    ids=[
        "before the head",
        "inside the first event",
        "inside a long one",
        "inside an error answer",
    ],
)
async def test_a_client_that_hangs_up_before_it_has_a_byte_frees_the_engine(
    one, behaviour, has_bytes
):
    set_all(one, behaviour)
    requests = one.routers["us"].requests
    await hang_up(
        one,
        lambda: any(e.seen for e in one.engines) and (requests.buffered_bytes() > 0) is has_bytes,
        "the answer to come so far",
    )
    await one.until(lambda: any(e.hung_up.is_set() for e in one.engines), "the engine to see it")


async def test_a_client_that_hangs_up_inside_its_answer_frees_the_engine(one):
    set_all(one, hang(event("begun")))
    async with client() as session:
        url = one.urls["us"] + "/v1/chat/completions"
        async with session.post(url, json=chat(stream=True)) as answer:
            await answer.content.readany()
            answer.close()
        await one.until(
            lambda: any(e.hung_up.is_set() for e in one.engines), "the engine to see it"
        )
    await until_nothing_is_left(one)


async def test_a_client_that_leaves_on_the_last_event_had_its_answer(one, monkeypatch):
    """As OpenAI's clients do; what the engine counted is still learned."""
    # It comes in time on any machine.
    monkeypatch.setattr("mesh.runtime.request_manager.END_S", 4.0)
    router, may_end = one.routers["us"], asyncio.Event()

    async def says_done(request, body):
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        usage = b'{"choices": [], "usage": {"prompt_tokens": 70, "completion_tokens": 1}}'
        await stream.write(b"data: " + usage + b"\n\ndata: [DONE]\n\n")
        await may_end.wait()
        return stream

    set_all(one, says_done)
    async with client() as session:
        url = one.urls["us"] + "/v1/chat/completions"
        async with session.post(url, json=chat(stream=True)) as answer:
            while b"[DONE]" not in await answer.content.readany():
                pass
            answer.close()
        [record] = router.requests.session
        await one.until(lambda: record.answer.has_last_event, "the last event to be given out")
        may_end.set()
        await until_nothing_is_left(one)
    assert one.sample("us", "mesh_requests_total", outcome="ok") == 1.0
    assert one.sample("us", "mesh_requests_total", outcome="client_gone") == 0.0
    assert one.sample("us", "mesh_prompt_tokens_total", served_region="us") == 70.0


async def test_a_client_that_leaves_on_the_last_event_waits_for_no_engine(one):
    set_all(one, hang(b"data: [DONE]\n\n"))
    async with client() as session:
        url = one.urls["us"] + "/v1/chat/completions"
        async with session.post(url, json=chat(stream=True)) as answer:
            await answer.content.readany()
            answer.close()
        await until_nothing_is_left(one)
    await one.until(lambda: any(e.hung_up.is_set() for e in one.engines), "the engine to see it")
    assert one.sample("us", "mesh_requests_total", outcome="ok") == 1.0


async def test_a_client_that_hangs_up_after_a_second_placement_frees_the_second_engine(one):
    broken: list[ScriptedEngine] = []

    async def first_breaks_second_hangs(request, body):
        if not broken:
            broken.extend(engine for engine in one.engines if engine.seen)
            return await cut_after(b"")(request, body)
        return await hang()(request, body)

    set_all(one, first_breaks_second_hangs)
    await hang_up(one, lambda: all(e.seen for e in one.engines), "the second engine to be asked")
    [second] = [engine for engine in one.engines if engine not in broken]
    await one.until(second.hung_up.is_set, "the second engine to see it")


async def test_a_client_that_hangs_up_while_replicas_refuse_leaves_the_queue(one, nats_server):
    await seem_free(one, nats_server)
    core = one.routers["us"].core
    await hang_up(
        one,
        lambda: len(core.held) == 1 and one.sample("us", "mesh_refusals_total", reason="full") >= 2,
        "both to have refused and the request to be held",
    )
    assert all(engine.seen == [] for engine in one.engines)


async def seem_free(mesh, nats_server) -> None:
    """Every replica is full, and the router will not believe it."""
    for engine in mesh.engines:
        engine.waiting = 9
    await mesh.until_ready("us", 0)
    liar = await connect(BusAddress(nats_server.url), name="liar", inbox_prefix="_INBOX.liar")
    for replica in mesh.routers["us"].core.replicas:
        beat = replica.heartbeat  # with a higher number what the agent itself says is old
        free = replace(beat, seq=beat.seq + 1_000_000, full=False, pending=0)
        await liar.publish(subjects.heartbeat("us", beat.replica), encode_state(free))
    await liar.close()
    await mesh.until_ready("us", len(mesh.engines))


async def test_a_client_that_hangs_up_while_held_leaves_the_queue(one):
    for engine in one.engines:
        engine.waiting = 3
    await one.until_ready("us", 0)
    core = one.routers["us"].core
    async with client() as session:
        url = one.urls["us"] + "/v1/chat/completions"
        task = asyncio.create_task(session.post(url, json=chat()))
        await one.until(lambda: len(core.held) == 1, "the request to be held")
        await end_all([task])
        await one.until(lambda: len(core.held) == 0, "the queue to be empty")
    assert not core.inflight
