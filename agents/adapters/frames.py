"""Writing one answer's frames to its inbox, numbered.

A number is used up whether or not its frame went out: if the bus is away and its buffer full,
the router sees the hole, which is the truth.
"""

import logging
from collections.abc import Awaitable, Callable

import nats.errors

from schemas.exchange import Frame, pack_frame
from schemas.wire import WireMessage, encode

log = logging.getLogger(__name__)

FRAME_BYTES_MAX = 128 * 1024  # far below any max_payload; engines' chunks are smaller anyway

Publish = Callable[[str, bytes], Awaitable[None]]


class FrameWriter:
    """The frames of one answer, from `first` on."""

    __slots__ = ("_inbox", "_number", "_publish")

    def __init__(self, publish: Publish, inbox: str, first: int = 0) -> None:
        self._publish = publish
        self._inbox = inbox
        self._number = first

    async def say(self, kind: Frame, message: WireMessage) -> None:
        """Send a frame with one message."""
        await self._send(kind, encode(message))

    async def data(self, chunk: bytes) -> None:
        """Send the engine's bytes, in one frame unless they are very many."""
        if len(chunk) <= FRAME_BYTES_MAX:
            await self._send(Frame.DATA, chunk)
            return
        for start in range(0, len(chunk), FRAME_BYTES_MAX):
            await self._send(Frame.DATA, chunk[start : start + FRAME_BYTES_MAX])

    async def _send(self, kind: Frame, payload: bytes) -> None:
        number = self._number
        self._number += 1
        try:
            await self._publish(self._inbox, pack_frame(kind, number, payload))
        except nats.errors.Error as problem:
            log.warning("%s: frame %d is lost: %s", self._inbox, number, type(problem).__name__)
