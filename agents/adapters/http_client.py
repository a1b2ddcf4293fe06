"""Connections to one engine, kept for a while and lent for one request each.

Why not a whole HTTP client: every token of every answer passes here. With aiohttp's, a token cost
the agent a buffer, a future and a task that woke up.

A name is resolved anew for each connection that is opened, and its addresses are tried in turn.
"""

import asyncio
import base64
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from agents.adapters.http_connection import Connection, HttpLost

KEEPALIVE_S = 2.0
CONNECT_TIMEOUT_S = 5.0
_PORTS = {"http": 80, "https": 443}
_UNSAFE = ("\r", "\n", "\0")


@dataclass(slots=True)
class _Idle:
    connection: Connection
    since: float


class HttpClient:
    """Asks below one URL. `release` every connection that `ask` gives; close it at the end."""

    def __init__(self, url: str, clock: Callable[[], float], key: str | None = None) -> None:
        """`url`: http or https, with a user and a password if the engine wants them.

        `key`: sent with every request as a bearer token, instead of them.
        """
        parts = urlsplit(url)
        self.url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))  # for words
        self._host, self._port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = quote(parts.path, safe="/%:@!$&'()*+,;=~")
        self._always = _lines({"Host": parts.netloc.rpartition("@")[2]} | _login(url, key))
        self._clock = clock
        self._idle: list[_Idle] = []  # the one used last at the end
        self._sweeping: asyncio.TimerHandle | None = None

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Connection:
        """Send a request. Raises OSError, HttpLost among them, when nobody takes it.

        ValueError is raised for headers that would end their line.
        """
        first = f"{method} {self._path}{path} HTTP/1.1\r\n".encode()
        length = b"Content-Length: %d\r\n\r\n" % len(body) if body else b"\r\n"
        head = b"".join((first, self._always, _lines(headers), length))
        connection = self._kept() or await self._connected()
        connection.ask((head, body) if body else (head,))
        return connection

    def release(self, connection: Connection) -> None:
        """Whoever asked is done with it. If the answer was not read to its end, it is closed."""
        if not connection.is_usable:
            connection.close()
            return
        connection.rest()
        self._idle.append(_Idle(connection, self._clock()))
        if self._sweeping is None:
            self._sweep_later()

    def close(self) -> None:
        """Close what is idle."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        while self._idle:
            self._idle.pop().connection.close()

    def _kept(self) -> Connection | None:
        now = self._clock()
        while self._idle:
            idle = self._idle.pop()
            if not idle.connection.is_closing and now - idle.since < KEEPALIVE_S:
                return idle.connection
            idle.connection.close()
        return None

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            late = f"no connection to {self._where} in {CONNECT_TIMEOUT_S:g} s"
            raise HttpLost(late) from error
        except (OSError, UnicodeError) as error:  # the latter of names that can be no host's
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise HttpLost(f"no connection to {self._where}: {why}") from error
        return connection

    @property
    def _where(self) -> str:
        return f"{self._host}:{self._port}"

    def _sweep_later(self) -> None:
        self._sweeping = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._sweep)

    def _sweep(self) -> None:
        """Close what nobody has used for long: engines would soon do it themselves."""
        self._sweeping = None
        before = self._clock() - KEEPALIVE_S
        for idle in self._idle:
            if idle.since <= before:
                idle.connection.close()
        self._idle = [idle for idle in self._idle if idle.since > before]
        if self._idle:
            self._sweep_later()


def _lines(headers: Mapping[str, str]) -> bytes:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if any(unsafe in line for line in lines for unsafe in _UNSAFE):
        raise ValueError("a header has a line end or a zero in it")
    return "".join(f"{line}\r\n" for line in lines).encode("utf-8", "replace")


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of an http or https URL: whom it addresses."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme]


def _login(url: str, key: str | None) -> dict[str, str]:
    if key is not None:
        return {"Authorization": f"Bearer {key}"}
    parts = urlsplit(url)
    if parts.username is None:
        return {}
    words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(words.encode()).decode()}
