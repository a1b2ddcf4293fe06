"""How many bytes of requests this router keeps at once: a limit on the sum, not on each alone.

A body stays until its client has been sent a first byte, because until then it may have to be
placed again; so a full hold queue of large bodies would be gigabytes. What does not fit is shed
before it is read. Bodies of peers' requests that wait here count as well.
"""

BODIES_BYTES_MAX = 512 * 1024 * 1024
UNANNOUNCED_BYTES = 1024 * 1024  # set aside for a body whose length its client does not tell


class BodyBudget:
    """Bytes of bodies and prompts in memory, against a limit."""

    def __init__(self, limit_bytes: int = BODIES_BYTES_MAX) -> None:
        self._limit_bytes = limit_bytes
        self.taken_bytes = 0

    def take(self, length: int | None) -> int | None:
        """Set bytes aside for a body of that length; what was taken, or None if it won't fit."""
        wanted = UNANNOUNCED_BYTES if length is None else length
        if self.taken_bytes + wanted > self._limit_bytes:
            return None
        self.taken_bytes += wanted
        return wanted

    def settle(self, taken: int, actual: int) -> None:
        """The body is here and has another size than was set aside."""
        self.taken_bytes += actual - taken

    def give_back(self, taken: int) -> None:
        """A body is not needed any more."""
        self.taken_bytes -= taken
        assert self.taken_bytes >= 0, "more was given back than taken"
