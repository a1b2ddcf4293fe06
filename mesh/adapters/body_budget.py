"""How many bytes of requests this router keeps at once: a limit on the sum, not on each alone.

A body stays until its client has been sent a first byte, because until then it may have to be
placed again; so a full hold queue of large bodies would be gigabytes. Bytes are taken as they
arrive, so what is announced and not sent takes no room. What does not fit is shed. Bodies of
peers' requests that wait here count as well.

The last part of the room is for small bodies alone: clients that fill the rest with large ones, and
send those slowly, shut nobody else out.
"""

BODIES_BYTES_MAX = 512 * 1024 * 1024
SMALL_BYTES = 1024 * 1024  # ten times what a prompt of 25,000 tokens takes
FOR_SMALL_BYTES = 64 * 1024 * 1024


class BodyBudget:
    """Bytes of bodies and prompts in memory, against a limit."""

    def __init__(
        self, limit_bytes: int = BODIES_BYTES_MAX, for_small_bytes: int = FOR_SMALL_BYTES
    ) -> None:
        self._limit_bytes = limit_bytes
        self._for_small_bytes = for_small_bytes
        self.taken_bytes = 0

    def take(self, more: int, so_far: int = 0) -> bool:
        """Take room for `more` bytes of a body that has `so_far`. False, and nothing taken, if
        there is none."""
        limit = self._limit_bytes
        if so_far + more > SMALL_BYTES:
            limit -= self._for_small_bytes
        if self.taken_bytes + more > limit:
            return False
        self.taken_bytes += more
        return True

    @property
    def is_full(self) -> bool:
        """Whether even a small body may be refused."""
        return self.taken_bytes + SMALL_BYTES > self._limit_bytes

    def settle(self, taken: int, actual: int) -> None:
        """The body is here, read, and has another size than was taken."""
        self.taken_bytes += actual - taken

    def give_back(self, taken: int) -> None:
        """A body is not needed any more."""
        self.taken_bytes -= taken
        assert self.taken_bytes >= 0, "more was given back than taken"
