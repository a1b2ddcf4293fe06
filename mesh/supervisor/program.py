"""A program of the mesh: its command, its kind, and the test that shows when it is ready."""

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from infra.address import Address

PROBE_EVERY_S = 0.05
ANSWER_TIMEOUT_S = 2.0
STATUS_LINE_BYTES_MAX = 128


class ProgramKind(IntEnum):
    """The programs of a region, in the order in which they are stopped.

    Batch runners and routers first: while they drain, they need agents, engines and the bus.
    """

    BATCH_RUNNER = 1
    ROUTER = 2
    AGENT = 3
    ENGINE = 4
    NATS = 5

    @property
    def label(self) -> str:
        return "nats-server" if self is ProgramKind.NATS else self.name.lower().replace("_", " ")


class ReadinessProbe(Protocol):
    """Whether a program is ready; repeated from its start until it is."""

    def reset(self) -> None:
        """Remove what an earlier run of the program left."""

    async def passes(self) -> bool:
        """Whether it is ready now."""


async def wait_until_ready(probe: ReadinessProbe) -> None:
    """Return once the probe passes. The caller cancels it when the program has ended."""
    while True:  # neither files nor ports of other processes notify us
        if await probe.passes():
            return
        await asyncio.sleep(PROBE_EVERY_S)


@dataclass(frozen=True, slots=True)
class FileWritten:
    """Ready when the program has written its ready file."""

    path: Path

    def reset(self) -> None:
        self.path.unlink(missing_ok=True)

    async def passes(self) -> bool:
        return self.path.exists()


@dataclass(frozen=True, slots=True)
class TcpGreeting:
    """Ready when its answer to `request` on a new connection begins with `greeting`. `tls`: of
    whoever answers there."""

    address: Address
    request: bytes
    greeting: bytes
    tls: bool = False

    def reset(self) -> None:
        """A closed port needs no cleaning."""

    async def passes(self) -> bool:
        with contextlib.suppress(OSError, asyncio.TimeoutError, ValueError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                tls = _anyone() if self.tls else None
                reader, writer = await asyncio.open_connection(*self.address, ssl=tls)
                try:
                    writer.write(self.request)
                    return (await reader.read(STATUS_LINE_BYTES_MAX)).startswith(self.greeting)
                finally:
                    writer.close()
        return False


@dataclass(frozen=True, slots=True)
class AllReady:
    """Ready when all of these are."""

    probes: tuple[ReadinessProbe, ...]

    def reset(self) -> None:
        for probe in self.probes:
            probe.reset()

    async def passes(self) -> bool:
        return all(await asyncio.gather(*(probe.passes() for probe in self.probes)))


def speaks_nats(address: Address) -> TcpGreeting:
    """A nats-server sends INFO to every new connection."""
    return TcpGreeting(address, b"", b"INFO ")


def _anyone() -> ssl.SSLContext:
    """Takes every certificate: the port of a program of ours is enough."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def http_ready(address: Address, *, tls: bool = False) -> TcpGreeting:
    """An HTTP server, or with `tls` an HTTPS server, that answers 200 to `GET /ready`."""
    request = f"GET /ready HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    return TcpGreeting(address, request.encode(), b"HTTP/1.1 200 ", tls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One command to keep running."""

    name: str  # also the name of its log
    kind: ProgramKind
    region: str
    command: tuple[str, ...]
    # Of `python -m MODULE …`: a fork of the process that has imported it already.
    preloaded: bool = False
    ready: ReadinessProbe
    environment: Mapping[str, str] = field(default_factory=dict)  # added to our own
    folder: Path | None = None  # where it is started; ours, or that of what is preloaded
