"""Images in messages, through a router and an agent: priced as tokens and not by their bytes."""

import asyncio
import base64
import random

import orjson
import pytest

from tests.support.scripted_engine import event, opened
from tests.support.small_mesh import PATIENT, chat, one_replica, post

IMAGE_TOKENS = 400
S_PER_TOKEN = 0.0005
GAP_S = 0.02  # between first token and last: who gets all at once learns no speed
SLO = {"x-mesh-slo-ttft-ms": "6000"}
WORDS = "a word or two "
LONG_TEXT = WORDS * (300_000 // len(WORDS))


def image(seed, size=300_000):
    data = base64.b64encode(random.Random(seed).randbytes(size * 3 // 4)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def asking(*parts):
    return chat() | {"messages": [{"role": "user", "content": list(parts)}], "stream": True}


def text(words):
    return {"type": "text", "text": words}


async def see(request, body):
    """Answer like an engine with a vision model: so many tokens an image, a token in 4 bytes."""
    tokens = 4
    for message in body["messages"]:
        parts = message["content"]
        for part in [text(parts)] if isinstance(parts, str) else parts:
            tokens += IMAGE_TOKENS if "image_url" in part else len(part["text"]) // 4
    await asyncio.sleep(tokens * S_PER_TOKEN)
    stream = await opened(request)
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
    await stream.write(event("seen"))
    await asyncio.sleep(GAP_S)
    await stream.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n")
    await stream.write(b"data: [DONE]\n\n")
    return stream


@pytest.fixture
async def mesh(nats_server):
    async with one_replica(nats_server, **PATIENT) as mesh:
        [engine] = mesh.engines
        engine.behaviour = see
        for number in range(12):  # speeds are learned from these
            words = f"{number} {WORDS * (20 + 40 * number)}"
            assert (await post(mesh, chat(words, stream=True)))[0] == 200
        yield mesh


async def test_an_image_is_priced_as_its_tokens_and_not_by_its_length(mesh):
    """As a text its bytes would take 37 s, which is refused; the image takes 0.2 s."""
    assert (await post(mesh, chat(LONG_TEXT, stream=True), **SLO))[0] == 429
    status, answer, _ = await post(mesh, asking(text("What is this?"), image(1)), **SLO)
    assert (status, b"seen" in answer) == (200, True), answer


async def matched(mesh, *parts):
    """Tokens of such a prompt that the only replica was believed to hold before it."""
    status, _, headers = await post(mesh, asking(*parts), **{"x-mesh-debug": "1"})
    assert status == 200
    return orjson.loads(headers["x-mesh-decision"])["candidates"][0]["matched_tokens"]


async def test_an_image_is_a_prefix_like_a_text(mesh):
    cat, dog = image(2), image(3)
    assert await matched(mesh, cat, text("What is this?")) == 0
    assert await matched(mesh, cat, text("And its colour? " * 40)) == pytest.approx(
        IMAGE_TOKENS, 0.5
    )
    assert await matched(mesh, dog, text("What is this?")) == 0
    assert await matched(mesh, text("Both: " * 60), cat, dog) == 0
    both = await matched(mesh, text("Both: " * 60), cat, dog, text("Which is older? " * 40))
    assert both == pytest.approx(2 * IMAGE_TOKENS + 90, 0.3)
    # What images weigh has taught nothing about texts.
    assert (await post(mesh, chat(LONG_TEXT, stream=True), **SLO))[0] == 429
