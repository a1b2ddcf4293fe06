"""One request and its answer, for handlers that await: all but usual requests for work.

A handler reads as much of the body as it needs and returns an `Answer`, or `Work` that is to be
placed. It is cancelled when the client hangs up.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from infra.tenant_table import Caller
from mesh.adapters.refused import RequestRefused
from mesh.http.answer_head import answer_head
from mesh.http.read_request import LowerHeaders, ParsedRequest
from schemas.http import H_EXPECT, H_RESIDENCY, Fault
from schemas.residency import labels_text, narrowed, parse_labels

UNREAD_BYTES = 128 * 1024  # of a body; with more, the socket is not read
CONTINUE = "100-continue"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n"
H_CONNECTION = "connection"

Query = Mapping[str, list[str]]  # the values of each parameter, in their order


@dataclass(slots=True)
class Answer:
    """What a request is answered. `headers`: all but the length and those of every answer.

    `fault`, `model`, `tenant` and `detail` are for the access log: the router's own error, what was
    requested, by whom, and why it is refused.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    fault: Fault | None = None
    model: str = ""
    tenant: str = ""
    detail: str = ""
    closes: bool = False  # the connection; nothing is read after this request


@dataclass(frozen=True, slots=True)
class Work:
    """A request for work that was read, and is to be placed."""

    parsed: ParsedRequest
    headers: LowerHeaders


class BodyBroken(Exception):
    """A body that is no chunked one, though its head says so."""


class IncomingBody:
    """A body as it comes, decoded from chunks.

    `is_whole`: all of it has come, read or not. `is_broken`: it will never be."""

    __slots__ = ("_read", "_unread", "_waiting", "is_broken", "is_whole")

    def __init__(self, read: Callable[[bool], None], *, is_whole: bool) -> None:
        """`read` is told whether to go on reading the socket."""
        self._read = read
        self._unread = bytearray()
        self._waiting: asyncio.Future[None] | None = None
        self.is_broken = False
        self.is_whole = is_whole

    # What the connection calls.

    def arrived(self, data: bytes, *, is_whole: bool) -> None:
        """More of it is here; with `is_whole`, the last."""
        self._unread += data
        self.is_whole = is_whole
        if len(self._unread) > UNREAD_BYTES and not is_whole:
            self._read(False)
        self._wake()

    def broke(self) -> None:
        """What came next is no chunk."""
        self.is_broken = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # What a handler calls.

    def taken(self) -> bytes:
        """What is here, without waiting."""
        data = bytes(self._unread)
        self._unread.clear()
        if not self.is_whole and not self.is_broken:
            self._read(True)
        return data

    @property
    def has_news(self) -> bool:
        """Whether `next` returns, or raises, at once."""
        return bool(self._unread) or self.is_whole or self.is_broken

    async def next(self) -> bytes:
        """The next bytes; empty at the end. Raises BodyBroken."""
        while not self.has_news:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if self.is_broken:
            raise BodyBroken
        return self.taken()


class RequestSocket(Protocol):
    """The connection of a request."""

    transport: asyncio.Transport
    is_last: bool  # nothing is read after this request

    async def writable(self) -> None:
        """Wait until the client has read most of what was written."""


