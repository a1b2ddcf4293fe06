"""What was sent lately and may be gone: on a link that was cut, in a nats-server that died.

Kept whole batches at a time, as they went out, so that keeping costs a token nothing; looking for
some answers' frames goes through all of it.
"""

from collections import deque
from collections.abc import Iterable

from agents.core.routers import SILENCE_ABROAD_S
from schemas.exchange import Frame, unpack_frame
from schemas.parcels import Post

KEPT_S = SILENCE_ABROAD_S + 2.0  # with the bus there; who is silent for longer is given up
KEPT_BYTES_MAX = 16 * 1024 * 1024

Posts = dict[str, list[Post]]  # by what the inboxes of one router begin with


class Lately:
    """Batches with when they were sent. `now`, everywhere: of a clock that stands still while the
    bus is away."""

    def __init__(self) -> None:
        self._batches: deque[tuple[float, int, Posts]] = deque()  # when, bytes, what
        self.kept_bytes = 0

    def keep(self, posts: Posts, size: int, now: float) -> None:
        """Of so many bytes, sent now."""
        self._batches.append((now, size, posts))
        self.kept_bytes += size
        if self._batches[0][0] < now - KEPT_S or self.kept_bytes > KEPT_BYTES_MAX:
            self.forget(now)

    def forget(self, now: float) -> None:
        """Let go of what nobody can want any more, and of the oldest of too much."""
        batches, before = self._batches, now - KEPT_S
        while batches and (batches[0][0] < before or self.kept_bytes > KEPT_BYTES_MAX):
            self.kept_bytes -= batches.popleft()[1]

    def ends(self, router: str, now: float) -> list[Post]:
        """What ended answers to inboxes that begin so."""
        self.forget(now)
        ended = {
            stream: frame
            for stream, frame in self._to(router)
            if unpack_frame(frame).kind is Frame.END
        }
        return list(ended.items())

    def since(self, router: str, streams: dict[str, int], now: float) -> tuple[list[Post], int]:
        """Frames of these answers, each from its number on; and of how many answers that one is
        gone though later ones are here."""
        self.forget(now)
        kept: dict[str, dict[int, bytes]] = {stream: {} for stream in streams}
        for stream, frame in self._to(router):
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

    def _to(self, router: str) -> Iterable[Post]:
        for _, _, posts in self._batches:
            yield from posts.get(router, ())
