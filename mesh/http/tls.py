"""TLS at a port: its certificate, and the handshakes of new connections.

asyncio's servers neither bound nor report handshakes. So connections are accepted here, and become
asyncio's with `connect_accepted_socket`, which ends when the handshake does. A client's first byte
is looked at before: one that speaks plain HTTP can be told so. Whoever opens connections and says
nothing holds no place for long; beyond HANDSHAKES_MAX the kernel keeps new ones waiting.

Protocol versions and ciphers are those of Python's `ssl.create_default_context`.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

from infra.process import LimitedLog

log = logging.getLogger(__name__)

ALPN = ("http/1.1",)
HANDSHAKE = b"\x16"  # the type of a client's first record (RFC 8446, 5.1)
HANDSHAKES_MAX = 1024  # under way at one time
HANDSHAKE_S = 10.0
HURRIED_S = 2.0  # the same, for those that come while half of the places are taken
ACCEPT_AGAIN_S = 0.5  # after an error, as when the process has no descriptor left
# For the client's farewell. Before it, what is written must arrive, and a client that reads slowly
# takes its time; `ClientConnection` ends one that reads nothing.
SHUTDOWN_S = 600.0


class TlsUnusable(ValueError):
    """Files that can't be served with; the message names them, and what to do."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A certificate to serve with. Equal to another one where the files are the same."""

    digest: bytes
    context: ssl.SSLContext = field(compare=False, repr=False)


def read_tls(cert: Path, key: Path, client_ca: Path | None = None) -> ServerTls:
    """Read PEM files: the chain, its key without a pass phrase, and, where clients need a
    certificate, who signs those. Raises TlsUnusable."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(ALPN)
    files = (cert, key) if client_ca is None else (cert, key, client_ca)
    digest = blake2b(digest_size=16)
    for path in files:
        try:
            digest.update(blake2b(path.read_bytes()).digest())
        except OSError as error:
            raise TlsUnusable(f"{path}: can't be read ({error.strerror})") from error
    try:
        context.load_cert_chain(cert, key, _refuse_pass_phrase)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        why = "the key is that of another certificate" if _is_mismatch(error) else str(error)
        raise TlsUnusable(f"{cert} and {key}: no certificate and its key in PEM: {why}") from error
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(client_ca)
        except OSError as error:
            raise TlsUnusable(f"{client_ca}: no certificates in PEM: {error}") from error
    return ServerTls(digest.digest(), context)


def _refuse_pass_phrase() -> NoReturn:
    raise ValueError("the key has a pass phrase; write it without one, readable by this user only")


def _is_mismatch(error: Exception) -> bool:
    return isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"


class TlsListener:
    """Accepts connections at one socket; those whose handshake succeeds are `connected`'s."""

    def __init__(
        self,
        plug: socket.socket,
        tls: Callable[[], ServerTls],
        *,
        connected: Callable[[], asyncio.BaseProtocol],
        plain: Callable[[], asyncio.BaseProtocol],
        failed: Callable[[], None],
    ) -> None:
        """`plug` listens. `tls`: what a handshake that begins now is made with. `plain` makes the
        protocol of one that did not begin a handshake; `failed` is called for each handshake that
        fails or takes too long."""
        plug.setblocking(False)
        self.sockets = (plug,)
        self._tls = tls
        self._connected, self._plain, self._failed = connected, plain, failed
        self._places = asyncio.Semaphore(HANDSHAKES_MAX)
        self._limited = LimitedLog(log)
        self.handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept no more. Handshakes go on."""
        self._accepting.cancel()
        self.sockets[0].close()

    async def _accept(self) -> None:
        loop, [plug] = asyncio.get_running_loop(), self.sockets
        while True:
            await self._places.acquire()
            try:
                client, _ = await loop.sock_accept(plug)
            except OSError as error:
                self._places.release()
                self._limited.warning("accept", "", "a connection is not accepted: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
            else:
                self.begin(client, self._places.release)

    def begin(self, client: socket.socket, over: Callable[[], None] = lambda: None) -> None:
        """Take a connection that was accepted; `over` is called when its handshake has ended."""
        client.setblocking(False)
        task = asyncio.create_task(self._shake_hands(client))
        self.handshakes.add(task)
        task.add_done_callback(self.handshakes.discard)
        task.add_done_callback(lambda _: over())

    async def _shake_hands(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        is_crowded = len(self.handshakes) > HANDSHAKES_MAX // 2
        ends_at = loop.time() + (HURRIED_S if is_crowded else HANDSHAKE_S)
        try:
            async with asyncio.timeout_at(ends_at):
                first = await _first_byte(client)
            if not first:
                client.close()
            elif first == HANDSHAKE:
                await loop.connect_accepted_socket(
                    self._connected,
                    client,
                    ssl=self._tls().context,
                    ssl_handshake_timeout=max(0.1, ends_at - loop.time()),
                    ssl_shutdown_timeout=SHUTDOWN_S,
                )
            else:
                await loop.connect_accepted_socket(self._plain, client)
        except OSError as error:  # TimeoutError and SSLError are
            client.close()
            self._failed()
            reason = getattr(error, "reason", None) or type(error).__name__
            self._limited.warning("handshake", reason, "a TLS handshake failed: %s", reason)
        except asyncio.CancelledError:
            client.close()
            raise


async def _first_byte(client: socket.socket) -> bytes:
    """What the client says first, which stays to be read; nothing if it has left."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(client, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(client)
    return client.recv(1, socket.MSG_PEEK)
