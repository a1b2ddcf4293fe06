"""The access log: one line for each request that has ended, as logfmt or JSON.

A value that a client or a peer chose may hold anything, and a reader takes a line for a request:
what is not printable ASCII, and what would end a value, is escaped, and no value is longer than
VALUE_CHARS_MAX. A line holds no prompt, no key and no query.

Lines go to a file descriptor by a thread, because a pipe that nobody reads blocks its writer, and
a second's together, because waking that thread costs as much CPU time as forty lines.
Meanwhile they wait in memory, up to WAITING_BYTES_MAX; what comes then is lost, and a line says how
many.
"""

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _escaped
from math import floor, inf
from queue import Empty, SimpleQueue
from stat import S_ISREG
from typing import Any

import orjson

from mesh.session.record import Ending
from schemas.decision import Decision
from schemas.http_statuses import INVALID

log = logging.getLogger(__name__)

WAITING_BYTES_MAX = 8 * 1024 * 1024
# PIPE_BUF: lines of several processes on one pipe stay whole. Elsewhere all are written at once:
# after each write the thread has to wait for the event loop's, which costs both a switch.
WRITE_BYTES = 4096
WRITE_S = 1.0
LINES_TOGETHER = 256  # put into words in one turn of the event loop, which must stay short
CLOSE_S = 1.0  # for what waits at the end
RETRY_S = 0.02  # of a descriptor that some other process made non-blocking
VALUES_CACHED = 4096
VALUE_CHARS_MAX = 256
STDOUT = 1
REFUSED = "refused"

_is_bare = re.compile(r"[!#-<>-\[\]-~]+").fullmatch  # without quote, equals sign and backslash


class AccessLogFormat(StrEnum):
    """How the access log is written."""

    LOGFMT = "logfmt"
    JSON = "json"
    OFF = "off"


def quoted_once(text: str) -> str:
    """A value as logfmt has it: in quotes, escaped as in JSON, where it is not plain."""
    text = text[:VALUE_CHARS_MAX]
    return text if _is_bare(text) else _escaped(text).replace("\x7f", "\\u007f")


def shown_outcome(outcome: str, status: int) -> str:
    """Of an engine's 4xx, which the mesh passed on as it should: it refused the request."""
    return REFUSED if outcome == "ok" and status >= INVALID else outcome


@lru_cache(VALUES_CACHED)  # the same for most requests
def _about(
    method: str,
    route: str,
    model: str,
    asked: str,
    is_copy: bool,
    tenant: str,
    origin: str,
    outcome: str,
    status: int,
) -> str:
    named = {"method": method, "route": route, "model": model, "asked_model": asked}
    named |= {"shadow": "1" if is_copy else "", "tenant": tenant, "origin": origin}
    about = "".join(f" {name}={quoted_once(value)}" for name, value in named.items() if value)
    outcome = shown_outcome(outcome, status)
    return f"{about} outcome={outcome}" + (f" status={status}" if status else "")


@lru_cache(VALUES_CACHED)
def _served_by(
    region: str, replica: str, prefill: str | None, placement: str, hops: int, attempts: int
) -> str:
    served = f" region={quoted_once(region)} replica={quoted_once(replica)}" if region else ""
    served += f" prefill_replica={quoted_once(prefill)}" if prefill else ""
    return f"{served} placement={placement} hops={hops} attempts={attempts}"


def _unusual(fault: str, detail: str, trace: str, peer_held_s: float) -> str:
    held = f"{peer_held_s:.3f}" if peer_held_s > 0.0 else ""
    named = {"error": fault, "detail": detail, "trace": trace, "peer_held_s": held}
    return "".join(f" {name}={quoted_once(value)}" for name, value in named.items() if value)


def _tokens(*counts: int) -> str:
    named = zip(("tokens_in", "tokens_cached", "tokens_out"), counts, strict=True)
    return "".join([f" {name}={count}" for name, count in named if count >= 0])


