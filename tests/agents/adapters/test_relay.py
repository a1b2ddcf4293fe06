"""One answer over real HTTP: every way an engine can end it, and every way we can."""

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import AsyncIterator

import pytest
import uvloop

from agents.adapters.engine import EngineClient, EngineOptions
from agents.adapters.engine_kinds import KINDS
from agents.adapters.engine_request import ReplicaSite
from agents.adapters.outbox import FrameWriter
from agents.adapters.relay import Relay
from agents.core.effects import StartRelay
from agents.core.events import RelayBegan, RelayEnded, TokenUsage
from agents.core.kv_stages import KvStage
from agents.core.work_message import WorkRequest
from schemas.engine_routes import SERVER_PATHS
from schemas.exchange import (
    H_MODEL,
    WINDOW_BYTES,
    End,
    Frame,
    Head,
    Outcome,
    unpack_frame,
)
from schemas.kv_transfer import KvRole, TransferKind
from schemas.subjects import decode_model, encode_model
from schemas.wire import decode_as
from tests.agents.scripted_engine import (
    CHUNKED,
    LAST_CHUNK,
    MODEL,
    Conversation,
    Script,
    ScriptedEngine,
    chunk,
    plain,
    running,
)

INBOX = "_INBOX.us.r1.1"
USAGE = (
    b'{"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}'
)


class Call:
    """A relay to a scripted engine, and the frames it sent."""

    def __init__(
        self,
        engine: ScriptedEngine,
        client: EngineClient,
        headers,
        path: str = "/v1/completions",
        stage: KvStage | None = None,
        first_window: int = WINDOW_BYTES,
    ) -> None:
        self.frames: list[tuple[Frame, int, bytes]] = []
        self.began: list[RelayBegan] = []
        self.sent = asyncio.Event()
        self.client = client
        model = decode_model(headers[H_MODEL]) if H_MODEL in headers else ""
        kept = {"stage": stage, "first_window": first_window}
        work = WorkRequest(model, path, "q-1", 10.0, None, **kept)
        hand = StartRelay(INBOX, work, headers, b'{"prompt": "hi"}')
        self.relay = Relay(
            hand,
            engine=client,
            frames=FrameWriter(self._post, time.monotonic),
            clock=time.monotonic,
            began=self._began,
            site=ReplicaSite("us", "g0", transfer=None if stage is None else TransferKind.NIXL),
        )

    def _post(self, frame: bytes, urgent: bool) -> None:
        view = unpack_frame(frame)
        self.frames.append((view.kind, view.number, bytes(view.payload)))
        self.sent.set()

    async def _began(self, event: RelayBegan) -> None:
        self.began.append(event)

    async def until(self, condition) -> None:
        while not condition():
            self.sent.clear()
            await self.sent.wait()

    @property
    def kinds(self) -> str:
        return "".join(chr(kind) for kind, _, _ in self.frames)

    @property
    def text(self) -> bytes:
        return b"".join(data for kind, _, data in self.frames if kind is Frame.DATA)

    @property
    def head(self) -> Head:
        return decode_as(Head, next(data for kind, _, data in self.frames if kind is Frame.HEAD))

    @property
    def end(self) -> End:
        assert self.frames[-1][0] is Frame.END
        return decode_as(End, self.frames[-1][2])


@contextlib.asynccontextmanager
async def calling(
    script: Script,
    path: str = "/v1/completions",
    kind: str = "openai",
    asks_usage: bool | None = None,
    stage: KvStage | None = None,
    first_window: int = WINDOW_BYTES,
    **headers: str,
) -> AsyncIterator[tuple[Call, ScriptedEngine]]:
    async with running(script) as engine:
        client = EngineClient(
            api_url=engine.url,
            metrics_url=engine.url,
            kind=KINDS[kind],
            clock=time.monotonic,
            options=EngineOptions(asks_usage=asks_usage),
        )
        try:
            yield Call(engine, client, headers, path, stage, first_window), engine
        finally:
            client.close()


async def call(
    script: Script, kind: str = "openai", asks_usage: bool | None = None, **headers: str
) -> tuple[Call, RelayEnded, ScriptedEngine]:
    async with calling(script, kind=kind, asks_usage=asks_usage, **headers) as (made, engine):
        ended = await made.relay.run()
    assert [number for _, number, _ in made.frames] == list(range(len(made.frames)))
    assert made.kinds.count("E") == 1
    assert ended.outcome == made.end.outcome
    return made, ended, engine


