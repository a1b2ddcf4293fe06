"""Frames on their way out: all frames for one router at one moment go out as one message.

Engines answer in step, so tokens come in bursts, one for every stream of a batch. A token waits
GATHER_S at most for the rest of its burst, so the number of bus messages does not grow with the
batch. Urgent frames (heads and ends) wait for nothing and take along what was waiting.

Sent frames are kept for a while for retransmission, in whole batches as they went out, so that
keeping them costs a token nothing. After the bus was away, frames for a router wait until its
keep-alive arrives: it may be back later than this agent.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import nats.errors

from agents.core.events import BusDisconnected, BusReconnected
from agents.core.routers import SILENCE_ABROAD_S
from schemas.exchange import FRAME_HEADER, WORKING_S, Frame, unpack_frame
from schemas.parcels import PARCEL, Post, is_parcelled, pack_parcels

log = logging.getLogger(__name__)

GATHER_S = 0.001
REPEAT_S = 0.05  # whole batches miss frames at once, and searching for them takes time
MISSED_MAX = 8192  # streams to retransmit at once; a router repeats what is beyond
HEARD_MAX = 1024  # routers noted as heard since the bus was away; a fleet has far fewer
FRAME_BYTES_MAX = 128 * 1024  # far below any max_payload; engines' chunks are smaller anyway
KEPT_S = SILENCE_ABROAD_S + 2.0  # with the bus there; a router that is silent longer is given up
KEPT_BYTES_MAX = 16 * 1024 * 1024

FramesByRouter = dict[str, list[Post]]  # by the prefix of one router's inboxes
PostFrame = Callable[[bytes, bool], None]  # a frame, and whether it is urgent
Publish = Callable[[str, bytes], Awaitable[None]]

_pack_header = FRAME_HEADER.pack


class FrameWriter:
    """The frames of one response, numbered in order.

    A number is used up whether or not its frame went out: if the bus is away and its buffer full,
    the router sees the gap.
    """

    __slots__ = ("_clock", "_looked_at", "_number", "_post", "_spoke_at", "_worker", "is_known")

    def __init__(self, post: PostFrame, clock: Callable[[], float], worker: bytes = b"") -> None:
        """`worker`: an encoded Placed, for a router that has no HEAD yet."""
        self._worker = worker
        self._post = post
        self._clock = clock
        self._number = self._looked_at = 0  # of the next frame; and when `keep_alive` last looked
        self._spoke_at = clock()
        self.is_known = False  # by a credit: the router knows whom to cancel

    def send(self, kind: Frame, payload: bytes) -> None:
        """Send a frame with one encoded message, at once."""
        number = self._number
        self._number = number + 1
        self._spoke_at = self._clock()
        self._post(_pack_header(kind, number) + payload, True)

    def data(self, chunk: bytes) -> None:
        """Send the engine's bytes, in one frame unless they are more than FRAME_BYTES_MAX."""
        if len(chunk) > FRAME_BYTES_MAX:
            for start in range(0, len(chunk), FRAME_BYTES_MAX):
                self.data(chunk[start : start + FRAME_BYTES_MAX])
            return
        number = self._number
        self._number = number + 1
        self._post(_pack_header(Frame.DATA, number) + chunk, False)

    def keep_alive(self) -> None:
        """Send WORKING if nothing was sent for WORKING_S. DATA does not count before `is_known`, as
        it names nobody: a router that lost what came before could not cancel the answer. Not after
        END."""
        now = self._clock()
        if self.is_known and self._number != self._looked_at:
            self._spoke_at = now
        elif now - self._spoke_at >= WORKING_S:
            self.working()
        self._looked_at = self._number

    def working(self) -> None:
        """Send WORKING: the request is worked on, and where. Not after END."""
        self.send(Frame.WORKING, self._worker)


class BusConnection:
    """Whether the bus is up. The client's callbacks call `lost` and `returned`; they can't wait for
    the core, so `report` feeds it these events, and frames wait until it was fed a return."""

    def __init__(self) -> None:
        self.is_up = asyncio.Event()
        self.is_up.set()
        self.losses = 0
        self._clock = asyncio.get_running_loop().time
        self._changes: asyncio.Queue[BusDisconnected | BusReconnected] = asyncio.Queue()
        self._lost_at = 0.0
        self._away_s = 0.0  # in all, without a loss that still lasts

    def connected_s(self) -> float:
        """A clock that stops while the bus is away."""
        return (self._clock() if self.is_up.is_set() else self._lost_at) - self._away_s

    def lost(self) -> None:
        """The connection is lost: frames wait."""
        self.losses += 1
        if self.is_up.is_set():
            self._lost_at = self._clock()
            self.is_up.clear()
        self._changes.put_nowait(BusDisconnected())

    def returned(self) -> None:
        """The connection is back: frames go on once the core was fed it."""
        self._changes.put_nowait(BusReconnected())

    async def report(
        self, feed: Callable[[BusDisconnected | BusReconnected], Awaitable[None]]
    ) -> None:
        """Feed the core. Runs for ever."""
        while True:
            event = await self._changes.get()
            await feed(event)
            if isinstance(event, BusReconnected) and self._changes.empty():
                self._away_s += self._clock() - self._lost_at
                self.is_up.set()


