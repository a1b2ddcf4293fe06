"""The mesh over Ollama: `make test-engines`."""

import asyncio
import functools
import json
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from schemas.http import CHAT, MODELS
from tests.engines import route_table
from tests.engines.contract import answers_at, prompt
from tests.engines.engine import MODEL
from tests.engines.mesh_over_engines import MeshOverEngines, mesh_over
from tests.engines.without_page import Ollama
from tests.engines.without_page_contract import WithoutPageContract

OTHER = "other"
# Longer than an agent waits before it looks for routes again, or for its engine to be idle.
ROUNDS, PAUSE_S, IDLE_S = 30, 1.0, 8.0
ANSWER_TOKENS = 48
SLOWER = 1.1
GOES_ROUND_TRIES = 10  # the first mostly does
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(300),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    async with mesh_over(Ollama, tmp_path_factory.mktemp("ollama")) as mesh:
        yield mesh


class TestOllama(WithoutPageContract):
    column = route_table.OLLAMA
    slow_chars = 1500  # each is a token
    left_tokens = 3500
    slow_prompts = 4  # one is done before the next heartbeat

    async def test_an_answer_that_goes_round_is_whole(self, mesh):
        """Ollama ends it after the same token 31 times, without an end and with counts of 0."""
        await mesh.until_ready()
        for replica in mesh.engines:  # each has ended a stream as promised
            await mesh.until(functools.partial(answers_at, mesh, replica), f"{replica} to answer")
        async with aiohttp.ClientSession() as http:
            for number in range(GOES_ROUND_TRIES):
                message = {"role": "user", "content": prompt(("round", number), 60)}
                asked = {"model": MODEL, "max_tokens": self.left_tokens, "messages": [message]}
                asked["temperature"] = 0
                async with http.post(mesh.url + CHAT, json=asked) as answer:
                    plain = await answer.json()
                if plain["choices"][0]["finish_reason"] is None:
                    break
            assert plain["choices"][0]["finish_reason"] is None, "none went round"
            assert plain["usage"]["total_tokens"] == 0
            async with http.post(mesh.url + CHAT, json=asked | {"stream": True}) as answer:
                events = (await answer.text()).strip().split("\n\n")
        assert not [event for event in events if "error" in event or "[DONE]" in event]
        said = [json.loads(event[5:])["choices"][0]["delta"]["content"] for event in events]
        assert len({text.strip() for text in said[-31:]}) == 1
        seen = {replica: beat.seq for replica, beat in mesh.beats.items()}
        await mesh.until(lambda: _all_newer(mesh, seen), "heartbeats from after its end")
        assert {beat.results for beat in mesh.beats.values()} == {None}


class OllamaOfTwo(Ollama):
    """Of two models one fits: the clients' is listed last, the newest first."""

    served = (MODEL, OTHER)
    layers = 3  # a token takes some 5 ms; with one layer it is faster than any that people use
    agent_options = (*Ollama.agent_options, "--speed-probe")


async def test_of_two_models_the_clients_stays_loaded_and_answers_as_fast_as_without_the_mesh(
    tmp_path,
):
    async with mesh_over(OllamaOfTwo, tmp_path, ("",)) as mesh:
        [engine] = mesh.engines.values()
        assert _loads(tmp_path) == 1  # for the first request
        urls = {"direct": engine.url, "mesh": mesh.url}
        times: dict[str, list[float]] = {name: [] for name in urls}
        async with aiohttp.ClientSession() as http:
            async with http.get(engine.url + MODELS) as answer:
                assert (await answer.json())["data"][0]["id"] == f"{OTHER}:latest"
            await asyncio.sleep(IDLE_S)
            for number in range(ROUNDS):
                for name, url in urls.items():
                    times[name].append(await _answered_in(http, url, prompt((number, name), 60)))
                await asyncio.sleep(PAUSE_S)
        for name, found in times.items():
            low, middle, high = statistics.quantiles(found, n=4)
            print(f"{name}: {middle:.3f} s ({low:.3f} to {high:.3f}), slowest {max(found):.3f} s")
        assert _loads(tmp_path) == 1
        direct, through = (statistics.median(times[name]) for name in urls)
        assert through <= SLOWER * direct


async def _answered_in(http: aiohttp.ClientSession, url: str, text: str) -> float:
    """Seconds that a chat takes."""
    asked = {"model": MODEL, "max_tokens": ANSWER_TOKENS, "stream": True}
    asked["messages"] = [{"role": "user", "content": text}]
    began = time.monotonic()
    async with http.post(url + CHAT, json=asked) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    return time.monotonic() - began


def _all_newer(mesh: MeshOverEngines, seen: dict[str, int]) -> bool:
    """Two later each: the next one may be older than the end of a stream."""
    return all(mesh.beats[replica].seq > seq + 1 for replica, seq in seen.items())


def _loads(directory: Path) -> int:
    """Of models so far, by the engine's log."""
    [log] = (directory / "logs").glob(f"{Ollama.kind}-0-*.log")
    return log.read_text().count('msg="loaded runners"')
