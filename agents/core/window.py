"""Flow control of one answer: how far the agent may run ahead of the client.

A byte window as in HTTP/2 (RFC 9113, section 5.2), with absolute positions instead of
increments: a credit that is lost or comes twice does no harm, the next one says it all.
"""

from schemas.exchange import WINDOW_BYTES


class Window:
    """Bytes sent and bytes credited of one answer."""

    __slots__ = ("_consumed", "_sent", "_size")

    def __init__(self, size: int = WINDOW_BYTES) -> None:
        self._size = size
        self._sent = 0
        self._consumed = 0

    @property
    def sent(self) -> int:
        return self._sent

    @property
    def open(self) -> bool:
        """Whether the engine may be read further."""
        return self._sent - self._consumed < self._size

    def send(self, size: int) -> bool:
        """Note what was sent; whether the window is still open."""
        self._sent += size
        return self._sent - self._consumed < self._size

    def credit(self, consumed: int) -> None:
        """Note how far the client is. Old news and claims beyond what was sent change nothing."""
        if self._consumed < consumed <= self._sent:
            self._consumed = consumed
