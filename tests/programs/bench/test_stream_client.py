"""The own client against servers that answer oddly; its good days are in test_engine."""

import asyncio
import math
from contextlib import asynccontextmanager

import pytest

from tests.programs.bench.stream_client import Plan, percentile, play
from tests.support.ports import free_ports

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'10\r\ndata: {"delta":1}\r\n'


@asynccontextmanager
async def serving(*pieces, hang_up=True):
    """A server that answers every request with these pieces, a moment apart."""

    async def answer(reader, writer):
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
            if not hang_up:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def plan(port, **changes):
    usual = {"urls": [f"127.0.0.1:{port}"], "model": "m", "prompt_tokens": 20, "events": 2}
    more = {"gap_ms": 0, "streams": 1, "each": 1, "ramp_s": 0.0, "first": 0, "within_s": 20.0}
    return Plan(**usual | more | changes)


@pytest.mark.parametrize(("events", "why"), [(2, ""), (3, "2 events instead of 3")])
async def test_an_event_that_straddles_two_reads_counts_once(events, why):
    pieces = (HEAD, EVENT, EVENT[:12], EVENT[12:], b"0\r\n\r\n")
    async with serving(*pieces) as port:
        seen = await play(plan(port, events=events))
    assert (seen.answered, seen.why) == (int(not why), why)


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n",), "503"),
        ((HEAD + EVENT,), "closed"),
        ((HEAD + EVENT, b"0\r\n\r\n"), "1 events instead of 2"),
    ],
)
async def test_failures_are_counted_with_their_reason(pieces, why):
    async with serving(*pieces) as port:
        seen = await play(plan(port, each=3))
    assert (seen.answered, seen.failed) == (0, 3)
    assert why in seen.why


async def test_a_silent_server_is_not_waited_for_for_ever():
    async with serving(HEAD, hang_up=False) as port:
        seen = await play(plan(port, within_s=0.3))
    assert (seen.answered, seen.failed) == (0, 1)
    assert "not through" in seen.why
    assert math.isnan(seen.ttft_p50_ms)


async def test_a_refused_connection_has_failed():
    seen = await play(plan(free_ports(1)[0], streams=2))
    assert (seen.answered, seen.failed) == (0, 2)
    assert "refused" in seen.why.lower() or "connect" in seen.why.lower()


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (99, 4.0), (1, 1.0)])
def test_percentiles_are_values_that_were_seen(percent, value):
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value


def test_nothing_has_no_percentile():
    assert math.isnan(percentile([], 50))
