"""The agent beside the simulated engine: its pages, its queue, its speed and its aborts."""

import contextlib
import itertools
import random
import re
import time
from collections.abc import AsyncIterator

import orjson
import pytest

from agents.simserver.metrics import PageKind
from schemas import subjects
from schemas.exchange import H_ADD_USAGE, H_MODEL, H_PATH, Outcome, Refusal
from tests.agents.fake_router import FakeRouter, fake_router
from tests.agents.scene import running_agent
from tests.agents.simserver.support import MODEL, config, running

PLAIN = {H_MODEL: subjects.encode_model(MODEL)}
HEADERS = PLAIN | {H_ADD_USAGE: "1"}


@contextlib.asynccontextmanager
async def beside(nats_server, kind: str, **engine) -> AsyncIterator[FakeRouter]:
    async with (
        running(config(**engine)) as server,
        fake_router(nats_server.url) as router,
        running_agent(router, nats_server.url, engine_kind=kind, engine_url=server.url),
    ):
        yield router


def body(dice: random.Random, tokens: int, answer_tokens: int) -> bytes:
    return orjson.dumps(
        {
            "model": MODEL,
            "prompt": dice.randbytes(2 * tokens).hex(),
            "max_tokens": answer_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    )


@pytest.mark.parametrize(("kind", "page"), [("vllm", PageKind.VLLM), ("sglang", PageKind.SGLANG)])
async def test_its_metrics_are_understood(nats_server, kind, page) -> None:
    dice = random.Random(1)
    async with beside(nats_server, kind, metrics=page, kv_tokens=8000, time_scale=5.0) as router:
        beat = router.beats[-1]
        assert (beat.pending, beat.running, beat.kv_used_ratio) == (0, 0, 0.0)
        assert beat.kv_capacity_tokens == pytest.approx(8000, rel=0.01)
        long = await router.send_work(
            1, body(dice, 200, 4000), **HEADERS
        )  # runs until it is cancelled
        beat = await router.state(running=1)
        assert 0.0 < beat.kv_used_ratio < 0.2
        await router.cancel(long)
        await router.state(running=0, outstanding=0)
        inbox = await router.send_work(2, body(dice, 200, 100), **HEADERS)
        end = await router.answer(inbox)
        assert (end.outcome, end.completion_tokens) == (Outcome.DONE, 100)
        beat = await router.state(running=0, outstanding=0)
        assert beat.decode_tokens_per_s is not None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_options": None},
        {"stream_options": {"include_usage": False}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_is_the_same_whether_or_not_its_tokens_are_counted(
    nats_server, path, options
) -> None:
    fields = {"prompt": "Where are you?", "messages": [{"role": "user", "content": "Where?"}]}
    del fields["prompt" if path.startswith("/v1/chat") else "messages"]
    asked = {"model": MODEL, "max_tokens": 20, "ignore_eos": True, "stream": True, **fields}
    asked |= options
    async with beside(nats_server, "vllm", time_scale=50.0) as router:
        plain, counted = {H_PATH: path}, {H_PATH: path, H_ADD_USAGE: "1"}
        inboxes = [
            await router.send_work(number, orjson.dumps(asked), **PLAIN, **headers)
            for number, headers in enumerate((plain, counted))
        ]
        ends = [await router.answer(inbox) for inbox in inboxes]
        assert [end.outcome for end in ends] == [Outcome.DONE] * 2
        assert [end.completion_tokens for end in ends] == [-1, 20]
        assert (ends[0].prompt_tokens, ends[1].prompt_tokens > 0) == (-1, True)
        texts = [re.sub(rb'"(id|created)":[^,]+', b"", router.text(inbox)) for inbox in inboxes]
        assert texts[0] == texts[1]
        assert texts[0].endswith(b"data: [DONE]\n\n")


async def test_its_prefill_speed_is_learned(nats_server) -> None:
    """The profile: 512 tokens in 300 ms, in chunks of 512; ten times faster here.

    A stall of the machine among the first samples bends the line, and is forgotten.
    """
    seed = time.time_ns()
    print("seed", seed)
    dice = random.Random(seed)
    expected = pytest.approx(0.300 / 512 / 10, rel=0.5)
    numbers, learned = itertools.count(), None
    async with beside(nats_server, "vllm", time_scale=10.0) as router:
        while learned != expected:
            for number in itertools.islice(numbers, 18):
                tokens = 128 * (number % 6 + 1)
                inbox = await router.send_work(number, body(dice, tokens, 2), **HEADERS)
                end = await router.answer(inbox)
                assert end.prompt_tokens == pytest.approx(tokens, rel=0.1)
            assert number < 300, learned
            learned = (await router.state(outstanding=0)).prefill_s_per_token


async def test_its_queue_makes_the_agent_refuse(nats_server) -> None:
    dice = random.Random(1)
    async with beside(nats_server, "vllm", max_seqs=2, time_scale=5.0) as router:
        inboxes = [await router.send_work(n, body(dice, 50, 4000), **HEADERS) for n in range(3)]
        beat = await router.state(full=True, running=2)
        assert beat.pending >= 1
        refused = await router.refusal(await router.send_work(9, body(dice, 50, 1), **HEADERS))
        assert refused.reason == Refusal.FULL
        for inbox in inboxes:
            await router.cancel(inbox)
        beat = await router.state(outstanding=0, running=0, pending=0)
        assert not beat.full
