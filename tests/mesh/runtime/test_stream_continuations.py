"""What is kept of streams and told of those that break, beside a session without any world."""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry

from mesh.adapters.metrics import RouterMetrics
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.model_targets import ModelRule, ModelTargets
from mesh.core.model.prompt import PromptReader
from mesh.http.read_request import BodyBudget
from mesh.runtime.stream_continuations import (
    NO_ROOM,
    OTHER_API,
    STREAM_BYTES_MAX,
    SWITCHED_OFF,
    StreamContinuations,
)
from mesh.session.answer import EVENT_STREAM, AnswerReceiver
from mesh.session.client_request import ClientRequest
from mesh.session.record import Home, Identifiers
from mesh.session.session import Session
from schemas import exchange
from schemas.engine_routes import CONTINUING_KINDS
from schemas.http import CHAT, MESSAGES
from schemas.residency import OPEN_GROUND
from schemas.settings import ContinueStreams
from tests.mesh.core import build

BODY = {"model": build.MODEL, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
DONE = b"data: [DONE]\n\n"


def event(text: str, **more: object) -> bytes:
    chunk = {"id": "a", "choices": [{"index": 0, "delta": {"content": text}}], **more}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


class Edge:
    """One router's, whose core only notes what it is told."""

    is_connected = True

    def __init__(self, bodies: BodyBudget | None = None, rules: Sequence[ModelRule] = ()) -> None:
        self.told: list[Any] = []
        self.bodies = bodies or BodyBudget()
        self.metrics = RouterMetrics(build.core(), CollectorRegistry())
        self.session = Session(
            Home(build.US, "r1", OPEN_GROUND),
            decide=lambda told, now: self.told.append(told) or [],
            clock=lambda: 5.0,
            bus=self,  # nothing is sent
            ids=Identifiers(lambda: "secret", count(1)),
        )
        self.continuations = StreamContinuations(
            self.session,
            PromptReader("k"),
            self.bodies,
            self.metrics,
            lambda: ModelTargets(tuple(rules)),
        )

    def begun(self, *events: bytes, key: int = 1, body: dict[str, object] = BODY) -> ClientRequest:
        """A stream of which its client was sent these."""
        data = orjson.dumps(body)
        self.bodies.take(len(data))
        record = ClientRequest(request=build.request(key), body=data, kept_bytes=len(data))
        self.session.admit(record)
        self.answer(record, *events)
        return record

    def answer(self, record: ClientRequest, *events: bytes) -> AnswerReceiver:
        """An attempt, of which the client was sent these."""
        answer = record.answer = AnswerReceiver(record.request.key, 1, "inbox")
        answer.splice = record.splice
        answer.receive(exchange.Head(200, EVENT_STREAM, "us", "us-0"), 0.0)
        self.continuations.begun(record)
        for one in events:
            answer.receive(one, 0.0)
            answer.take()
        return answer

    async def broke(self, *records: ClientRequest) -> list[ev.ContinuationRead]:
        """What the core is told after these broke."""
        self.told.clear()
        for record in records:
            self.continuations.go_on(fx.Continue(record.request.key, 1, "cut"))
        for _ in records:
            await asyncio.sleep(0)
        return self.told

    def counted(self, outcome: str) -> float:
        name = "mesh_streams_continued_total"
        return self.metrics.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


OFF = ModelRule(name=build.MODEL, continue_streams=ContinueStreams.OFF)


@pytest.mark.parametrize(
    ("path", "rules", "content_type", "said"),
    [
        (MESSAGES, (), EVENT_STREAM, OTHER_API),
        (CHAT, (OFF,), EVENT_STREAM, SWITCHED_OFF),
        (CHAT, (), EVENT_STREAM, NO_ROOM),
        (MESSAGES, (), "application/json", ""),
    ],
)
async def test_of_a_stream_that_is_not_kept_the_core_is_told_why(path, rules, content_type, said):
    edge = Edge(rules=rules)
    body = orjson.dumps(BODY | {"user": "x" * STREAM_BYTES_MAX})
    record = ClientRequest(request=build.request(1), path=path, body=body)
    edge.session.admit(record)
    answer = record.answer = AnswerReceiver(1, 1, "inbox")
    answer.receive(exchange.Head(200, content_type, "us", "us-0"), 0.0)
    edge.continuations.begun(record)
    edge.session.started(record)
    told = edge.told[-1]
    assert isinstance(told, ev.AnswerStarted)
    assert (told.may_continue, told.why_not) == (False, said)


async def test_a_stream_whose_last_event_is_out_is_not_gone_on_with() -> None:
    edge = Edge()
    record = edge.begun(event("one"), DONE)
    assert await edge.broke(record) == [ev.ContinuationRead(1, 1, "cut")]
    assert record.answer is not None and record.answer.is_whole
    assert edge.counted("refused") == 0


async def test_what_an_engine_wrote_stops_no_other_stream() -> None:
    edge, deep = Edge(), b"[" * 400 + b"]" * 400
    first, other = edge.begun(event("one")), edge.begun(event("two"), key=2)
    await edge.broke(first)
    nested = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "more": %b}]}' % deep
    assert first.splice is not None
    answer = edge.answer(first)
    answer.receive(nested + b"\n\n", 0.0)
    failed, read = await edge.broke(first, other)
    assert failed.prompt is None
    assert failed.detail == "cut; no other engine can go on with it: what it said can't be read"
    assert read.prompt is not None
    assert edge.counted("refused") == 0, "it went on before, and is counted by how it ends"


