"""The console's connections: not too many, and none that stays without sending requests.

aiohttp closes connections that are idle after an answer. It sets no limit to how long the first
request takes, or to how long an answer stays unread; here both have one.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

CONNECTIONS_MAX = 64
SILENT_S = 30.0  # without the start of a request; looking one up takes a few seconds


class Connections:
    """Those that are open. `factory` makes the protocol that serves one."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._open: dict[Any, Connection] = {}  # by its protocol; the oldest first

    def accept(self) -> asyncio.BaseProtocol:
        """For the next connection. If there are too many, the oldest one that has sent no request
        makes room; if all have sent one, the new one is closed."""
        if len(self._open) >= CONNECTIONS_MAX:
            unused = next((one for one in self._open.values() if not one.has_requested), None)
            if unused is None:
                return TurnedAway()
            unused.abort()
        served = self._factory()
        self._open[served] = Connection(served, lambda: self._open.pop(served, None))
        return self._open[served]

    def requested(self, served: object) -> None:
        """A request has begun on the connection of that protocol."""
        if (connection := self._open.get(served)) is not None:
            connection.requested()


class Connection(asyncio.Protocol):
    """One connection: passes everything on to the protocol that serves it."""

    def __init__(self, served: Any, on_end: Callable[[], object]) -> None:
        self.has_requested = False
        self._served, self._on_end = served, on_end
        self._transport: asyncio.Transport | None = None
        self._is_aborted = False
        self._timer = self._start_timer()

    def requested(self) -> None:
        self.has_requested = True
        self._timer.cancel()
        self._timer = self._start_timer()

    def abort(self) -> None:
        """Close it at once; what it has not read yet is lost."""
        self._is_aborted = True
        self._timer.cancel()
        self._on_end()
        if self._transport is not None:
            self._transport.abort()

    def _start_timer(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(SILENT_S, self.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports are not instances of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._served.connection_made(transport)
        if self._is_aborted:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._served.data_received(data)

    def eof_received(self) -> Any:
        return self._served.eof_received()

    def pause_writing(self) -> None:
        self._served.pause_writing()

    def resume_writing(self) -> None:
        self._served.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._on_end()
        self._served.connection_lost(exc)


class TurnedAway(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