class AccessLog:
    """`write` puts a request down; `open` it on the event loop first, `close` it at last. Where
    some wait already, appending to `waiting` is the same.

    Requests are put into words when their lines are written, up to LINES_TOGETHER in one turn of
    the event loop.
    """

    def __init__(
        self,
        where: str,
        style: AccessLogFormat = AccessLogFormat.LOGFMT,
        descriptor: int = STDOUT,
        wall_clock: Callable[[], float] = time.time,
        every_s: float = WRITE_S,
    ) -> None:
        """`where`: the router, as `us/r1`."""
        self._every_s = every_s
        self._where, self._wall_clock = where, wall_clock
        self._words = self._json if style is AccessLogFormat.JSON else self._logfmt
        self.waiting: list[Ending] = []
        self._writer = LineWriter(descriptor)
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer.start()

    async def close(self) -> None:
        """Write what waits, within CLOSE_S; what comes later is not written."""
        if self._loop is not None:
            while self.waiting:
                self.pass_on()
            self._loop = None
            await asyncio.to_thread(self._writer.close)

    def write(self, ended: Ending) -> None:
        if not self.waiting:
            if self._loop is None:
                return
            self._loop.call_later(self._every_s, self.pass_on)
        self.waiting.append(ended)

    def pass_on(self) -> None:
        """Have what waits written: up to LINES_TOGETHER now, the rest in the next turns."""
        if self.waiting and self._loop is not None:
            first = self.waiting[:LINES_TOGETHER]
            del self.waiting[:LINES_TOGETHER]
            self._writer.put(self._words(first, self._wall_clock() - self._loop.time()))
            if self.waiting:
                self._loop.call_soon(self.pass_on)

    def _logfmt(self, waiting: Iterable[Ending], wall_s: float) -> list[str]:
        """`wall_s`: what the event loop's clock lacks to the time of day. The first to end is the
        first of those that wait."""
        lines, where, second, second_at = [], self._where, "", -inf
        for one in waiting:
            ended_at, request, decided, region = one.ended_at, one.request, one.decided, one.region
            if ended_at - second_at >= 1.0:
                second_s = floor(ended_at + wall_s)
                second, second_at = _second(second_s), second_s - wall_s
            name = request if _is_bare(request) else quoted_once(request)
            placed = more = tokens = ""
            if decided is not None:
                made = decided.decision
                held = f"{made.held_s:.3f}" if made.held_s else "0.000"
                served = _served_by(
                    region, one.replica, made.prefill, made.placement, made.hops, made.attempt
                )
                reason = _escaped(made.reason[:VALUE_CHARS_MAX])
                placed = f"{served} held_s={held} reason={reason}"
            elif region:
                placed = f" region={quoted_once(region)} replica={quoted_once(one.replica)}"
            if one.fault or one.detail or one.peer_held_s:
                more = _unusual(one.fault, one.detail, one.trace, one.peer_held_s)
            elif one.trace:
                more = f" trace={one.trace}"
            if one.is_stream and one.started_at is not None:
                more += f" ttft_s={one.started_at - one.arrived_at:.3f}"
            prompt, cached, output, _ = one.numbers
            if prompt >= 0 and cached >= 0 and output >= 0:
                tokens = f" tokens_in={prompt} tokens_cached={cached} tokens_out={output}"
            elif prompt >= 0 or output >= 0:
                tokens = _tokens(prompt, cached, output)
            about = _about(
                one.method, one.route, one.model, one.asked, one.is_copy, one.tenant, one.origin,
                one.outcome, one.status,
            )  # fmt: skip
            lines.append(
                f"ts={second}.{int((ended_at - second_at) * 1000.0):03d}Z router={where} id={name}"
                f"{about}{placed}{more}{tokens} duration_s={ended_at - one.arrived_at:.3f} "
                f"bytes={one.sent_bytes}\n"
            )
        return lines

    def _json(self, waiting: Iterable[Ending], wall_s: float) -> list[str]:
        named = (fields(one, _time(one.ended_at + wall_s), self._where) for one in waiting)
        return [orjson.dumps(one).decode() + "\n" for one in named]


@lru_cache(2)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _time(at: float) -> str:
    second = floor(at)
    return f"{_second(second)}.{int((at - second) * 1000.0):03d}Z"