async def test_a_stream_passes_untouched() -> None:
    parts = [b"data: 1\n\n", b"data: 2\n\nda", b"ta: " + USAGE + b"\n\n", b"data: [DONE]\n\n"]

    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED)
        for part in parts:
            await talk.send(chunk(part))
        await talk.send(LAST_CHUNK)

    made, ended, engine = await call(script, traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    assert made.text == b"".join(parts)
    assert (made.head.status, made.head.content_type) == (200, "text/event-stream")
    assert (made.head.region, made.head.replica) == ("us", "g0")
    assert (ended.outcome, ended.usage, ended.streamed) == (Outcome.DONE, TokenUsage(9, 4, 2), True)
    assert (made.end.prompt_tokens, made.end.cached_tokens, made.end.completion_tokens) == (9, 4, 2)
    assert made.end.ttft_s > 0
    assert made.began == [RelayBegan(INBOX)]
    request = engine.requests[0]
    assert (request.path, request.body) == ("/v1/completions", b'{"prompt": "hi"}')
    assert request.headers["x-request-id"] == "q-1"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["traceparent"].startswith("00-" + "a" * 32)
    assert "accept-encoding" not in request.headers


async def test_the_head_waits_for_the_first_byte() -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED)
        reached.set()
        await go.wait()
        await talk.send(chunk(b"d"))
        await talk.send(chunk(b"ata: 1\n\n") + LAST_CHUNK)

    async with calling(script) as (made, _):
        running_relay = asyncio.create_task(made.relay.run())
        await reached.wait()
        assert made.frames == []
        go.set()
        ended = await running_relay
    assert ended.outcome is Outcome.DONE
    assert made.text == b"data: 1\n\n"


def whole(response: bytes) -> Script:
    async def script(talk: Conversation) -> None:
        await talk.send(response)

    return script


def cut_after(response: bytes) -> Script:
    async def script(talk: Conversation) -> None:
        await talk.send(response)
        talk.cut()

    return script


def events(*parts: bytes) -> bytes:
    return CHUNKED + b"".join(map(chunk, parts)) + LAST_CHUNK


@pytest.mark.parametrize(
    ("script", "outcome", "kinds", "status"),
    [
        (whole(plain(200, b'{"a":' + USAGE + b"}")), Outcome.DONE, "HDE", 200),
        (whole(plain(400, b'{"error":{}}')), Outcome.DONE, "HDE", 400),
        (whole(plain(503, b"overloaded", "text/html")), Outcome.DONE, "HDE", 503),
        (whole(plain(500, b"")), Outcome.DONE, "HE", 500),
        (whole(plain(429, b"not events", "text/event-stream")), Outcome.DONE, "HDE", 429),
        (whole(plain(307, b"elsewhere")), Outcome.DONE, "HDE", 307),
        (whole(events(b"data: 1\n\n")), Outcome.DONE, "HDE", 200),
        (whole(plain(200, b"")), Outcome.ENGINE_BROKEN, "E", None),
        (whole(events()), Outcome.ENGINE_BROKEN, "E", None),
        (whole(events(b"Traceback (most")), Outcome.ENGINE_BROKEN, "E", None),
        (whole(events(b"{}")), Outcome.ENGINE_BROKEN, "E", None),
        (whole(events(b"dat")), Outcome.ENGINE_BROKEN, "E", None),
        (whole(events(b"data: 1\n\ndata: 2")), Outcome.ENGINE_BROKEN, "HDE", 200),
        (whole(events(b": ping\n\n")), Outcome.ENGINE_BROKEN, "E", None),
        (whole(b"SSH-2.0-OpenSSH\r\n\r\n"), Outcome.ENGINE_BROKEN, "E", None),
        (cut_after(b""), Outcome.ENGINE_LOST, "E", None),
        (cut_after(b"HTTP/1.1 200 OK\r\nContent-"), Outcome.ENGINE_LOST, "E", None),
        (cut_after(CHUNKED), Outcome.ENGINE_LOST, "E", None),
    ],
)
async def test_endings(script, outcome, kinds, status) -> None:
    made, ended, _ = await call(script)
    assert (ended.outcome, made.kinds) == (outcome, kinds)
    assert (made.end.detail == "") is (outcome is Outcome.DONE)
    if status is not None:
        assert made.head.status == status
        assert len(made.began) == 1
    else:
        assert (made.began, made.end.ttft_s) == ([], -1.0)


