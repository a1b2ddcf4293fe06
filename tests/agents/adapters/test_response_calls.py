"""A call about a response, to its engine: method, target and no body; its answer as it comes."""

import time

import pytest

from agents.adapters.engine import EngineClient
from agents.adapters.engine_kinds import KINDS
from agents.adapters.engine_request import ReplicaSite
from agents.adapters.outbox import FrameWriter
from agents.adapters.relay import Relay
from agents.core.effects import StartRelay
from agents.core.engine_results import NOTHING_SAID
from agents.core.events import NO_USAGE, RelayEnded
from agents.core.work_message import WorkRequest
from schemas.exchange import H_ADD_USAGE, H_KEEPER, H_MODEL, End, Frame, Outcome, unpack_frame
from schemas.kv_transfer import TransferKind
from schemas.response_calls import METHODS, RESPONSE, ResponseCall
from schemas.response_ids import response_id
from schemas.wire import decode_as
from tests.agents.scripted_engine import Conversation, plain, running

ID = response_id("us", "g0", bytes(16))
ANSWER = b'{"id":"r","usage":{"input_tokens":5,"output_tokens":7,"total_tokens":12}}'
HEADERS = {H_KEEPER: "g0", H_MODEL: "kept", H_ADD_USAGE: "1"}


class Called:
    """One call at a scripted engine: what that got, and what came back."""

    def __init__(self, status: int = 200) -> None:
        self.status, self.got, self.frames = status, [], []

    async def of(self, call: ResponseCall, kind: str = "vllm") -> RelayEnded:
        async def answer(talk: Conversation) -> None:
            self.got.append(talk.request)
            await talk.send(plain(self.status, ANSWER))

        async with running(answer) as engine:
            engine.scripts_all = True
            self.client = client = EngineClient(
                api_url=engine.url,
                metrics_url=engine.url + "/metrics",
                kind=KINDS[kind],
                clock=time.monotonic,
            )
            work = WorkRequest("", call.path, "q-1", 10.0, None, call=call)
            relay = Relay(
                StartRelay("_INBOX.us.r1.1", work, HEADERS, b"{}"),
                engine=client,
                frames=FrameWriter(self._post, time.monotonic),
                clock=time.monotonic,
                began=self._began,
                site=ReplicaSite("us", "g0", transfer=TransferKind.NIXL),
            )
            try:
                return await relay.run()
            finally:
                client.close()

    def _post(self, frame: bytes, urgent: bool) -> None:
        view = unpack_frame(frame)
        self.frames.append((view.kind, bytes(view.payload)))

    async def _began(self, event) -> None:
        pass


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize(
    ("method", "path"), [(method, path) for path, methods in METHODS.items() for method in methods]
)
async def test_the_engine_gets_the_call_and_no_body(method, path, kind):
    call, called = ResponseCall(method, path, ID, "limit=3"), Called()
    ended = await called.of(call, kind)
    [got] = called.got
    assert (got.method, got.path, got.body) == (method, call.target, b"")
    assert [frame for frame, _ in called.frames] == [Frame.HEAD, Frame.DATA, Frame.END]
    assert called.frames[1][1] == ANSWER
    end = decode_as(End, called.frames[2][1])
    assert (end.outcome, end.prompt_tokens, end.completion_tokens) == (Outcome.DONE, -1, -1)
    assert ended.usage == NO_USAGE, "the tokens of another request"
    assert ended.verdict == NOTHING_SAID, "no answer that it computed"
    assert called.client.last_content_at == float("-inf"), "no sign that it computes"


@pytest.mark.parametrize("status", [400, 404, 405, 501])
async def test_what_the_engine_says_of_a_call_is_the_answer(status):
    called = Called(status)
    ended = await called.of(ResponseCall("DELETE", RESPONSE, ID))
    assert ended.outcome is Outcome.DONE
    assert [frame for frame, _ in called.frames] == [Frame.HEAD, Frame.DATA, Frame.END]