def fields(one: Ending, ts: str, where: str) -> dict[str, Any]:
    """What a line says, by name."""
    decision: Decision | None = None if one.decided is None else one.decided.decision
    prompt, cached, output, _ = one.numbers
    named = {
        "ts": ts,
        "router": where,
        "id": plain(one.request),
        "trace": one.trace,
        "method": plain(one.method),
        "route": plain(one.route),
        "outcome": shown_outcome(one.outcome, one.status),
        "status": one.status or None,
        "error": one.fault,
        "model": plain(one.model),
        "asked_model": plain(one.asked),
        "shadow": 1 if one.is_copy else None,
        "tenant": one.tenant,
        "origin": one.origin,
        "region": plain(one.region),
        "replica": plain(one.replica),
        **({} if decision is None else _placed(decision)),
        "peer_held_s": _milliseconds(one.peer_held_s) if one.peer_held_s > 0.0 else None,
        "ttft_s": (
            _milliseconds(one.started_at - one.arrived_at)
            if one.is_stream and one.started_at is not None
            else None
        ),
        "duration_s": _milliseconds(one.ended_at - one.arrived_at),
        "tokens_in": prompt if prompt >= 0 else None,
        "tokens_cached": cached if cached >= 0 else None,
        "tokens_out": output if output >= 0 else None,
        "detail": plain(one.detail),
        "bytes": one.sent_bytes,
    }
    return {name: value for name, value in named.items() if value not in (None, "")}


def _placed(decision: Decision) -> dict[str, Any]:
    return {
        "placement": decision.placement.value,
        "hops": decision.hops,
        "attempts": decision.attempt,
        "prefill_replica": decision.prefill and plain(decision.prefill),
        "held_s": _milliseconds(decision.held_s),
        "reason": plain(decision.reason),
    }


def plain(text: str) -> str:
    """Bounded, and without the lone surrogates that a header's bytes may have become."""
    return text[:VALUE_CHARS_MAX].encode("utf-8", "backslashreplace").decode()


def _milliseconds(seconds: float) -> float:
    return round(seconds, 3)


class LineWriter:
    """Writes lines in a thread of its own."""

    def __init__(self, descriptor: int, waiting_bytes_max: int = WAITING_BYTES_MAX) -> None:
        self._descriptor = descriptor
        self.waiting_bytes_max = waiting_bytes_max
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._put_bytes = self._written_bytes = 0  # each is changed by one thread
        self._lost = 0
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="access log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_S)  # it is a daemon: one that can't write does not hold the end up

    def put(self, lines: list[str]) -> None:
        """Have these written; those for which there is no room are lost."""
        if self._is_broken:
            return
        data = "".join(lines).encode()
        if self._put_bytes - self._written_bytes + len(data) > self.waiting_bytes_max:
            self._lost += len(lines)
            return
        if self._lost:
            data += f"access_log_lost={self._lost}\n".encode()
            self._lost = 0
        self._put_bytes += len(data)
        self._queue.put(data)

    def _run(self) -> None:
        try:
            # Not of a file: other processes may write there too, and large writes of theirs mix.
            in_parts = not S_ISREG(os.fstat(self._descriptor).st_mode)
            while (data := self._queue.get()) is not None:
                for part in parts(data) if in_parts else (data,):
                    self._write(part)
                self._written_bytes += len(data)
        except OSError as error:
            self._is_broken = True
            log.warning("the access log ended, the router goes on: %s", error)
            self._forget()

    def _forget(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except Empty:
            pass

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                time.sleep(RETRY_S)


def parts(data: bytes) -> list[bytes]:
    """Whole lines, together at most WRITE_BYTES where they are no longer than that."""
    found, start = [], 0
    while len(data) - start > WRITE_BYTES:
        end = data.rfind(b"\n", start, start + WRITE_BYTES) + 1
        if end <= start:
            end = data.find(b"\n", start) + 1 or len(data)
        found.append(data[start:end])
        start = end
    return [*found, data[start:]] if start < len(data) else found