@pytest.mark.parametrize(
    ("response", "good"),
    [
        (plain(200, b"{}"), True),
        (plain(400, b"{}"), False),
        (CHUNKED + chunk(b'data: {"error": {"code": 400}}\n\n') + LAST_CHUNK, False),
    ],
)
async def test_only_a_good_answer_is_a_sign_that_the_engine_computes(response, good) -> None:
    """An error may come from an HTTP server in front of an engine that hangs."""
    async with calling(whole(response)) as (made, _):
        await made.relay.run()
        assert made.began == [RelayBegan(INBOX, good=good)]
        assert (made.client.last_content_at > 0.0) is good


@pytest.mark.parametrize("path", sorted(SERVER_PATHS))
async def test_what_an_http_server_answers_by_itself_is_no_sign_that_the_engine_computes(path):
    async with calling(whole(plain(200, b"{}")), path) as (made, engine):
        engine.also_serves = (path,)
        await made.relay.run()
        assert made.end.outcome == Outcome.DONE and made.client.last_content_at < 0.0


async def test_an_engine_that_dies_inside_its_answer_is_lost() -> None:
    first = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED + chunk(b"data: 1\n\n"))
        await first.wait()
        talk.cut()

    async with calling(script) as (made, _):
        relay = asyncio.create_task(made.relay.run())
        await made.until(lambda: made.text)
        first.set()
        ended = await relay
    assert ended.outcome is Outcome.ENGINE_LOST
    assert made.text == b"data: 1\n\n"
    assert made.end.detail


async def test_an_engine_that_is_not_there_is_lost() -> None:
    async with calling(whole(b"")) as (made, engine):
        await engine.stop()
        ended = await made.relay.run()
    assert (ended.outcome, made.kinds) == (Outcome.ENGINE_LOST, "E")


@pytest.mark.parametrize("sent", [b"", CHUNKED, CHUNKED + chunk(b"data: 1\n\n")])
async def test_an_abort_reaches_the_engine(sent) -> None:
    """A hanging engine, at every point of the answer: it sees its client hang up."""
    reached, hung_up = asyncio.Event(), asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.send(sent)
        reached.set()
        await talk.hung_up()
        hung_up.set()

    async with calling(script) as (made, _):
        relay = asyncio.create_task(made.relay.run())
        await reached.wait()
        if b"data" in sent:
            await made.until(lambda: made.text)
        made.relay.abort(Outcome.DEADLINE, "too late")
        made.relay.abort(Outcome.CANCELLED, "a second abort changes nothing")
        ended = await relay
        await hung_up.wait()
    assert ended.outcome is Outcome.DEADLINE
    assert (made.end.outcome, made.end.detail) == (Outcome.DEADLINE, "too late")


async def test_an_abort_before_the_relay_runs_still_ends_it() -> None:
    async with calling(whole(plain(200, b"{}"))) as (made, engine):
        relay = asyncio.create_task(made.relay.run())
        made.relay.abort(Outcome.CANCELLED, "gone")
        ended = await relay
    assert (ended.outcome, made.kinds, engine.requests) == (Outcome.CANCELLED, "E", [])


async def test_an_abort_holds_though_its_cancel_was_swallowed() -> None:
    async with calling(whole(events(b"data: 1\n\n"))) as (made, _):

        async def swallows(event: RelayBegan) -> None:
            made.relay.abort(Outcome.DEADLINE, "too late")
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

        made.relay._began = swallows
        ended = await made.relay.run()
    assert (ended.outcome, made.kinds) == (Outcome.DEADLINE, "HE")


async def _leaves_no_cycle(script: Script, *, aborts: bool) -> None:
    """Its collector looks seldom, so that an agent may not need it."""
    gc.collect()
    gc.disable()
    try:
        async with calling(script) as (made, _):
            relay = weakref.ref(made.relay)
            running_relay = asyncio.create_task(made.relay.run())
            if aborts:
                await made.until(lambda: made.text)
                made.relay.abort(Outcome.CANCELLED, "gone")
            await running_relay
            del running_relay
            made.relay = None
            await asyncio.sleep(0)
            assert relay() is None
    finally:
        gc.enable()


async def _hangs(talk: Conversation) -> None:
    await talk.send(CHUNKED + chunk(b"data: 1\n\n"))
    await talk.hung_up()


