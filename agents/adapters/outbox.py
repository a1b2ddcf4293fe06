"""Frames on their way out: what there is for one router at one moment goes as one message.

Engines answer in step, so tokens come in bursts, one for every stream of a batch. A token waits
GATHER_S at most for the rest of its burst, so what a bus has to carry does not grow with the batch;
the time between two tokens of a stream moves by no more than that. Beginnings and ends wait for
nothing, and take along what was waiting.

A router that misses some of what was sent lately (`lately.py`) is sent it again. After the bus was
away, what is for a router waits until that router is heard: it may be back later than this agent.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import nats.errors

from agents.adapters.lately import Lately, Posts
from agents.adapters.link import Link
from agents.core.routers import SILENCE_ABROAD_S
from schemas.parcels import PARCEL, Post, is_parcelled, pack_parcels

log = logging.getLogger(__name__)

GATHER_S = 0.001
REPEAT_S = 0.05  # whole batches miss frames at once, and looking for them is work
MISSED_MAX = 8192  # answers looked for at once; who asks beyond asks again

Publish = Callable[[str, bytes], Awaitable[None]]


class Outbox:
    """Give it frames from anywhere while `run` runs in a task.

    Refusals are few bytes; what else waits is bounded by the answers' windows.
    """

    def __init__(self, publish: Publish, link: Link) -> None:
        """`publish` may raise nats.errors.Error. While the bus is not there, all waits."""
        self._publish = publish
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._posts: Posts = {}
        self._posts_bytes = 0
        self._lately = Lately()
        self._again: Posts = {}  # said before, and kept from then
        self._missed: dict[tuple[str, str], int] = {}  # router and stream: from which frame on
        self._repeating: asyncio.TimerHandle | None = None
        self._losses = link.losses
        self._heard: set[str] | None = None  # routers, since the bus was away; None: all may be
        self._timer: asyncio.TimerHandle | None = None
        self._go = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def to(self, inbox: str) -> Callable[[bytes, bool], None]:
        """What takes frames for that inbox: sent after those before, soon, or at once if urgent."""
        router, _, stream = inbox.rpartition(".")
        return partial(self._post, router, stream)

    def _post(self, router: str, stream: str, frame: bytes, urgent: bool) -> None:
        self._posts_bytes += len(frame)
        if (posts := self._posts.get(router)) is not None:
            posts.append((stream, frame))
        else:
            self._posts[router] = [(stream, frame)]
            self._empty.clear()
        if urgent:
            self._go.set()
        elif self._timer is None:
            self._timer = self._loop.call_later(GATHER_S, self._go.set)

    def repeat(self, inbox: str, first: int) -> None:
        """Send frames of that answer again soon, from that number on, as far as they are kept."""
        router, _, stream = inbox.rpartition(".")
        if len(self._missed) < MISSED_MAX:
            self._missed[router, stream] = first
        if self._repeating is None:
            self._repeating = self._loop.call_later(REPEAT_S, self._repeat)

    def _repeat(self) -> None:
        missed, self._missed, self._repeating = self._missed, {}, None
        by_router: dict[str, dict[str, int]] = {}
        for (router, stream), first in missed.items():
            by_router.setdefault(router, {})[stream] = first
        for router, streams in by_router.items():
            frames, gone = self._lately.since(router, streams, self._link.present_s())
            if gone:
                log.warning("%s misses frames of %d answers that are not kept", router, gone)
            self._say_again(router, frames)

    def speak_up(self, router: str) -> None:
        """It is heard: send what waits for it, and again what ended answers lately."""
        if self._losses != self._link.losses:
            self._notice_losses()
        if self._heard is not None:
            self._heard.add(router)
        if router in self._posts:
            self._empty.clear()
        self._say_again(router, self._lately.ends(router, self._link.present_s()))

    def forget(self) -> None:
        """Let go of what is kept for nobody any more: at least now and then."""
        self._lately.forget(self._link.present_s())

    def _say_again(self, router: str, frames: list[Post]) -> None:
        if frames:
            self._again.setdefault(router, []).extend(frames)
            self._empty.clear()
        self._go.set()

    async def run(self) -> None:
        """Send what is posted. Runs for ever; nothing is sent once it was cancelled."""
        while True:
            await self._go.wait()
            await self._link.is_there.wait()
            self._go.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._losses != self._link.losses:
                self._notice_losses()
            if self._again:
                again, self._again = self._again, {}
                await self._send(again)
            posted, size = self._posts, self._posts_bytes
            self._posts, self._posts_bytes = {}, 0
            if self._heard is not None:
                posted, size = self._due(posted, self._heard)
            self._lately.keep(posted, size, self._link.present_s())
            await self._send(posted)
            if not self._again and (not self._posts or self._waits_for_others()):
                self._empty.set()

    def _waits_for_others(self) -> bool:
        """Whether all that is left is for routers that were not heard since the bus was away."""
        return self._heard is not None and self._heard.isdisjoint(self._posts)

    def _due(self, posted: Posts, heard: set[str]) -> tuple[Posts, int]:
        """What may go now, and its bytes; the rest goes on waiting."""
        self._posts = {router: posts for router, posts in posted.items() if router not in heard}
        self._posts_bytes = _size(self._posts)
        due = {router: posts for router, posts in posted.items() if router in heard}
        return due, _size(due)

    def _notice_losses(self) -> None:
        self._losses = self._link.losses
        self._heard = set()
        self._loop.call_later(SILENCE_ABROAD_S, self._expect_nobody, self._losses)

    def _expect_nobody(self, losses: int) -> None:
        """Who was not heard by now is lost; what is for it goes the way of all else."""
        if losses == self._losses:
            self._heard = None
            self._go.set()

    async def sent(self) -> None:
        """Wait until everything posted was given to the bus."""
        await self._empty.wait()

    async def _send(self, posted: Posts) -> None:
        for router, posts in posted.items():
            for subject, message in _messages(router, posts):
                try:
                    await self._publish(subject, message)
                except (nats.errors.Error, OSError) as problem:  # the numbering tells the router
                    log.warning("%s: frames may be lost: %s", subject, type(problem).__name__)


def _size(posted: Posts) -> int:
    return sum(len(frame) for posts in posted.values() for _, frame in posts)


def _messages(router: str, posts: list[Post]) -> Iterator[tuple[str, bytes]]:
    """Subjects and payloads. A router that reads no parcels has none of its streams in one."""
    together = [post for post in posts if is_parcelled(post[0])] if len(posts) > 1 else []
    if len(together) > 1:
        for parcel in pack_parcels(together):
            yield f"{router}.{PARCEL}", parcel
        if len(together) == len(posts):
            return
        posts = [post for post in posts if not is_parcelled(post[0])]
    for stream, frame in posts:
        yield f"{router}.{stream}", frame