class RetransmitBuffer:
    """Batches with when they were sent. `now`, everywhere: of `BusConnection.connected_s`."""

    def __init__(self) -> None:
        self._batches: deque[tuple[float, int, FramesByRouter]] = deque()  # when, bytes, what
        self.kept_bytes = 0

    def keep(self, frames: FramesByRouter, size: int, now: float) -> None:
        """Keep a batch of `size` bytes, sent now. What is too old goes with the next `forget`."""
        self._batches.append((now, size, frames))
        self.kept_bytes = kept = self.kept_bytes + size
        if kept > KEPT_BYTES_MAX:
            self.forget(now)

    def forget(self, now: float) -> None:
        """Drop what is older than KEPT_S, and the oldest beyond KEPT_BYTES_MAX."""
        batches, before = self._batches, now - KEPT_S
        while batches and (batches[0][0] < before or self.kept_bytes > KEPT_BYTES_MAX):
            self.kept_bytes -= batches.popleft()[1]

    def ends(self, router: str, now: float) -> list[Post]:
        """The END frames sent to one router."""
        self.forget(now)
        ended = {
            stream: frame
            for stream, frame in self._sent_to(router)
            if unpack_frame(frame).kind is Frame.END
        }
        return list(ended.items())

    def since(self, router: str, streams: dict[str, int], now: float) -> tuple[list[Post], int]:
        """Frames of these streams, each from its number on; and how many of the streams lack that
        first frame here though later ones are kept."""
        self.forget(now)
        kept: dict[str, dict[int, bytes]] = {stream: {} for stream in streams}
        for stream, frame in self._sent_to(router):
            if stream in kept:
                kept[stream][unpack_frame(frame).number] = frame
        found, gone = [], 0
        for stream, first in streams.items():
            numbers = sorted(number for number in kept[stream] if number >= first)
            if first in kept[stream]:
                found += [(stream, kept[stream][number]) for number in numbers]
            else:
                gone += bool(numbers)
        return found, gone

    def _sent_to(self, router: str) -> Iterable[Post]:
        for _, _, frames in self._batches:
            yield from frames.get(router, ())


