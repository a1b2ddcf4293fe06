"""No bytes from an engine can crash an agent: mutated responses over real HTTP, from a seed."""

import contextlib
import random
import time
from collections.abc import AsyncIterator

from agents.adapters.engine import EngineClient, EngineOptions
from agents.adapters.engine_kinds import KINDS
from agents.adapters.engine_request import ReplicaSite
from agents.adapters.outbox import FrameWriter
from agents.adapters.relay import Relay
from agents.core.effects import StartRelay
from agents.core.events import EngineScraped, RelayBegan, ScrapeFailed
from agents.core.work_message import WorkRequest
from schemas.exchange import Frame, unpack_frame
from tests.agents.scripted_engine import CHUNKED, LAST_CHUNK, Conversation, chunk, plain, running

ROUNDS = 300
WHOLE = [
    plain(200, b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}'),
    CHUNKED + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + LAST_CHUNK,
]


LOOKS = [
    plain(200, b'{"data":[{"id":"org/llama"}]}'),
    plain(200, b'vllm:num_requests_waiting{engine="0"} 1.0\n', "text/plain"),
]


def mutated(dice: random.Random, wholes: list[bytes]) -> bytes:
    data = bytearray(dice.choice(wholes))
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) or 1)
        match dice.randrange(4):
            case 0:
                data[at : at + 1] = dice.randbytes(1)
            case 1:
                del data[at : at + dice.randint(1, 20)]
            case 2:
                data[at:at] = dice.randbytes(dice.randint(1, 20))
            case 3:
                data[at:at] = bytes(dice.choice(b"\r\n:;0f ") for _ in range(3))
    return bytes(data)


@contextlib.asynccontextmanager
async def engine_at(url: str) -> AsyncIterator[EngineClient]:
    engine = EngineClient(
        api_url=url,
        metrics_url=url + "/metrics",
        kind=KINDS["vllm"],
        clock=time.monotonic,
        options=EngineOptions(scrape_timeout_s=30.0),
    )
    try:
        yield engine
    finally:
        engine.close()


async def test_garbage_ends_each_answer_exactly_once() -> None:
    seed = time.time_ns()
    print("seed", seed)
    dice = random.Random(seed)
    frames: list[Frame] = []

    async def script(talk: Conversation) -> None:
        await talk.send(mutated(dice, WHOLE))
        talk.cut() if dice.random() < 0.2 else talk.close()

    def post(frame: bytes, urgent: bool) -> None:
        frames.append(unpack_frame(frame).kind)

    async def began(event: RelayBegan) -> None:
        frames.append(Frame.HEAD)

    async with running(script) as server, engine_at(server.url) as engine:
        for number in range(ROUNDS):
            frames.clear()
            inbox = f"_INBOX.us.r1.{number}"
            relay = Relay(
                StartRelay(inbox, WorkRequest("", "/v1/completions", "", 10.0, None), {}, b"{}"),
                engine=engine,
                frames=FrameWriter(post, time.monotonic),
                clock=time.monotonic,
                began=began,
                site=ReplicaSite("us", "g0"),
            )
            await relay.run()
            assert frames.count(Frame.END) == 1
            assert frames[-1] is Frame.END


async def test_scrapes_of_garbage_are_failures_or_readings() -> None:
    seed = time.time_ns()
    print("seed", seed)
    dice = random.Random(seed)

    async def script(talk: Conversation) -> None:
        raise AssertionError("no request is sent")

    async with running(script) as server, engine_at(server.url) as engine:
        server.scrape_response = lambda: mutated(dice, LOOKS)
        scrapes = []
        for _ in range(ROUNDS):
            engine.refresh_models()
            scrapes.append(await engine.scrape())
        server.scrape_response = None
        assert isinstance(await engine.scrape(), EngineScraped)
    assert {type(scraped) for scraped in scrapes} <= {EngineScraped, ScrapeFailed}
