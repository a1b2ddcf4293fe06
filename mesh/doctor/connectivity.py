"""Whether a region's nats-server answers, and connections to it as one of its users."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg

from infra import bus
from infra.bus import H_EXPECTED, BusAddress
from infra.topology import server_suffixes

NATS_PORT = 4222
GREETING = b"INFO "
PUBLISH, SUBSCRIPTION = "publish", "subscription"  # as a server's errors name them
# A sequence number that no stream will reach: one that checks it refuses the write.
NEVER_THE_LAST = {H_EXPECTED: str(2**53)}
REFUSALS_WITHIN_S = 1.0  # after the answer to a flush


class NoServerRuns(ConnectionError):
    """No server listens at any of the addresses; the message names them."""


@dataclass(frozen=True, slots=True)
class ServerUnreachable:
    """A server that does not answer. `listens`: something accepts connections there. `suffix`: of
    its name, where the region has several."""

    url: str
    why: str
    listens: bool
    suffix: str = ""


async def check_servers(url: str, answer_s: float) -> list[ServerUnreachable]:
    """Those of a region's nats-servers (`url`: with commas) that don't greet in time."""
    urls = url.split(",")
    found = await asyncio.gather(*(check_server(each, answer_s) for each in urls))
    suffixes = server_suffixes(len(urls))
    return [replace(one, suffix=name) for one, name in zip(found, suffixes, strict=True) if one]


async def check_server(url: str, answer_s: float) -> ServerUnreachable | None:
    """None if a nats-server sends INFO there within `answer_s` seconds.

    One such connection replaces all logins that would fail. A connection alone proves little: the
    kernel also accepts connections of a server that was stopped.
    """
    parts, listens = urlsplit(url), False
    try:
        async with asyncio.timeout(answer_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or NATS_PORT)
            listens = True
            try:
                greeting = await reader.readexactly(len(GREETING))
            finally:
                writer.close()
        why = "it is not a nats-server"
        if greeting == GREETING:
            return None
    except TimeoutError:
        why = f"no connection within {answer_s:g} s"
        if listens:
            why = f"it accepts connections and sends nothing for {answer_s:g} s"
    except asyncio.IncompleteReadError:
        why = "it closes connections without sending anything"
    except ConnectionRefusedError:
        why = "nobody listens there"
    except OSError as error:
        why = str(error)
    return ServerUnreachable(url, why, listens)


class DoctorConnection:
    """A client, and what its server refused it."""

    def __init__(self) -> None:
        self.client: Client
        self._errors: list[str] = []
        self._new_error = asyncio.Event()

    def on_error(self, problem: Exception) -> None:
        self._errors.append(str(problem).lower())
        self._new_error.set()

    async def accepted(self, subjects: Sequence[str], kind: str = PUBLISH) -> list[str]:
        """Those to which the server lets us publish, or subscribe; all are tried at once."""
        for subject in subjects:
            if kind == PUBLISH:
                await self.client.publish(subject, b"", headers=NEVER_THE_LAST)
            else:
                await self.client.subscribe(subject, cb=_ignore)
        await self.client.flush()
        with suppress(TimeoutError):
            async with asyncio.timeout(REFUSALS_WITHIN_S):
                while self._not_refused(subjects, kind):
                    self._new_error.clear()
                    await self._new_error.wait()
        return self._not_refused(subjects, kind)

    def _not_refused(self, subjects: Sequence[str], kind: str) -> list[str]:
        return [
            subject
            for subject in subjects
            if not any(f'{kind} to "{subject}"'.lower() in error for error in self._errors)
        ]


async def _ignore(msg: Msg) -> None:
    """A subscription that is only tried reads nothing."""


@asynccontextmanager
async def logged_in(
    address: BusAddress, inbox_prefix: str, within_s: float
) -> AsyncIterator[DoctorConnection]:
    """A connection as that user, closed at the end. Raises BusUnreachable."""
    connection = DoctorConnection()
    try:
        async with asyncio.timeout(within_s):
            connection.client = await bus.connect(
                address, name="mesh", inbox_prefix=inbox_prefix, on_error=connection.on_error
            )
    except TimeoutError as error:
        raise bus.BusUnreachable(f"no login at {address.url} within {within_s:g} s") from error
    try:
        yield connection
    finally:
        await bus.close(connection.client)
