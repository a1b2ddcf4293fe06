"""A router's side of the exchange, over a real bus: sends work, and collects the frames."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from infra.process import end_all
from schemas import exchange, subjects
from schemas.exchange import End, Frame, FrameView, Refused
from schemas.state import Heartbeat, decode_heartbeat
from schemas.wire import decode_as, encode
from tests.support.flushed import flushed
from tests.support.frames import frames_of
from tests.support.until import PATIENCE_S

REGION, REPLICA, ROUTER = "us", "g0", "r1"
MODEL = "org/llama"
KEEPALIVE_S = 0.5  # between keep-alives, as routers have it


class FakeRouter:
    """Frames by inbox, and every heartbeat of the region."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.frames: dict[str, list[FrameView]] = defaultdict(list)
        self.beats: list[Heartbeat] = []
        self.epoch: int | None = 1  # in every keep-alive; None: publishes none
        self._received = asyncio.Condition()

    async def listen(self) -> None:
        await self.client.subscribe(subjects.inbox(REGION, ROUTER, "*"), cb=self._on_frame)
        await self.client.subscribe(subjects.heartbeat(REGION, "*"), cb=self._on_beat)
        await flushed(self.client)

    async def keep_alive(self) -> None:
        """Publish keep-alives, or a slow test loses its answers.

        Runs for ever.
        """
        while True:
            if self.epoch is not None and self.client.is_connected:
                await self.publish_alive()
            await asyncio.sleep(KEEPALIVE_S)

    async def _on_frame(self, msg: Msg) -> None:
        async with self._received:
            for inbox, frame in frames_of(msg):
                self.frames[inbox].append(frame)
            self._received.notify_all()

    async def _on_beat(self, msg: Msg) -> None:
        async with self._received:
            self.beats.append(decode_heartbeat(msg.data))
            self._received.notify_all()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds, checked at every frame and heartbeat."""
        async with asyncio.timeout(PATIENCE_S), self._received:
            await self._received.wait_for(condition)

    async def state(self, **fields: object) -> Heartbeat:
        """Wait for a heartbeat with these fields, published from now on."""
        seen = len(self.beats)

        def found() -> Heartbeat | None:
            for beat in self.beats[seen:]:
                if all(getattr(beat, name) == value for name, value in fields.items()):
                    return beat
            return None

        await self.until(found)
        beat = found()
        assert beat is not None
        return beat

    async def send_work(self, number: int, body: bytes = b"{}", **headers: str) -> str:
        inbox = subjects.inbox(REGION, ROUTER, number)
        await self.client.publish(
            subjects.work(REGION, REPLICA),
            body,
            reply=inbox,
            headers={
                exchange.H_MODEL: subjects.encode_model(MODEL),
                exchange.H_PATH: "/v1/completions",
                exchange.H_FROM: ROUTER,
                exchange.H_HANDOFF: str(number),
                exchange.H_DEADLINE_MS: "30000",
                **headers,
            },
        )
        return inbox

    async def part(self, inbox: str, offset: int, data: bytes) -> None:
        await self.client.publish(
            subjects.body(REGION, REPLICA),
            data,
            headers={exchange.H_BODY_INBOX: inbox, exchange.H_BODY_OFFSET: str(offset)},
        )

    async def cancel(self, inbox: str) -> None:
        message = encode(exchange.Cancel(inbox))
        await self.client.publish(subjects.cancel(REGION, REPLICA), message)

    async def credit(self, inbox: str, consumed: int) -> None:
        message = encode(exchange.Credit(inbox, consumed))
        await self.client.publish(subjects.credit(REGION, REPLICA), message)

    async def publish_alive(self) -> None:
        assert self.epoch is not None
        message = encode(exchange.Alive(self.epoch))
        await self.client.publish(subjects.alive(REGION, ROUTER), message)

    async def answer(self, inbox: str) -> End:
        """Wait for the END frame."""
        frames = self.frames[inbox]
        await self.until(lambda: frames and frames[-1].kind is Frame.END)
        return decode_as(End, frames[-1].payload)

    async def refusal(self, inbox: str) -> Refused:
        """Wait for the REFUSED frame."""
        frames = self.frames[inbox]
        await self.until(lambda: frames)
        assert frames[0].kind is Frame.REFUSED
        return decode_as(Refused, frames[0].payload)

    def kinds(self, inbox: str) -> str:
        """Without WORKING frames, whose number depends on the machine's speed."""
        return self.all_kinds(inbox).replace(chr(Frame.WORKING), "")

    def all_kinds(self, inbox: str) -> str:
        frames = self.frames[inbox]
        assert [frame.number for frame in frames] == list(range(len(frames)))
        return "".join(chr(frame.kind) for frame in frames)

    def text(self, inbox: str) -> bytes:
        return b"".join(frame.payload for frame in self.frames[inbox] if frame.kind is Frame.DATA)


@contextlib.asynccontextmanager
async def fake_router(url: str) -> AsyncIterator[FakeRouter]:
    client = await nats.connect(url, reconnect_time_wait=0.1, max_reconnect_attempts=-1)
    router = FakeRouter(client)
    await router.listen()
    living = asyncio.create_task(router.keep_alive())
    try:
        yield router
    finally:
        await end_all([living])
        await client.close()
