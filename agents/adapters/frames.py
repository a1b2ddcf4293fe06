"""Writing one answer's frames to its inbox, numbered.

A number is used up whether or not its frame went out: if the bus is away and its buffer full,
the router sees the hole, which is the truth.
"""

import logging
from collections.abc import Awaitable, Callable

import nats.errors

from schemas.exchange import WORKING_S, Frame, pack_frame
from schemas.wire import WireMessage, encode

log = logging.getLogger(__name__)

FRAME_BYTES_MAX = 128 * 1024  # far below any max_payload; engines' chunks are smaller anyway

Publish = Callable[[str, bytes], Awaitable[None]]


class FrameWriter:
    """The frames of one answer."""

    __slots__ = ("_clock", "_inbox", "_number", "_publish", "_spoke_at")

    def __init__(self, publish: Publish, inbox: str, clock: Callable[[], float]) -> None:
        self._publish = publish
        self._inbox = inbox
        self._clock = clock
        self._number = 0
        self._spoke_at = clock()

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

    async def break_silence(self) -> None:
        """Say that work goes on, if nothing was said for WORKING_S. Not after END."""
        if self._clock() - self._spoke_at >= WORKING_S:
            await self._send(Frame.WORKING, b"")

    async def _send(self, kind: Frame, payload: bytes) -> None:
        # No waiting between taking a number and publishing, or two writers would change places.
        number = self._number
        self._number += 1
        self._spoke_at = self._clock()
        try:
            await self._publish(self._inbox, pack_frame(kind, number, payload))
        except nats.errors.Error as problem:
            log.warning("%s: frame %d is lost: %s", self._inbox, number, type(problem).__name__)
