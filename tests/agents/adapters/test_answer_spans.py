"""The spans of one answer at the agent, over real HTTP."""

import asyncio

import pytest
from opentelemetry.trace import SpanKind

from infra import trace_context
from schemas.exchange import H_MODEL, Outcome
from schemas.subjects import encode_model
from tests.agents.adapters.test_relay import USAGE, call, calling
from tests.agents.scripted_engine import CHUNKED, LAST_CHUNK, MODEL, Conversation, chunk, plain
from tests.support.spans import SAMPLED, described, traced

PROCESS, CHAT = "process mesh.{region}.replica.{replica}.work", f"text_completion {MODEL}"


@pytest.mark.parametrize("flags", ["00", "01"])
async def test_whether_a_trace_is_sampled_is_not_decided_again(flags: str) -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED)
        await talk.send(chunk(b"data: [DONE]\n\n"))
        await talk.send(LAST_CHUNK)

    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-{flags}", "tracestate": "vendor=1"}
    with traced() as ended:
        _, _, engine = await call(script, **trace)
        names = [span.name for span in ended()]
    assert names == ([PROCESS, "text_completion"] if flags == "01" else [])
    headers = engine.requests[0].headers
    assert headers["traceparent"].startswith(f"00-{'a' * 32}-")
    assert headers["tracestate"] == "vendor=1"
    assert (headers["traceparent"] == trace["traceparent"]) == (not names)


async def test_the_spans_of_an_answer() -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED)
        await talk.send(chunk(b"data: " + USAGE + b"\n\n"))
        await talk.send(chunk(b"data: [DONE]\n\n"))
        await talk.send(LAST_CHUNK)

    with traced() as ended:
        made, _, engine = await call(script, **SAMPLED, **{H_MODEL: encode_model(MODEL)})
        process, answer = ended()
    assert (process.name, process.kind) == (PROCESS, SpanKind.CONSUMER)
    assert (answer.name, answer.kind) == (CHAT, SpanKind.CLIENT)
    assert process.parent.span_id == trace_context.read(SAMPLED).span_id
    assert answer.parent.span_id == process.context.span_id
    told = trace_context.read(engine.requests[0].headers)
    assert (told.span_id, told.is_sampled) == (answer.context.span_id, True)
    assert process.start_time <= answer.start_time <= answer.end_time <= process.end_time
    assert process.attributes == {
        "messaging.system": "nats",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "mesh.us.replica.g0.work",
        "messaging.destination.template": "mesh.{region}.replica.{replica}.work",
        "mesh.outcome": "done",
        "mesh.region": "us",
        "mesh.replica": "g0",
        "mesh.request_id": "",
    }
    address = made.client.api.address
    assert answer.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": pytest.approx(made.end.ttft_s, abs=1e-5),
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 2,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "server.address": address.host,
        "server.port": address.port,
    }
    assert [described(span) for span in (process, answer)] == 2 * [("UNSET", None, None)]


@pytest.mark.parametrize(
    ("outcome", "detail"), [(Outcome.CANCELLED, "client gone"), (Outcome.DEADLINE, "too late")]
)
async def test_spans_say_why_an_answer_was_aborted(outcome: Outcome, detail: str) -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(CHUNKED)
        await talk.send(chunk(b"data: 1\n\n"))
        await talk.hung_up()

    with traced() as ended:
        async with calling(script, **SAMPLED) as (made, _):
            running_relay = asyncio.create_task(made.relay.run())
            await made.until(lambda: "D" in made.kinds)
            made.relay.abort(outcome, detail)
            await running_relay
        spans = ended()
    assert [described(span) for span in spans] == 2 * [("ERROR", detail, outcome.value)]
    assert not any("usage" in name for span in spans for name in span.attributes)


async def test_an_engine_s_error_answer_is_an_error_of_the_call_alone() -> None:
    async def script(talk: Conversation) -> None:
        await talk.send(plain(400, b"{}"))

    with traced() as ended:
        await call(script, **SAMPLED)
        process, answer = ended()
    assert described(process) == ("UNSET", None, None)
    assert described(answer) == ("ERROR", None, "400")
    assert answer.attributes["http.response.status_code"] == 400


async def test_an_answer_aborted_before_it_began_has_no_span_of_the_engine() -> None:
    async def script(talk: Conversation) -> None:
        raise AssertionError("nothing is sent")

    with traced() as ended:
        async with calling(script, **SAMPLED) as (made, _):
            made.relay.abort(Outcome.CANCELLED, "gone")
            await made.relay.run()
        [process] = ended()
    assert described(process) == ("ERROR", "gone", "cancelled")
