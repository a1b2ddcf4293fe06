"""Making one answer's frames, numbered.

A number is used up whether or not its frame went out: if the bus is away and its buffer full,
the router sees the hole, which is the truth.
"""

from collections.abc import Callable

from schemas.exchange import WORKING_S, Frame, pack_frame
from schemas.wire import WireMessage, encode

_DATA = Frame.DATA
FRAME_BYTES_MAX = 128 * 1024  # far below any max_payload; engines' chunks are smaller anyway


Post = Callable[[bytes, bool], None]  # a frame, and whether it is urgent


class FrameWriter:
    """The frames of one answer; `post` takes them, in order."""

    __slots__ = ("_clock", "_number", "_post", "_spoke_at", "_who")

    def __init__(self, post: Post, clock: Callable[[], float], who: bytes = b"") -> None:
        """`who`: an encoded Placed, for whoever hears of work that it doesn't know."""
        self._who = who
        self._post = post
        self._clock = clock
        self._number = 0
        self._spoke_at = clock()

    def say(self, kind: Frame, message: WireMessage) -> None:
        """Send a frame with one message."""
        self._send(kind, encode(message))

    def data(self, chunk: bytes, now: float) -> None:
        """Send the engine's bytes, which came now: in one frame unless they are very many."""
        if len(chunk) > FRAME_BYTES_MAX:
            for start in range(0, len(chunk), FRAME_BYTES_MAX):
                self.data(chunk[start : start + FRAME_BYTES_MAX], now)
            return
        number = self._number
        self._number = number + 1
        self._spoke_at = now
        self._post(pack_frame(_DATA, number, chunk), False)

    def break_silence(self) -> None:
        """Say that work goes on, if nothing was said for WORKING_S. Not after END."""
        if self._clock() - self._spoke_at >= WORKING_S:
            self.speak()

    def speak(self) -> None:
        """Say that work goes on, and where. Not after END."""
        self._send(Frame.WORKING, self._who)

    def _send(self, kind: Frame, payload: bytes) -> None:
        number = self._number
        self._number += 1
        self._spoke_at = self._clock()
        # Nobody sees a token a millisecond late; all else is waited for.
        self._post(pack_frame(kind, number, payload), True)
