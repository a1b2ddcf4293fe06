"""The connection of a process to its region's nats-server.

It reconnects for ever: a router or agent outlives a restart of its server. Messages published
while the server is away wait in nats-py, up to PENDING_BYTES_MAX, and are sent when it is back
[tried, 2.16.0]; beyond that they are lost and publishing raises. A caller whose message is
worthless later (a heartbeat) checks `is_connected` first.
"""

import asyncio
import base64
import binascii
import logging
import random
import re
import ssl
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport

from infra.process import LimitedLog, end_all

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0  # a server may start beside us; longer than that is a mistake
CONNECT_TIMEOUT_S = 3
RECONNECT_WAIT_S = 0.25
PING_INTERVAL_S = 5
# Where there is another server to go to: one that hangs is left after two to three of these.
CLUSTER_PING_INTERVAL_S = 0.25
FLUSH_TIMEOUT_S = 10.0
PING_AGAIN_S = 1.0
BUS_CA = "MESH_BUS_CA"  # in files of credentials, and of the environment
LEAVE_S = 0.25  # for a server's farewell under TLS; one that hangs says none
REFUSED = "authorization violation"  # in nats-server's error, lower-cased
CA_ADVICE = f"is {BUS_CA} the rendered one, and are the server's files of the same rendering?"
SHOWN_CHARS = 200  # of a subject and of an exception in a log line
HEADER_NAMES_KEPT = 256
HPUB_SPACES = 4  # in the line before a message with headers
# A write that names the last one it knows; and what nats-server says, "wrong last sequence: 17",
# with this code, where it is not the last any more. A stream with copies may use the other code,
# which comes without the number, while a write before it is still being copied.
H_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
WRONG_LAST_SEQUENCE, WRONG_LAST_UNNUMBERED = 10071, 10164
WRONG_LAST = (WRONG_LAST_SEQUENCE, WRONG_LAST_UNNUMBERED)
PENDING_BYTES_MAX = 64 * 1024 * 1024  # two largest bodies on their way out


class BusUnreachable(ConnectionError):
    """No server answered, or it refused the login; the message says what to check."""


@dataclass(frozen=True, slots=True)
class BusAddress:
    """`url`: of one nats-server, or of each of a region's, with commas between. `ca`: who may vouch
    for it, in DER as base64, with commas between; the connection is encrypted from its first byte
    then, so that nobody between can have it go without."""

    url: str
    user: str | None = None
    password: str | None = None
    ca: str | None = None

    @classmethod
    def of_credentials(cls, values: Mapping[str, str], url: str | None = None) -> Self:
        """The login of a rendered file, there or at `url`. Raises KeyError for what it lacks."""
        login = values["NATS_USER"], values["NATS_PASSWORD"]
        return cls(url or values["NATS_URL"], *login, values.get(BUS_CA))

    @property
    def servers(self) -> list[str]:
        return [one for part in self.url.split(",") if (one := part.strip())]


def _nothing() -> None:
    return None


async def connect(
    address: BusAddress,
    *,
    name: str,
    inbox_prefix: str,
    on_lost: Callable[[], None] = _nothing,
    on_back: Callable[[], None] = _nothing,
    on_error: Callable[[Exception], None] | None = None,
) -> "BusClient":
    """Connect within START_TIMEOUT_S, or raise BusUnreachable; at once if the login is refused.

    `name` shows in `nats server report connections`. `on_lost` and `on_back` are called at each
    loss and return of the connection; `on_error` gets the server's errors (permissions).
    The caller drains the client, or gives it to `close`.
    """

    events = _ConnectionEvents(name, address, on_lost, on_back, on_error)
    client = BusClient()
    try:
        tls = _trusting(address.ca) if address.ca else None
    except (ValueError, OSError) as problem:
        raise BusUnreachable(f"{BUS_CA}: no certificates in base64 ({problem})") from problem
    ping_s = PING_INTERVAL_S if len(address.servers) == 1 else CLUSTER_PING_INTERVAL_S
    connecting = client.connect(
        # In an order of its own; after a loss nats-py takes them in turn, the lost one last.
        servers=random.sample(address.servers, len(address.servers)),
        dont_randomize=True,
        name=name,
        user=address.user,
        password=address.password,
        inbox_prefix=inbox_prefix,
        connect_timeout=CONNECT_TIMEOUT_S,
        reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
        max_reconnect_attempts=-1,
        ping_interval=ping_s,  # type: ignore[arg-type]
        max_outstanding_pings=2,
        pending_size=PENDING_BYTES_MAX,
        tls=tls,
        tls_handshake_first=tls is not None,
        disconnected_cb=events.lost,
        reconnected_cb=events.back,
        error_cb=events.error,
    )
    try:
        await _in_time(connecting)
    except asyncio.CancelledError:
        await client.close()  # it does not give up its socket by itself
        raise
    except (OSError, nats.errors.Error) as problem:
        await client.close()
        cause = events.refused or events.last_problem or problem
        raise BusUnreachable(events.why_not(cause)) from cause
    events.client = client
    return client


