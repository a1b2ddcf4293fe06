"""A simulated wide-area link: a TCP proxy that delays both directions, and can be cut.

The demo and the tests put one on every leaf link, because a region pair's round trip decides
placement and loopback has none. Kernel emulation (`tc netem`) needs root and a kernel module;
this needs a port. Only the handshake of a new connection is quicker than on a real link.

Sockets are handled by bare asyncio protocols rather than streams: one timer and no task per
direction, so a token that crosses the link costs microseconds. Memory is bounded per direction:
past `held_bytes_max` the sending socket is not read until the line has half emptied, and a
receiver that stops reading stops the line itself.

Every chunk is stamped with its arrival time when it enters, so chunks overlap in flight and delay
costs no throughput. A chunk never arrives before the one ahead of it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Self, cast

from infra.address import Address

# What a waiting chunk costs besides its bytes; counted so that tiny chunks are bounded too.
CHUNK_COST_BYTES = 128


class StreamEnd(Enum):
    """Travels the line behind everything sent before it."""

    EOF = "the sender closed its direction"
    RESET = "the sender's connection broke"


Item = bytes | StreamEnd


@dataclass(slots=True)
class DelayLine:
    """One direction of a link. `bytes_per_s`: what enters the way in a second; None: no bound."""

    delay_s: float
    bytes_per_s: float | None = None
    held_bytes: int = 0
    _items: deque[tuple[float, Item]] = field(default_factory=deque)
    _last_due: float = float("-inf")
    _free_at: float = float("-inf")  # when what has entered before is on its way

    def push(self, item: Item, now: float) -> None:
        """Let an item enter at `now` (seconds). The caller limits `held_bytes`."""
        if self.bytes_per_s is not None and isinstance(item, bytes):
            now = self._free_at = max(self._free_at, now) + len(item) / self.bytes_per_s
        self._last_due = max(self._last_due, now + self.delay_s)
        self._items.append((self._last_due, item))
        self.held_bytes += _cost(item)

    @property
    def next_due(self) -> float | None:
        """When the next item comes out, or None if the line is empty."""
        return self._items[0][0] if self._items else None

    def pop_due(self, now: float) -> list[Item]:
        """Every item that has arrived by `now`, in the order of entry."""
        arrived: list[Item] = []
        while self._items and self._items[0][0] <= now:
            item = self._items.popleft()[1]
            self.held_bytes -= _cost(item)
            arrived.append(item)
        return arrived


def _cost(item: Item) -> int:
    return CHUNK_COST_BYTES + (len(item) if isinstance(item, bytes) else 0)


logger = logging.getLogger(__name__)

HELD_BYTES_MAX = 16 * 1024 * 1024  # 1 Gbit/s over a 110 ms way is 14 MB in flight
PIECE_BYTES = 8 * 1024  # of what enters a link with a bound: 3 ms at 20 Mbit/s
CONNECTIONS_MAX = 256
# Event loops keep time in milliseconds: what is due within half of one is delivered now,
# because a shorter timer would fire at once and spin.
GRAIN_S = 0.0005


ANY_PORT = Address("127.0.0.1", 0)


class _End(asyncio.Protocol):
    """One socket of a joined pair. What it reads travels its line to the other end."""

    def __init__(self, proxy: "WanProxy", count: Callable[[int], None]) -> None:
        """`count` is called with the number of bytes received here."""
        self.other: _End = self
        self._count = count
        self.transport: asyncio.Transport | None = None
        self._proxy = proxy
        self._line = DelayLine(proxy.one_way_s, proxy.bytes_per_s)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._reading = True
        self._writable = False  # until its socket is connected
        self._eof_written = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # TCP gives one, on every event loop
        self._proxy._connected(self, self.transport)
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._count(len(data))
        if self._proxy.bytes_per_s is None:
            self._enter(data)
        else:  # each piece leaves when its own last byte has gone out
            for at in range(0, len(data), PIECE_BYTES):
                self._enter(data[at : at + PIECE_BYTES])
        if self._line.held_bytes >= self._proxy.held_bytes_max:
            self.pause_reading()

    def eof_received(self) -> bool:
        self._enter(StreamEnd.EOF)
        return True  # the other direction may still send

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._proxy._disconnected(self)
        self._enter(StreamEnd.RESET)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self.other._arm()

    @property
    def held_bytes(self) -> int:
        """Read at this end and not yet written at the other."""
        return self._line.held_bytes

    def resume_reading(self) -> None:
        self._reading = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_reading(self) -> None:
        """Leave what the sender sends in its own buffers."""
        self._reading = False
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def abort(self) -> None:
        """Drop the socket and everything on its way, now."""
        if self._timer is not None:
            self._timer.cancel()
        self._line = DelayLine(0.0)
        if self.transport is not None:
            self.transport.abort()

    def _enter(self, item: Item) -> None:
        self._line.push(item, self._loop.time())
        self._arm()

    def _arm(self) -> None:
        due = self._line.next_due
        if self._timer is None and due is not None and self.other._writable:
            self._timer = self._loop.call_at(due, self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        for item in self._line.pop_due(self._loop.time() + GRAIN_S):
            self.other._receive(item)
        if not self._reading and self._line.held_bytes <= self._proxy.held_bytes_max // 2:
            self.resume_reading()
        self._arm()

    def _receive(self, item: Item) -> None:
        if self.transport is None:
            return
        if isinstance(item, bytes):
            self.transport.write(item)
        elif item is StreamEnd.RESET:
            # Everything sent before the break was written already: let it flush.
            self.transport.close()
        else:
            self._receive_eof(self.transport)

    def _receive_eof(self, transport: asyncio.Transport) -> None:
        self._eof_written = True
        if self.other._eof_written:
            transport.close()
            if self.other.transport is not None:
                self.other.transport.close()
        elif transport.can_write_eof():
            transport.write_eof()


class WanProxy:
    """Listens, and joins every connection to the target over a delaying link.

    An async context manager; or call `start` and, whatever happens, `close`.
    """

    def __init__(
        self,
        target: Address,
        *,
        one_way_s: float,
        listen: Address = ANY_PORT,
        held_bytes_max: int = HELD_BYTES_MAX,
        bytes_per_s: float | None = None,
    ) -> None:
        """`one_way_s`: seconds each direction takes; half the round trip. `bytes_per_s`: what each
        connection carries, in each direction; more waits, in the proxy up to `held_bytes_max`,
        which counts what is on its way too."""
        self.target = target
        self.one_way_s = one_way_s
        self.held_bytes_max = held_bytes_max
        self.bytes_per_s = bytes_per_s
        self.address = listen  # of the near side; the same through every cut and heal
        self._server: asyncio.Server | None = None
        self._ends: set[_End] = set()
        self._dials: set[asyncio.Task[None]] = set()
        self.to_target_bytes = self.from_target_bytes = 0  # taken in since the start

    @property
    def connections(self) -> int:
        return len(self._dials) + len(self._ends)

    @property
    def held_bytes(self) -> int:
        """What is on its way in all connections and both directions, with its overhead."""
        return sum(end.held_bytes for end in self._ends)

    async def start(self) -> None:
        """Begin to listen. Raises OSError if the port is taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, *self.address)
        self.address = Address(*self._server.sockets[0].getsockname()[:2])

    def cut(self) -> None:
        """The link fails: connections drop with what was on its way, new ones are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for dial in self._dials:
            dial.cancel()
        for end in list(self._ends):
            end.abort()

    async def heal(self) -> None:
        """The link is back, on the same port. Raises OSError if another took it meanwhile."""
        if self._server is None:
            await self.start()

    async def close(self) -> None:
        """Cut for good, and wait until nothing of it runs."""
        self.cut()
        await asyncio.gather(*self._dials, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _accept(self) -> _End:
        near, far = _End(self, self._count_near), _End(self, self._count_far)
        near.other, far.other = far, near
        dial = asyncio.get_running_loop().create_task(self._dial(near, far))
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)
        return near

    def _count_near(self, size: int) -> None:
        self.to_target_bytes += size

    def _count_far(self, size: int) -> None:
        self.from_target_bytes += size

    def _connected(self, end: _End, transport: asyncio.Transport) -> None:
        if self._server is None or len(self._ends) >= 2 * CONNECTIONS_MAX:
            transport.abort()
        self._ends.add(end)

    def _disconnected(self, end: _End) -> None:
        self._ends.discard(end)

    async def _dial(self, near: _End, far: _End) -> None:
        """Connect an accepted socket to the target; bytes received meanwhile wait in its line."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: far, *self.target)
        except OSError as error:
            logger.debug("link to %s: %s", self.target, error)
            near.abort()