async def test_streams_that_break_at_once_are_read_one_after_another() -> None:
    edge = Edge()
    records = [edge.begun(event("one"), key=key) for key in (1, 2, 3)]
    turns = []
    for record in records:
        edge.continuations.go_on(fx.Continue(record.request.key, 1, "cut"))
    edge.told.clear()
    for _ in records:
        await asyncio.sleep(0)
        turns.append(len(edge.told))
    assert turns == [1, 2, 3]


async def test_whether_another_engine_could_go_on_is_told_and_changes_nothing() -> None:
    edge = Edge()
    record = edge.begun(event("one"))
    sampled = edge.begun(event("one"), key=2, body=BODY | {"seed": 1, "temperature": 1.0})
    over = edge.begun(event("one"), DONE, key=3)
    edge.told.clear()
    for one in (record, sampled, over):
        edge.continuations.may_move(fx.MayMove(one.request.key, 1))
    assert edge.told == [ev.Movable(1, 1, CONTINUING_KINDS)]
    for one in (record, sampled):
        assert one.answer is not None and one.splice is None
        one.answer.receive(event(" two"), 0.0)
        assert one.answer.take() == event(" two")
    read, refused = await edge.broke(record, sampled)
    assert "one two" in orjson.loads(record.body)["messages"][-1]["content"]
    assert read.prompt is not None and refused.prompt is None


async def test_each_byte_is_counted_once_and_the_prompt_is_the_new_one() -> None:
    edge = Edge()
    data = event("one two")
    record = edge.begun(data)
    [read] = await edge.broke(record)
    assert record.ending_at(6.0, "failed").sent_bytes == len(data)
    assert record.request.prompt == read.prompt != build.request(1).prompt
    edge.answer(record, event(" three"))
    assert record.ending_at(6.0, "failed").sent_bytes > len(data)
    record.answer = AnswerReceiver(1, 2, "another")  # which has no head yet
    assert record.ending_at(6.0, "failed").is_stream


async def test_memory_for_bodies_holds_what_goes_on_too_and_nothing_of_what_was_given_up() -> None:
    edge = Edge(BodyBudget(400_000))
    record = edge.begun(event("one"))
    edge.bodies.take(200_000 - edge.bodies.taken_bytes)
    [read] = await edge.broke(record)
    assert read.prompt is None and edge.bodies.taken_bytes == 200_000
    edge = Edge(BodyBudget(400_000))
    record = edge.begun(event("one"))
    edge.bodies.take(200_000 - edge.bodies.taken_bytes)
    assert record.answer is not None
    for _ in range(3):
        record.answer.receive(event("x" * 40_000), 0.0)
        record.answer.take()
        edge.continuations.grew(record)
    assert record.kept_bytes == 0