def _trusting(ca: str) -> ssl.SSLContext:
    """Raises ValueError or OSError for text that holds no certificates."""
    try:
        found = b"".join(base64.b64decode(one, validate=True) for one in ca.split(","))
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    return ssl.create_default_context(cadata=found)


async def _in_time(connecting: Coroutine[Any, Any, None]) -> None:
    """Wait for it in a task of its own: it may lose a cancel, and would go on trying."""
    task = asyncio.create_task(connecting)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.wait([task])
    except (asyncio.CancelledError, TimeoutError):
        await end_all([task])
        await asyncio.gather(task, return_exceptions=True)
        raise
    await task


def closed_for_good(client: Client) -> BusUnreachable:
    """The error of a connection that nats-py does not reopen, with its last error."""
    error = str(client.last_error or "no error")
    return BusUnreachable(f"the bus closed the connection for good; last error: {error}")


async def close(client: Client) -> None:
    """Disconnect. Unsent messages are lost, with a line in the log; raises nothing."""
    try:
        await client.close()
    except Exception as problem:  # must not hide the error that ends the process
        log.warning("disconnecting from the bus: %s", str(problem) or type(problem).__name__)


@lru_cache(HEADER_NAMES_KEPT)
def _is_plain_name(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9-]+", name) is not None


def plain_headers(headers: Mapping[str, str]) -> bytes | None:
    """Headers as they travel; None where a name or a value is more than plain text."""
    values = "".join(headers.values())
    if not (values.isascii() and values.isprintable() and all(map(_is_plain_name, headers))):
        return None
    lines = "\r\n".join(map(": ".join, headers.items()))
    return f"NATS/1.0\r\n{lines}\r\n\r\n".encode() if headers else None


class _TlsProtocol(asyncio.StreamReaderProtocol):
    """Keeps the writer below: asyncio closes one that nobody has, amid the farewell of TLS."""

    def __init__(self, reader: asyncio.StreamReader, below: asyncio.StreamWriter) -> None:
        super().__init__(reader, loop=asyncio.get_running_loop())
        self._below = below


