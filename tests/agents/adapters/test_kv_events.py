"""KV events over real ZeroMQ sockets: gaps, replays, other runs of the engine, other bytes."""

import asyncio
import contextlib

import msgpack
import pytest
import zmq

from agents.adapters.kv_events import KvEventSource
from agents.adapters.prompt_tokens import tokenize_request
from agents.core.engine_cache import EngineCache
from agents.core.held_blocks import HeldBlocks
from agents.simserver.kv_events import KEPT_BATCHES, NUMBER, KvEventPublisher
from infra.process import end_all
from tests.support.ports import free_ports
from tests.support.until import until

TOKENS = (1).to_bytes(4, "little") * 4


class Scene:
    """A publisher as the simulated engine has it, and a source that follows it."""

    def __init__(self) -> None:
        events, replay = free_ports(2)
        self.events, self.replay = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
        self.cache = EngineCache(HeldBlocks())
        self.answering: asyncio.Task[None] | None = None
        self.publisher: KvEventPublisher | None = None

    def start(self) -> KvEventPublisher:
        self.publisher = KvEventPublisher(self.events, self.replay, 4)
        self.answering = asyncio.create_task(self.publisher.answer_replays())
        return self.publisher

    async def end(self) -> None:
        if self.publisher is not None:
            await end_all([self.answering])
            self.publisher.close()
            self.publisher = None

    def publish(self, key: int) -> None:
        """One block of one prompt, in a batch of its own."""
        self.publisher.learn([key], TOKENS[:12] + key.to_bytes(4, "little"))
        self.publisher.stored([key])
        self.publisher.flush()


@contextlib.asynccontextmanager
async def following(scene):
    source = KvEventSource(scene.cache, scene.events, scene.replay, "")
    task = asyncio.create_task(source.run())
    try:
        yield
    finally:
        await end_all([task])
        await scene.end()


async def test_what_was_published_before_is_replayed_and_what_follows_is_received():
    scene = Scene()
    scene.start()
    scene.publish(1)
    async with following(scene):
        await until(lambda: scene.cache.held.blocks == 1)
        scene.publish(2)
        await until(lambda: scene.cache.held.blocks == 2)
    assert scene.cache.holes == 0


async def test_a_gap_is_replayed():
    scene = Scene()
    publisher = scene.start()
    async with following(scene):
        scene.publish(1)
        await until(lambda: scene.cache.held.blocks == 1)
        events, publisher._events = publisher._events, publisher._context.socket(zmq.PUB)
        scene.publish(2)  # to nobody
        publisher._events.close(linger=0)
        publisher._events = events
        scene.publish(3)
        await until(lambda: scene.cache.held.blocks == 3)
    assert scene.cache.holes == 0


async def test_what_a_long_replay_drops_is_replayed_again():
    scene = Scene()
    scene.start()
    for key in range(KEPT_BATCHES):  # ZeroMQ's queue of the publisher takes 1,000 at once
        scene.publish(key)
    async with following(scene):
        await until(lambda: scene.cache.is_known and scene.cache.held.blocks == KEPT_BATCHES)
    assert scene.cache.holes == 0


async def test_another_run_of_the_engine_has_nothing_of_the_one_before():
    scene = Scene()
    scene.start()
    async with following(scene):
        scene.publish(1)
        scene.publish(2)
        await until(lambda: scene.cache.held.blocks == 2)
        await scene.end()
        scene.start()
        scene.publish(7)
        await until(lambda: scene.cache.held.blocks == 1)


async def test_what_was_held_is_lost_as_soon_as_the_connection_is():
    scene = Scene()
    scene.start()
    scene.publish(1)
    async with following(scene):
        await until(lambda: scene.cache.held.blocks == 1)
        await scene.end()
        await until(lambda: scene.cache.held.blocks == 0 and not scene.cache.is_known)


async def test_messages_of_another_form_change_nothing():
    scene = Scene()
    publisher = scene.start()
    async with following(scene):
        scene.publish(1)
        await until(lambda: scene.cache.held.blocks == 1)
        for frames in ([b""], [b"", b"x", b"y"], [b"", NUMBER.pack(1)], [b"a", b"b", b"c", b"d"]):
            publisher._events.send_multipart(frames)
        scene.publish(2)
        await until(lambda: scene.cache.held.blocks == 2)
        publisher._events.send_multipart([b"", NUMBER.pack(2), msgpack.packb("no batch")])
        await until(lambda: scene.cache.held.blocks == 0)


TEXT = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("chat", '{"model":"m","messages":[{"role":"user","content":"hello"}],"seed":1}',
         {"model": "m", "messages": [TEXT]}),
        ("", '{"model":"m","prompt":"hello","max_tokens":3}', {"model": "m", "prompt": "hello"}),
        ("", '{"model":"m","prompt":[1,2,3]}', [1, 2, 3]),
        ("", '{"model":"m","prompt":["a","b"]}', None),
        ("chat", '{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}', None),
        ("chat", '{"messages":[{"role":"user","content":"a"}],"cache_salt":"s"}', None),
        ("chat", '{"messages":["a"]}', None),
        ("chat", "[1]", None),
        ("chat", "{", None),
    ],
)  # fmt: skip
def test_only_prompts_of_text_and_tokens_are_related(path, body, asked):
    whole = f"/v1/{path}/completions" if path else "/v1/completions"
    assert tokenize_request(whole, body.encode()) == asked


def test_other_paths_are_left_alone():
    assert tokenize_request("/v1/embeddings", b'{"input":"a"}') is None
