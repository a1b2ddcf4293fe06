"""A token bucket: so many bytes a second, and a burst after quiet times."""


class Budget:
    """Bytes that may be spent. A message larger than what is left may go if the bucket is full:
    otherwise one larger than the burst never would."""

    def __init__(self, bytes_per_s: float, burst_bytes: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._left_bytes = burst_bytes
        self._at: float | None = None

    def share(self, parts: int, of_bytes_per_s: float, burst_s: float) -> None:
        """Have one of so many equal parts of that from now on."""
        self._bytes_per_s = of_bytes_per_s / parts
        self._burst_bytes = self._bytes_per_s * burst_s

    def left(self, now: float) -> float:
        """Bytes that may be spent now."""
        if self._at is not None:
            earned = (now - self._at) * self._bytes_per_s
            self._left_bytes = min(self._burst_bytes, self._left_bytes + earned)
        self._at = now
        return self._left_bytes

    def spend(self, size_bytes: int, now: float) -> bool:
        """Whether a message of that size may go; if so it is paid for."""
        left = self.left(now)
        if left < size_bytes and left < self._burst_bytes:
            return False
        self._left_bytes -= size_bytes
        return True