class Outbox:
    """Takes frames from anywhere and publishes them while `run` runs in a task.

    Refusals are few bytes; all other waiting frames are bounded by the streams' windows.
    """

    def __init__(self, publish: Publish, connection: BusConnection) -> None:
        """`publish` may raise nats.errors.Error. While the bus is away, everything waits."""
        self._publish = publish
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._waiting: FramesByRouter = {}
        self._waiting_bytes = 0
        self._sent = RetransmitBuffer()
        self._again: FramesByRouter = {}  # to be retransmitted
        self._missed: dict[tuple[str, str], int] = {}  # router and stream: from which frame on
        self._repeating: asyncio.TimerHandle | None = None
        self._losses = connection.losses
        self._alive: set[str] | None = None  # routers, since the bus was away; None: all may be
        self._timer: asyncio.TimerHandle | None = None
        self._go = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def sender(self, inbox: str) -> PostFrame:
        """Takes frames for that inbox: sent in order, soon, or at once if urgent."""
        router, _, stream = inbox.rpartition(".")
        return partial(self._post, router, stream)

    def _post(self, router: str, stream: str, frame: bytes, urgent: bool) -> None:
        self._waiting_bytes += len(frame)
        if (frames := self._waiting.get(router)) is not None:
            frames.append((stream, frame))
        else:
            self._waiting[router] = [(stream, frame)]
            self._empty.clear()
        if urgent:
            self._go.set()
        elif self._timer is None:
            self._timer = self._loop.call_later(GATHER_S, self._go.set)

    def retransmit(self, inbox: str, first: int) -> None:
        """A router requests frames of that response: send them again soon, from that number on, as
        far as they are kept, with those that wait for it."""
        router, _, stream = inbox.rpartition(".")
        self._heard(router)
        if len(self._missed) < MISSED_MAX:
            self._missed[router, stream] = first
        if self._repeating is None:
            self._repeating = self._loop.call_later(REPEAT_S, self._retransmit)

    def _retransmit(self) -> None:
        missed, self._missed, self._repeating = self._missed, {}, None
        by_router: dict[str, dict[str, int]] = {}
        for (router, stream), first in missed.items():
            by_router.setdefault(router, {})[stream] = first
        for router, streams in by_router.items():
            frames, gone = self._sent.since(router, streams, self._connection.connected_s())
            if gone:
                log.warning("%s misses frames of %d answers that are not kept", router, gone)
            self._send_again(router, frames)

    def resync(self, router: str) -> None:
        """A router's keep-alive came: send the frames that wait for it, and its last END frames."""
        self._heard(router)
        self._send_again(router, self._sent.ends(router, self._connection.connected_s()))

    def _heard(self, router: str) -> None:
        """Frames wait for it no longer, as it is there."""
        if self._losses != self._connection.losses:
            self._note_losses()
        if self._alive is not None and len(self._alive) < HEARD_MAX:
            self._alive.add(router)
        if router in self._waiting:
            self._empty.clear()

    def forget(self) -> None:
        """Drop what is too old to be retransmitted: call it now and then."""
        self._sent.forget(self._connection.connected_s())

    def _send_again(self, router: str, frames: list[Post]) -> None:
        if frames:
            self._again.setdefault(router, []).extend(frames)
            self._empty.clear()
        self._go.set()

    async def run(self) -> None:
        """Publish what comes. Runs for ever; nothing is published once it was cancelled."""
        go, connection, keep = self._go, self._connection, self._sent.keep
        while True:
            await go.wait()
            if not connection.is_up.is_set():
                await connection.is_up.wait()
            go.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._again or self._losses != connection.losses:
                await self._publish_again()
            frames, size = self._waiting, self._waiting_bytes
            self._waiting, self._waiting_bytes = {}, 0
            if self._alive is not None:
                frames, size = self._due(frames, self._alive)
            keep(frames, size, connection.connected_s())
            await self._publish_all(frames)
            if not self._again and (not self._waiting or self._waits_for_routers()):
                self._empty.set()

    async def _publish_again(self) -> None:
        if self._losses != self._connection.losses:
            self._note_losses()
        again, self._again = self._again, {}
        await self._publish_all(again)

    def _waits_for_routers(self) -> bool:
        """Whether all that is left is for routers without a keep-alive since the bus was away."""
        return self._alive is not None and self._alive.isdisjoint(self._waiting)

    def _due(self, frames: FramesByRouter, alive: set[str]) -> tuple[FramesByRouter, int]:
        """What may go now, and its bytes; the rest goes on waiting."""
        self._waiting = {router: posts for router, posts in frames.items() if router not in alive}
        self._waiting_bytes = _size(self._waiting)
        due = {router: posts for router, posts in frames.items() if router in alive}
        return due, _size(due)

    def _note_losses(self) -> None:
        self._losses = self._connection.losses
        self._alive = set()
        self._loop.call_later(SILENCE_ABROAD_S, self._wait_no_longer, self._losses)

    def _wait_no_longer(self, losses: int) -> None:
        """A router without a keep-alive by now is lost; its frames go out like all others."""
        if losses == self._losses:
            self._alive = None
            self._go.set()

    async def sent(self) -> None:
        """Wait until every frame was given to the bus."""
        await self._empty.wait()

    async def _publish_all(self, frames: FramesByRouter) -> None:
        for router, posts in frames.items():
            for subject, message in _messages(router, posts):
                try:
                    await self._publish(subject, message)
                except (nats.errors.Error, OSError) as problem:  # the router sees the gap
                    log.warning("%s: frames may be lost: %s", subject, type(problem).__name__)


def _size(frames: FramesByRouter) -> int:
    return sum(len(frame) for posts in frames.values() for _, frame in posts)


def _messages(router: str, posts: list[Post]) -> Iterable[tuple[str, bytes]]:
    """Subjects and payloads. Streams of a router that reads no parcels go in none."""
    if len(posts) == 1:
        stream, frame = posts[0]
        return ((f"{router}.{stream}", frame),)
    together = [post for post in posts if is_parcelled(post[0])]
    if len(together) < 2:
        return [(f"{router}.{stream}", frame) for stream, frame in posts]
    parcels = [(f"{router}.{PARCEL}", parcel) for parcel in pack_parcels(together)]
    if len(together) == len(posts):
        return parcels
    alone = [post for post in posts if not is_parcelled(post[0])]
    return [*parcels, *((f"{router}.{stream}", frame) for stream, frame in alone)]
