"""The engine in this process, over real sockets, asked as routers and as the own client ask."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.programs.bench.engine import Connection, number
from tests.programs.bench.request_bodies import request_body
from tests.programs.bench.stream_client import Plan, play
from tests.support.until import until

TRIES = 5


@asynccontextmanager
async def engine():
    loop = asyncio.get_running_loop()
    Connection.batches.clear()  # they belong to a loop
    there = set()

    class Watched(Connection):
        def connection_made(self, transport):
            there.add(self)
            super().connection_made(transport)

        def connection_lost(self, problem):
            there.remove(self)
            super().connection_lost(problem)

    async with await loop.create_server(Watched, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await until(lambda: not there)  # or a later test fails for what was left open


def plan(url, **changes):
    usual = {"urls": [url], "model": "tiny", "prompt_tokens": 200, "events": 8, "gap_ms": 20}
    more = {"streams": 3, "each": 2, "ramp_s": 0.0, "first": 0, "within_s": 20.0}
    return Plan(**usual | more | changes)


@pytest.mark.parametrize("tokens", [50, 100_000])
async def test_a_plain_request_is_answered(tokens):
    async with engine() as url, aiohttp.ClientSession() as http:
        for _ in range(2):  # on one connection
            body = request_body(tokens, 0, 0).body(1)
            async with http.post(f"http://{url}/v1/chat/completions", data=body) as answer:
                assert answer.status == 200
                assert (await answer.json())["usage"]["total_tokens"] == 60


async def test_a_stream_has_the_requested_events_and_pace():
    """In one of a few tries: events that the machine lets wait are read together."""
    gaps_ms = []
    while not gaps_ms or gaps_ms[-1] != pytest.approx(20.0, abs=15.0):
        assert len(gaps_ms) < TRIES, gaps_ms
        async with engine() as url:
            seen = await play(plan(url))
        assert (seen.answered, seen.failed, seen.why) == (6, 0, "")
        assert seen.ttft_p50_ms >= 19.0
        assert Connection.running == 0
        gaps_ms.append(seen.gap_p50_ms)


async def test_streams_of_one_pace_share_steps_but_for_those_that_are_out_of_step():
    for in_step, shared in ((True, {20: 1}), (False, {})):
        async with engine() as url:
            seen = await play(plan(url, in_step=in_step))
            assert (seen.answered, seen.failed) == (6, 0)
            assert dict.fromkeys(Connection.batches, 1) == shared
            assert seen.ttft_p50_ms >= 19.0
            assert seen.gap_p50_ms >= 5.0


async def test_an_event_stream_is_one_to_others_too():
    body = request_body(50, 3, 0).body(1).replace(b"max_tokens", b"max_completion_tokens")
    async with (
        engine() as url,
        aiohttp.ClientSession() as http,
        http.post(f"http://{url}/v1/chat/completions", data=body) as answer,
    ):
        lines = (await answer.text()).split("\n\n")
    assert sum('"delta"' in line for line in lines) == 3
    assert lines[-2:] == ["data: [DONE]", ""]


async def test_who_hangs_up_is_not_counted_as_running():
    async with engine() as url, aiohttp.ClientSession() as http:
        body = request_body(50, 1000, 20).body(1)
        async with http.post(f"http://{url}/v1/chat/completions", data=body) as answer:
            await answer.content.readline()
            async with http.get(f"http://{url}/metrics") as page:
                assert 'running{model_name="tiny"} 1' in await page.text()
            answer.close()
        async with asyncio.timeout(20.0):
            while Connection.running:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 200),
        ("GET", "/nowhere", None, 404),
        ("POST", "/v1/chat/completions", b'{"stream":true}', 400),
        ("POST", "/v1/chat/completions/render", b'{"stream":true,"max_tokens":9}', 404),
    ],
)
async def test_unsupported_requests_are_errors(method, path, body, status):
    async with (
        engine() as url,
        aiohttp.ClientSession() as http,
        http.request(method, f"http://{url}{path}", data=body) as answer,
    ):
        assert answer.status == status


@pytest.mark.parametrize(
    ("body", "found"),
    [(b'{"a": 12}', 12), (b'{"b":3}', 3), (b'{"b":3,"a":4}', 4), (b'{"a":"x"}', 0), (b"", 0)],
)
def test_a_number_is_found_in_the_first_field_that_has_one(body, found):
    assert number(body, b"a", b"b") == found