@pytest.mark.parametrize(
    ("script", "aborts"),
    [
        (whole(events(b"data: 1\n\n")), False),
        (cut_after(b""), False),
        (cut_after(CHUNKED + chunk(b"data: 1\n\n")), False),
        (whole(b"SSH-2.0-OpenSSH\r\n\r\n"), False),
        (whole(events(b"{}")), False),
        (_hangs, True),
    ],
)
def test_an_answer_leaves_nothing_to_the_collector(script, aborts) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_leaves_no_cycle(script, aborts=aborts))


async def test_a_flood_stops_at_the_window_until_credit_comes() -> None:
    piece, count = b"data: " + b"x" * 8186 + b"\n\n", 400

    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED)
        for _ in range(count):
            await talk.send(chunk(piece))
        await talk.send(LAST_CHUNK)

    async with calling(script) as (made, _):
        relay = asyncio.create_task(made.relay.run())
        await made.until(lambda: len(made.text) >= WINDOW_BYTES)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(relay), 0.3)
        assert len(made.text) == WINDOW_BYTES
        while not relay.done():
            sent = len(made.text)
            made.relay.credit(sent)
            await asyncio.wait([relay], timeout=0.005)
            assert len(made.text) <= sent + WINDOW_BYTES
        assert (await relay).outcome is Outcome.DONE
    assert made.text == piece * count


async def test_over_a_link_a_window_begins_small_and_grows_with_what_was_consumed() -> None:
    body = b'{"a":"' + b"x" * 500_000 + b'"}'
    async with calling(whole(plain(200, body)), first_window=4096) as (made, _):
        relay = asyncio.create_task(made.relay.run())
        await made.until(lambda: len(made.text) >= 4096)
        assert len(made.text) == 4096
        for consumed, ends_at in ((2048, 6144), (6144, 12288), (12288, 24576)):
            made.relay.credit(consumed)
            await made.until(lambda ends_at=ends_at: len(made.text) >= ends_at)
            assert len(made.text) == ends_at
        while not relay.done():
            made.relay.credit(len(made.text))
            await asyncio.wait([relay], timeout=0.005)
        assert (await relay).outcome is Outcome.DONE
    assert made.text == body


async def test_an_answer_of_which_the_last_bytes_wait_ends_when_they_were_sent() -> None:
    events = b"data: " + b"x" * 5000 + b"\n\n" + b"data: [DONE]\n\n"

    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED)
        await talk.send(chunk(events))
        talk.close()  # an engine that closes instead of ending the body

    async with calling(script, first_window=4096) as (made, _):
        relay = asyncio.create_task(made.relay.run())
        await made.until(lambda: len(made.text) >= 4096)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(relay), 0.2)
        made.relay.credit(4096)
        assert (await relay).outcome is Outcome.DONE
    assert made.text == events


async def test_an_answer_that_is_cancelled_while_bytes_wait_is_not_done() -> None:
    body = b'{"a":"' + b"x" * 5000 + b'"}'
    async with calling(whole(plain(200, body)), first_window=4096) as (made, _):
        relay = asyncio.create_task(made.relay.run())
        await made.until(lambda: len(made.text) >= 4096)
        await asyncio.sleep(0)
        made.relay.abort(Outcome.CANCELLED, "")
        assert (await relay).outcome is Outcome.CANCELLED
    assert made.text == body[:4096]


async def test_a_large_plain_answer_is_cut_into_frames() -> None:
    body = b'{"a":"' + bytes(range(48, 58)) * 60_000 + b'"}'

    async with calling(whole(plain(200, body))) as (made, _):
        relay = asyncio.create_task(made.relay.run())
        while not relay.done():
            made.relay.credit(len(made.text))
            await asyncio.wait([relay], timeout=0.005)
    assert made.text == body
    assert max(len(data) for kind, _, data in made.frames if kind is Frame.DATA) <= 128 * 1024


@pytest.mark.parametrize(("model", "kinds"), [(MODEL, "HDE"), ("org/other", "R")])
async def test_a_prefill_stage_of_an_engine_that_serves_other_models_is_refused(
    model, kinds
) -> None:
    stage = KvStage(KvRole.PREFILL, 7)
    script = whole(plain(200, b'{"kv_transfer_params":{}}'))
    async with calling(script, stage=stage, **{H_MODEL: encode_model(model)}) as (made, _):
        await made.relay.run()
    assert made.kinds == kinds