@dataclass(slots=True, eq=False)
class HttpRequest:
    """One request. Names of headers are in lower case; `lines` has all values of each.

    `refused`: with what to answer, whatever was requested.
    """

    socket: RequestSocket
    method: str
    path: str  # decoded
    query_string: str  # as it came
    minor: int  # of the client's HTTP version
    lines: Mapping[str, list[str]]
    body: IncomingBody
    refused: RequestRefused | None = None
    caller: Caller | None = None  # None: callers are not told apart
    headers: dict[str, str] = field(init=False)  # the first value of each
    keep_alive: bool = field(init=False, default=False)  # as its answer said
    sent_bytes: int = field(init=False, default=0)  # of the answer's body
    has_begun: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.headers = {name: values[0] for name, values in self.lines.items()}

    @property
    def query(self) -> Query:
        return parse_qs(self.query_string, keep_blank_values=True)

    @property
    def length(self) -> int | None:
        """Of the body, where the client says it."""
        given = self.headers.get("content-length")
        return None if given is None else int(given)

    def waits_for_continue(self) -> bool:
        """Whether the client sends the body after a 100 only (RFC 9110, 10.1.1). Raises
        RequestRefused where it expects anything else."""
        expected = self.headers.get(H_EXPECT)
        if expected is None or self.minor == 0:
            return False
        if expected.strip().lower() != CONTINUE:
            message = f"{H_EXPECT} may be {CONTINUE}, or be left out"
            raise RequestRefused(Fault.EXPECTATION, message, H_EXPECT)
        return True

    def say_continue(self) -> None:
        """Tell a client that waits for it that the body may be sent."""
        if not self.body.is_whole:
            self.socket.transport.write(CONTINUED)

    def begin(self, answer: Answer, length: int | None = None) -> None:
        """Write the answer's head and what it has of its body. `length`: of a body that the handler
        writes itself.

        Where the answer comes before the body it is the connection's last: a client that had waited
        for "100 Continue" need not send the body, and its next request would be read as the body.
        """
        self.keep_alive = not (self.socket.is_last or answer.closes) and self.body.is_whole
        headers = dict(answer.headers)
        if answer.status >= 200 and answer.status not in (204, 304):
            headers["content-length"] = str(len(answer.body) if length is None else length)
        says_keep_alive = self.keep_alive
        if H_CONNECTION in headers:  # of 426, where it also says which header is about this hop
            headers[H_CONNECTION] += "" if self.keep_alive else ", close"
            says_keep_alive = self.minor == 1
        head = answer_head(answer.status, headers, self.minor, keep_alive=says_keep_alive)
        self.has_begun = True
        is_head = self.method == "HEAD"
        self.sent_bytes = 0 if is_head else len(answer.body)
        self.socket.transport.write(head if is_head else head + answer.body)

    async def write(self, piece: bytes) -> None:
        """Write more of the body, as fast as the client reads."""
        self.socket.transport.write(piece)
        self.sent_bytes += len(piece)
        await self.socket.writable()

    def cut(self) -> None:
        """End the connection, so that the client sees that the answer is not whole."""
        self.keep_alive = False
        self.socket.transport.abort()


Handler = Callable[[HttpRequest], Awaitable[Answer | Work]]


LABELS_PATH = "/labels/"


def with_labels(path: str, headers: dict[str, list[str]]) -> tuple[str, RequestRefused | None]:
    """`/labels/eu/v1/models` as `/v1/models` with the label eu among the headers, and what is wrong
    with it. A base URL reaches the router through gateways that leave headers out."""
    if not path.startswith(LABELS_PATH):
        return path, None
    text, _, rest = path.removeprefix(LABELS_PATH).partition("/")
    of_header = headers.get(H_RESIDENCY, ())
    if len(of_header) > 1:  # as without labels in the path: the request is refused for it
        return f"/{rest}", None
    try:
        labels = parse_labels(text)
        given = parse_labels(of_header[0]) if of_header else labels
    except ValueError as error:
        return f"/{rest}", RequestRefused(Fault.INVALID, f"labels: {error}", H_RESIDENCY)
    if not (both := narrowed(labels, given)):
        message = f"the path wants {labels_text(labels)}, {H_RESIDENCY} {labels_text(given)}"
        problem = RequestRefused(Fault.RESIDENCY, f"{message}: nothing is left", H_RESIDENCY)
        return f"/{rest}", problem
    headers[H_RESIDENCY] = [labels_text(both)]
    return f"/{rest}", None


def parsed_target(method: str, target: str) -> tuple[str, str]:
    """Path, decoded, and query of what a request's line names (RFC 9112, 3.2). Raises
    ValueError."""
    if target[:1] == "/" or (target == "*" and method == "OPTIONS"):
        path, _, query = target.partition("#")[0].partition("?")
    else:
        parts = urlsplit(target)
        if not parts.hostname:
            raise ValueError("the request's line names neither a path nor an address")
        path, query = parts.path or "/", parts.query
    try:
        return unquote(path, errors="strict"), query
    except UnicodeDecodeError:  # no path of ours; shown as it came
        return path, query
