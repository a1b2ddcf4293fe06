"""Request bodies that come in parts, put together again.

Parts of one body come from one connection, so NATS keeps their order; a hole means that the bus
dropped a part, and the body is lost. Repeating single parts was rejected: the router still has
the whole body and places the request again, which it must be able to do anyway.
"""

from dataclasses import dataclass, field

PART_TIMEOUT_S = 10.0  # since the part before; the widest link moves a part in well under 1 s


class BodyLost(ValueError):
    """The parts don't make the body that was announced; the message says why."""


@dataclass(slots=True)
class _Assembly:
    total: int
    last_part_at: float
    received: int = 0
    parts: list[bytes] = field(default_factory=list)


class Bodies:
    """Bodies in assembly, by inbox. The caller bounds how many and how large."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: dict[str, _Assembly] = {}

    def open(self, inbox: str, total: int, now: float) -> None:
        self._open[inbox] = _Assembly(total, now)

    def close(self, inbox: str) -> None:
        self._open.pop(inbox, None)

    def add(self, inbox: str, offset: int, data: bytes, now: float) -> bytes | None:
        """Add a part; the whole body once it is complete, and the assembly is closed.

        Parts of unknown bodies and repeated parts are ignored. Raises BodyLost for a hole and
        for more bytes than announced; the assembly is then closed too.
        """
        assembly = self._open.get(inbox)
        if assembly is None or offset < assembly.received:
            return None
        if offset > assembly.received or offset + len(data) > assembly.total:
            self.close(inbox)
            raise BodyLost(
                f"part of {len(data)} bytes at {offset}, expected {assembly.received} "
                f"of {assembly.total}"
            )
        assembly.parts.append(data)
        assembly.received += len(data)
        assembly.last_part_at = now
        if assembly.received < assembly.total:
            return None
        self.close(inbox)
        return b"".join(assembly.parts)

    def wait_anew(self, now: float) -> None:
        """No part could be taken in until now: the wait for the next one is counted from here."""
        for assembly in self._open.values():
            assembly.last_part_at = now

    def late(self, now: float) -> list[str]:
        """Inboxes whose next part is overdue."""
        return [
            inbox
            for inbox, assembly in self._open.items()
            if now - assembly.last_part_at >= PART_TIMEOUT_S
        ]
