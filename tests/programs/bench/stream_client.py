"""Many streams at once, and when each of their events arrived: a client of this bench's own.

    python -m tests.programs.bench.stream_client < plan.json

Clients that others wrote don't hold a thousand streams beside what they measure on two cores; this
one spends a few microseconds on an event. It reads no JSON: an event is what has a `"delta"`, and
its time is that of the read that brought it. Connections are kept for the next stream, as
clients do. Streams begin spread over `ramp_s`.

`acks_at_once`: a kernel acknowledges small reads up to 40 ms later, and a server whose sockets lack
TCP_NODELAY holds its next small write until then. Both are as found by default; with this, each
read is acknowledged at once (TCP_QUICKACK, which the kernel forgets and which is set anew each
time), which shows what such a server would do without the wait.
"""

import asyncio
import math
import socket
import sys
import time
from array import array
from collections.abc import Sequence

import uvloop
from pydantic import BaseModel, ConfigDict, Field

from tests.programs.bench.request_bodies import RequestBody, request_body

EVENT, END = b'"delta"', b"0\r\n\r\n"
WHY_CHARS = 200


class Plan(BaseModel):
    """What to ask, of whom, and how often."""

    model_config = ConfigDict(frozen=True)
    urls: list[str] = Field(min_length=1)  # host:port; streams take turns
    model: str
    prompt_tokens: int = Field(ge=1)
    events: int = Field(ge=1)
    gap_ms: int = Field(ge=0)
    streams: int = Field(ge=1)  # at once
    each: int = Field(ge=1)  # one after another
    ramp_s: float = Field(ge=0)
    first: int = Field(ge=0)  # number of the first prompt
    acks_at_once: bool = False
    in_step: bool = True  # see `cells.Cell`
    within_s: float = Field(gt=0)


class Seen(BaseModel):
    """What came of it, in milliseconds; NaN where nothing came."""

    model_config = ConfigDict(ser_json_inf_nan="constants")
    answered: int
    failed: int
    why: str  # the first failure
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    seconds: float


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


class Stream(asyncio.Protocol):
    """One connection: asks, notes the times of events, and asks again."""

    def __init__(self, plan: Plan, ask: RequestBody, first: int) -> None:
        self._plan, self._ask, self._number = plan, ask, first
        self._left = plan.each
        self._tail = b""
        self._events = 0
        self._asked_at = self._last_at = 0.0
        self.first_tokens_s, self.gaps_s = array("d"), array("d")
        self.answered = 0
        self.why = ""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._socket = transport.get_extra_info("socket") if self._plan.acks_at_once else None
        self._post()

    def connection_lost(self, problem: Exception | None) -> None:
        if self._left:
            self._fail(f"connection closed: {problem}")

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._fail(data[:WHY_CHARS].decode(errors="replace"))
            return
        text = self._tail + data
        new = text.count(EVENT)  # the tail is too short to hold one that was counted before
        for _ in range(new):
            (self.gaps_s if self._events else self.first_tokens_s).append(now - self._last_at)
            self._events += 1
            self._last_at = now
        if text.endswith(END):
            self._finish()
        else:
            self._tail = text[1 - len(EVENT) :]

    def leave(self) -> None:
        """Hang up, whatever is still to come."""
        self._left = 0
        self._transport.close()

    def _post(self) -> None:
        body = self._ask.body(self._number)
        self._number += 1
        self._tail, self._events = b"", 0
        self._asked_at = self._last_at = time.perf_counter()
        self._transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )

    def _finish(self) -> None:
        if self._events < self._plan.events:
            self._fail(f"{self._events} events instead of {self._plan.events}")
            return
        self.answered += 1
        self._left -= 1
        if self._left:
            self._post()
        else:
            self._close()

    def _fail(self, why: str) -> None:
        """The connection is of no use any more, and so is what it still had to ask."""
        self.why = why
        self._close()

    def _close(self) -> None:
        self.leave()
        if not self.ended.done():
            self.ended.set_result(None)


async def play(plan: Plan) -> Seen:
    """Play the plan. Streams that are not through in time have failed."""
    loop = asyncio.get_running_loop()
    asked = request_body(
        plan.prompt_tokens, plan.events, plan.gap_ms, model=plan.model, in_step=plan.in_step
    )
    protocols: list[Stream] = []
    refused: list[str] = []

    async def one(number: int) -> None:
        await asyncio.sleep(plan.ramp_s * number / plan.streams)
        host, port = plan.urls[number % len(plan.urls)].rsplit(":", 1)
        first = plan.first + number * plan.each
        try:
            _, stream = await loop.create_connection(
                lambda: Stream(plan, asked, first), host, int(port)
            )
        except OSError as problem:
            refused.append(str(problem))
            return
        protocols.append(stream)
        await stream.ended

    began_at = loop.time()
    tasks = [asyncio.create_task(one(number)) for number in range(plan.streams)]
    _, late = await asyncio.wait(tasks, timeout=plan.within_s)
    for stream in protocols:
        stream.leave()
    for task in late:
        task.cancel()
    return _seen(plan, protocols, refused, loop.time() - began_at)


def _seen(plan: Plan, protocols: Sequence[Stream], refused: Sequence[str], took_s: float) -> Seen:
    firsts = [1e3 * s for stream in protocols for s in stream.first_tokens_s]
    gaps = [1e3 * s for stream in protocols for s in stream.gaps_s]
    answered = sum(stream.answered for stream in protocols)
    reasons = [stream.why for stream in protocols if stream.why] + list(refused)
    asked = plan.streams * plan.each
    if answered < asked and not reasons:
        reasons.append(f"not through in {plan.within_s:g} s")
    return Seen(
        answered=answered,
        failed=asked - answered,
        why=next(iter(reasons), ""),
        ttft_p50_ms=percentile(firsts, 50),
        ttft_p99_ms=percentile(firsts, 99),
        gap_p50_ms=percentile(gaps, 50),
        gap_p99_ms=percentile(gaps, 99),
        seconds=took_s,
    )


if __name__ == "__main__":
    seen = uvloop.run(play(Plan.model_validate_json(sys.stdin.buffer.read())))
    sys.stdout.write(seen.model_dump_json())
