"""Frames on their way out: what there is for one router at one moment goes as one message.

Engines answer in step, so tokens come in bursts, one for every stream of a batch. The first of a
burst goes at once; those behind it GATHER_S later, together (`schemas.parcels`). So a stream whose
tokens are further apart is never held, in a full batch a token is held for a millisecond of the
twenty and more that it took, and what a bus has to carry does not grow with the batch. Beginnings
and ends wait for nothing, and take along what was waiting.

What a nats-server had when it died is gone. So what was sent last is kept, and said again when the
bus is back: by their numbers routers know which frames they have.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

import nats.errors

from schemas.parcels import PARCEL, Post, is_parcelled, pack_parcels

log = logging.getLogger(__name__)

GATHER_S = 0.001
KEPT_S = 1.0  # where only its process died, a server's connections end at once
KEPT_BYTES_MAX = 8 * 1024 * 1024

Posts = dict[str, list[Post]]  # by what the inboxes of one router begin with
Publish = Callable[[str, bytes], Awaitable[None]]


class Outbox:
    """`post` from anywhere while `run` runs in a task.

    Refusals are few bytes; what else waits is bounded by the answers' windows.
    """

    def __init__(self, publish: Publish, is_there: asyncio.Event) -> None:
        """`publish` may raise nats.errors.Error. `is_there`: set while whoever is to hear of it
        does; while it is not, all waits."""
        self._publish = publish
        self._is_there = is_there
        self._posts: Posts = {}
        self._posts_bytes = 0
        self._kept: deque[tuple[float, int, Posts]] = deque()  # when it was sent, and its bytes
        self._kept_bytes = 0
        self._repeats = False
        self._loop = asyncio.get_running_loop()
        self._sent_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._go = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def post(self, inbox: str, frame: bytes, *, urgent: bool) -> None:
        """Send this frame after those before it: as soon as may be, or at once."""
        router, _, stream = inbox.rpartition(".")
        self._posts_bytes += len(frame)
        if (posts := self._posts.get(router)) is not None:
            posts.append((stream, frame))
        else:
            self._posts[router] = [(stream, frame)]
            self._empty.clear()
        if urgent:
            self._go.set()
        elif self._timer is None:
            # A time that has passed means at once.
            self._timer = self._loop.call_at(self._sent_at + GATHER_S, self._go.set)

    def repeat(self) -> None:
        """The bus was away: before all else, say again what may have been lost with it."""
        self._repeats = True
        self._empty.clear()
        self._go.set()

    async def run(self) -> None:
        """Send what is posted. Runs for ever; nothing is sent once it was cancelled."""
        while True:
            await self._go.wait()
            await self._is_there.wait()
            self._go.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._sent_at = self._loop.time()
            if self._repeats:
                self._repeats = False
                self._kept = deque((self._sent_at, size, posts) for _, size, posts in self._kept)
                for _, _, posts in list(self._kept):
                    await self._send(posts)
            self._keep()
            posted, self._posts, self._posts_bytes = self._posts, {}, 0
            await self._send(posted)
            if not self._posts:
                self._empty.set()

    async def sent(self) -> None:
        """Wait until everything posted was given to the bus."""
        await self._empty.wait()

    def _keep(self) -> None:
        """What is sent next, and what was sent shortly before."""
        kept, since = self._kept, self._sent_at - KEPT_S
        kept.append((self._sent_at, self._posts_bytes, self._posts))
        self._kept_bytes += self._posts_bytes
        while kept and (kept[0][0] < since or self._kept_bytes > KEPT_BYTES_MAX):
            self._kept_bytes -= kept.popleft()[1]

    async def _send(self, posted: Posts) -> None:
        for router, posts in posted.items():
            for subject, message in _messages(router, posts):
                try:
                    await self._publish(subject, message)
                except (nats.errors.Error, OSError) as problem:  # the numbering tells the router
                    log.warning("%s: frames may be lost: %s", subject, type(problem).__name__)


def _messages(router: str, posts: list[Post]) -> Iterator[tuple[str, bytes]]:
    """Subjects and payloads. A router that reads no parcels has none of its streams in one."""
    together = [post for post in posts if is_parcelled(post[0])] if len(posts) > 1 else []
    if len(together) > 1:
        for parcel in pack_parcels(together):
            yield f"{router}.{PARCEL}", parcel
        posts = [post for post in posts if not is_parcelled(post[0])]
    for stream, frame in posts:
        yield f"{router}.{stream}", frame