class _Transport(TcpTransport):
    """TCP where writing to a lost connection is a ConnectionResetError, as nats-py expects.

    Under uvloop a write after the loss raises a RuntimeError, asyncio's `writelines` a TypeError
    from Python 3.12 on [tried, 3.13.0]. nats-py 2.16 takes neither for a loss: they end its sending
    or reconnecting task, and it never reconnects.
    """

    async def connect_tls(
        self, uri: Any, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        """As nats-py's, but that a server which hangs is left soon, and none is read ahead of."""
        assert self._io_writer is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(buffer_size, loop)
        protocol = _TlsProtocol(reader, self._io_writer)
        plain, self._io_writer = self._io_writer.transport, None  # its protocol hears no more
        try:
            transport = await loop.start_tls(
                plain,
                protocol,
                ssl_context,
                server_hostname=uri if isinstance(uri, str) else uri.hostname,
                ssl_handshake_timeout=connect_timeout,
                ssl_shutdown_timeout=LEAVE_S,
            )
        except BaseException:
            plain.abort()
            raise
        assert transport is not None
        protocol.connection_made(transport)  # else the reader could not hold it back
        self._io_reader = reader
        self._io_writer = asyncio.StreamWriter(transport, protocol, reader, loop)

    @property
    def is_open(self) -> bool:
        return self._io_writer is not None and not self._io_writer.transport.is_closing()

    def write(self, payload: bytes) -> None:
        if self.is_open:  # else `drain`, which nats-py calls next, raises
            super().write(payload)  # type: ignore[no-untyped-call]

    def writelines(self, payload: list[bytes]) -> None:
        try:  # without a check first: this runs for every message
            self._io_writer.writelines(payload)  # type: ignore[union-attr]
        except (RuntimeError, TypeError, AttributeError) as problem:
            if self.is_open:
                raise
            raise ConnectionResetError("the connection is lost") from problem

    async def wait_closed(self) -> None:
        # Closing the client cancels its reconnecting task, which may wait here too: the cancel must
        # not reach the future that both share, or `close` itself would seem cancelled.
        if self._io_writer is not None:
            await asyncio.shield(self._io_writer.wait_closed())

    def __bool__(self) -> bool:
        return True  # else nats-py makes its own in its place


class _LeavingTransport(_Transport):
    """The transport of a client that is being closed: unsent messages are lost."""

    def __init__(self, used: _Transport, *, is_connected: bool) -> None:
        """`is_connected`: nats-py's state; a server that is gone may have left a socket."""
        vars(self).update(vars(used))
        self._is_connected = is_connected
        self._has_lost = False

    def writelines(self, payload: list[bytes]) -> None:
        if self._is_connected and self.is_open:
            super().writelines(payload)
        else:
            self._lost()

    async def drain(self) -> None:
        try:
            await super().drain()  # type: ignore[no-untyped-call]
        except OSError:
            self._lost()

    def _lost(self) -> None:
        if not self._has_lost:
            log.warning("disconnected; unsent messages are lost")
        self._has_lost = True


class BusClient(Client):
    """nats-py's client on a `_Transport`; `close` goes through to its end without a server too."""

    def __init__(self) -> None:
        super().__init__()
        self._transport: _Transport = _Transport()  # type: ignore[no-untyped-call]
        self._listeners: dict[int, Callable[[Msg], None]] = {}  # by subscription
        self._limited = LimitedLog(log)

    async def listen(self, subject: str, listener: Callable[[Msg], None], queue: str = "") -> None:
        """Subscribe. `listener` is called with each message as it is read, and must not block.

        nats-py would pass each through a queue to a task of the subscription, at about 2 us a
        message. What `listener` raises is logged. The subscription lasts as long as the client,
        and nats-py's counts of messages don't include it.
        """

        async def callback(msg: Msg) -> None:
            listener(msg)

        subscription = await self.subscribe(subject, queue=queue, cb=callback)
        self._listeners[subscription._id] = listener

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        # nats-server passes malformed headers on, and nats-py's exception about them would end its
        # reading task [2.16.0]: nothing is received until unanswered pings end the connection.
        # It is not given to `on_error`: no sender's message may pass for an error of the server.
        try:
            listener = self._listeners.get(sid)
            if listener is None:
                await super()._process_msg(sid, subject, reply, data, headers)
            else:
                listener(
                    self._build_message(
                        sid,
                        subject,
                        reply,
                        data,
                        await self._process_headers(headers) if headers else None,
                    )
                )
        except Exception as problem:
            kind = type(problem).__name__
            text = "a message on %r could not be processed: %s: %s"
            why = str(problem)[:SHOWN_CHARS]
            self._limited.warning("message", kind, text, subject[:SHOWN_CHARS], kind, why)

    async def publish_described(
        self, subject: str, payload: bytes, reply: str, headers: dict[str, str], block: bytes
    ) -> None:
        """As `publish`, with headers of which `block` are the `plain_headers`.

        nats-py strips and translates each header on its own: 11 us for those of a request, most of
        it to look up characters [2.16.0].
        """
        sizes = f"{len(block)} {len(block) + len(payload)}"
        command = f"HPUB {subject} {reply} {sizes}"
        is_plain = subject and command.isprintable() and command.count(" ") == HPUB_SPACES
        is_open = self.is_connected and not self.is_draining_pubs
        if not (is_plain and is_open and len(payload) <= self.max_payload):
            await self.publish(subject, payload, reply, headers)  # buffers or refuses it
            return
        await self._send_command(b"%b\r\n%b%b\r\n" % (command.encode(), block, payload))
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()

    async def flush(self, timeout: float = FLUSH_TIMEOUT_S) -> None:
        """Wait until the server has received all messages, `timeout` seconds at most for each
        answer of it; but for those that a connection took with it. Raises nats.errors.Error.

        nats-py writes a ping at once [2.16.0]: it may overtake messages that wait, and is then
        followed by another one.
        """
        for _ in range(2 if self._pending else 1):
            await self._pinged(timeout)

    async def _pinged(self, timeout: float) -> None:
        """Wait for the answer to a ping, which is lost if the server is restarted meanwhile: then
        to another one."""
        clock, is_lost, wait_s = asyncio.get_running_loop().time, False, PING_AGAIN_S
        until = clock() + timeout
        while (left_s := until - clock()) > 0:
            if is_lost and not self.is_connected:  # nats-py's flush would return at once
                if self.is_closed:
                    raise nats.errors.ConnectionClosedError
                await asyncio.sleep(min(RECONNECT_WAIT_S, left_s))
                continue
            try:
                await super().flush(min(wait_s, left_s))  # type: ignore[arg-type]
                return
            except nats.errors.TimeoutError:
                is_lost, wait_s = True, 2 * wait_s  # a late answer counts for its own ping only
        raise nats.errors.FlushTimeoutError

    async def _process_pong(self) -> None:
        # A `flush` that times out leaves its cancelled future behind. The late answer to it would
        # be an InvalidStateError, which ends nats-py's reading task [2.16.0]: no message arrives
        # any more, until unanswered pings end the connection, after 10 to 15 s.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def close(self) -> None:
        self._transport = _LeavingTransport(self._transport, is_connected=self.is_connected)
        reconnecting = self._reconnection_task
        try:
            await super().close()
        finally:
            # nats-py cancels it once, and it may lose that: it would go on trying for ever.
            if reconnecting is not None and reconnecting is not asyncio.current_task():
                await end_all([reconnecting])


@dataclass(slots=True)
class _ConnectionEvents:
    """What nats-py reports of a connection, as log lines and calls to its owner."""

    name: str
    address: BusAddress
    on_lost: Callable[[], None]
    on_back: Callable[[], None]
    on_error: Callable[[Exception], None] | None
    client: Client | None = None  # once it was connected
    last_problem: Exception | None = None
    refused: Exception | None = None  # the login, or the server; trying again would not help

    def why_not(self, cause: Exception) -> str:
        """What to check when there was no first connection."""
        url, user = self.address.url, self.address.user
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the bus at {url} is not to be trusted: {cause.verify_message}; {CA_ADVICE}"
        if isinstance(cause, ssl.SSLError):
            return f"the bus at {url} speaks no TLS: does it run with files rendered with --tls?"
        if self.refused is None:
            why = str(cause) or type(cause).__name__
            return f"no bus at {url}: {why}; is nats-server running there?"
        if user is None:
            return f"the bus at {url} requires a user: set NATS_USER and NATS_PASSWORD as rendered"
        return (
            f"the bus at {url} refused user {user!r}: are NATS_USER and NATS_PASSWORD the "
            "rendered ones, and does nats-server run with the files rendered with them?"
        )

    async def lost(self) -> None:
        if self.client is None or self.client.is_closed:  # closed by us, or never open
            return
        log.warning("%s: lost the bus at %s, reconnecting", self.name, self.address.url)
        self.on_lost()

    async def back(self) -> None:
        # At the level of the loss: its reader needs both lines.
        log.warning("%s: the bus at %s is back", self.name, self.address.url)
        self.on_back()

    async def error(self, problem: Exception) -> None:
        is_first, self.last_problem = self.last_problem is None, problem
        if self.client is None:
            self._not_yet(problem, is_first=is_first)
        else:
            log.warning("%s: bus: %s", self.name, str(problem) or type(problem).__name__)
        if self.on_error is not None:
            self.on_error(problem)

    def _not_yet(self, problem: Exception, *, is_first: bool) -> None:
        """A try for the first connection failed; the same error comes four times a second."""
        # Another error of a handshake may pass: a server greets whoever begins too late.
        is_final = isinstance(problem, ssl.SSLCertVerificationError)
        if is_final or REFUSED in str(problem).lower():
            self.refused = problem
            raise problem  # nats-py lets it through, and tries no more
        if is_first:
            why = str(problem) or type(problem).__name__
            log.warning(
                "%s: no bus at %s yet (%s); trying for %g s",
                self.name,
                self.address.url,
                why,
                START_TIMEOUT_S,
            )
