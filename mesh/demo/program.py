"""What the supervisor runs: a command, what kind of part it is, and how it shows to be ready."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from infra.address import Address

PROBE_EVERY_S = 0.05
ANSWER_TIMEOUT_S = 2.0
STATUS_LINE_BYTES_MAX = 128


class Kind(IntEnum):
    """The parts of a region, in the order in which they end.

    A router first: it drains, and needs agents, engines and the bus to answer what it has.
    """

    ROUTER = 1
    AGENT = 2
    ENGINE = 3
    NATS = 4

    @property
    def label(self) -> str:
        """What people call it."""
        return "nats-server" if self is Kind.NATS else self.name.lower()


class Probe(Protocol):
    """Whether a program is ready. Asked again and again from its start until it is."""

    def forget(self) -> None:
        """Remove what an earlier run left: it must not speak for this one."""

    async def passes(self) -> bool:
        """Whether it is ready now."""


async def passed(probe: Probe) -> None:
    """Return once the probe passes. Bound it with the life of the program."""
    while True:  # files and ports of other processes tell nobody that they are there
        if await probe.passes():
            return
        await asyncio.sleep(PROBE_EVERY_S)


@dataclass(frozen=True, slots=True)
class FileWritten:
    """Ready when it has written its ready file."""

    path: Path

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)

    async def passes(self) -> bool:
        return self.path.exists()


@dataclass(frozen=True, slots=True)
class Answers:
    """Ready when it greets a new connection, after `request` if there is one, with `greeting`."""

    address: Address
    request: bytes
    greeting: bytes

    def forget(self) -> None:
        """Nothing outlives the process."""

    async def passes(self) -> bool:
        with contextlib.suppress(OSError, asyncio.TimeoutError, ValueError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._greeted()
        return False

    async def _greeted(self) -> bool:
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            writer.write(self.request)
            answer = await reader.read(STATUS_LINE_BYTES_MAX)
            return answer.startswith(self.greeting)
        finally:
            writer.close()


@dataclass(frozen=True, slots=True)
class Every:
    """Ready when all of these are."""

    probes: tuple[Probe, ...]

    def forget(self) -> None:
        for probe in self.probes:
            probe.forget()

    async def passes(self) -> bool:
        return all(await asyncio.gather(*(probe.passes() for probe in self.probes)))


def speaks_nats(address: Address) -> Answers:
    """A nats-server speaks first."""
    return Answers(address, b"", b"INFO ")


def http_ready(address: Address) -> Answers:
    """An HTTP server that says 200 at `/ready`."""
    request = f"GET /ready HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    return Answers(address, request.encode(), b"HTTP/1.1 200 ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One process to keep running."""

    name: str  # also the name of its log
    kind: Kind
    region: str
    command: tuple[str, ...]
    ready: Probe
    environment: Mapping[str, str] = field(default_factory=dict)  # added to our own
