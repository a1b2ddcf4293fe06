"""A link between two regions is cut under real requests: nothing is lost, and it heals.

Three nats-servers in containers, a router, an agent and a simulated engine for each, and the
OpenAI SDK as client. `HOME` is served in every region, `ABROAD` in eu and ap only, so that a
client of us who asks for it must be answered from another region.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
import openai
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.containers.leaf_mesh import LeafMesh, running_leaf_mesh
from tests.containers.stack import Stack

pytestmark = [
    pytest.mark.containers,
    pytest.mark.drill,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

HOME, ABROAD = "test/home", "test/abroad"
MODELS = {"us": (HOME,), "eu": (HOME, ABROAD), "ap": (HOME, ABROAD)}
WORDS = 8
CHANGE_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 30.0
POLL_S = 0.05
HOME_TRIES = 5


class Answer(NamedTuple):
    """A whole answer, and the router's receipt of its placement."""

    chunks: int
    finish: str | None
    decision: dict[str, Any]


class Clients:
    """What tests do to a mesh from outside, and see of it."""

    def __init__(self, leaf_mesh: LeafMesh, stack: Stack, http: aiohttp.ClientSession) -> None:
        self.leaf_mesh = leaf_mesh
        self._stack = stack
        self._http = http

    async def ask(self, region: str, model: str) -> Answer:
        """Stream one chat completion from a region's endpoint."""
        async with openai.AsyncOpenAI(
            base_url=f"{self._stack.routers[region]}/v1",
            api_key="none",
            max_retries=0,
            timeout=ANSWER_TIMEOUT_S,
        ) as client:
            response = await client.chat.completions.with_raw_response.create(
                model=model,
                messages=[{"role": "user", "content": "How far is it?"}],
                max_tokens=WORDS,
                stream=True,
                extra_headers={"x-mesh-debug": "1"},
            )
            choices = [choice async for chunk in response.parse() for choice in chunk.choices]
        contents = [choice for choice in choices if choice.delta.content]
        decision = json.loads(response.headers["x-mesh-decision"])
        return Answer(len(contents), choices[-1].finish_reason, decision)

    async def hang(self, region: str, what: str) -> None:
        """Let a region's engine stand still: `engine` for tokens, `server` for everything."""
        url = f"{self._stack.engines[region]}/sim/faults"
        async with self._http.post(url, json={"hang": what}) as response:
            response.raise_for_status()

    async def until_free(self, peer: str, replicas: int) -> None:
        """Wait until the router of us has heard so many free replicas of a peer."""
        await self._until("mesh_peer_replicas_free", replicas, peer=peer)

    async def placed_by(self, peer: str) -> float:
        """How many requests of us a peer has said to have handed to a replica."""
        return await self._metric("mesh_forwards_total", peer=peer, result="placed")

    async def until_placed_by(self, peer: str, requests: float) -> None:
        """Wait until it has said so of so many."""
        await self._until("mesh_forwards_total", requests, peer=peer, result="placed")

    async def _until(self, name: str, value: float, **labels: str) -> None:
        async with asyncio.timeout(CHANGE_TIMEOUT_S):
            while True:
                if await self._metric(name, **labels) == value:
                    return
                await asyncio.sleep(POLL_S)

    async def _metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with that name and these labels, at the router of us."""
        async with self._http.get(f"{self._stack.routers['us']}/metrics") as response:
            text = await response.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    directory = tmp_path_factory.mktemp("cut_link")
    with running_leaf_mesh(directory) as leaf_mesh:
        stack = Stack(leaf_mesh, directory)
        try:
            async with asyncio.TaskGroup() as starting:
                for region, models in MODELS.items():
                    starting.create_task(stack.start(region, models))
            async with aiohttp.ClientSession() as http:
                clients = Clients(leaf_mesh, stack, http)
                for peer in ("eu", "ap"):
                    await clients.until_free(peer, 1)
                yield clients
        finally:
            await stack.stop()
        assert not stack.deaths, stack.deaths


def assert_whole(answer: Answer) -> None:
    assert (answer.chunks, answer.finish) == (WORDS, "length"), answer


async def assert_answered_at_home(clients: Clients, region: str) -> None:
    """In one of a few tries: a replica is passed over while its heartbeat is 0.3 s late."""
    answers = []
    while not answers or answers[-1].decision["placement"] != "local":
        assert len(answers) < HOME_TRIES, answers
        answers.append(await clients.ask(region, HOME))
        assert_whole(answers[-1])
    assert answers[-1].decision["hops"] == 0


@pytest.mark.parametrize("region", MODELS)
async def test_a_region_answers_its_own_clients(clients, region):
    await assert_answered_at_home(clients, region)


async def test_a_request_crosses_to_the_region_that_can_answer_it(clients):
    answer = await clients.ask("us", ABROAD)
    assert_whole(answer)
    assert (answer.decision["placement"], answer.decision["hops"]) == ("peer", 1)
    assert answer.decision["peer"] in ("eu", "ap")


async def test_a_cut_link_loses_no_request_and_heals(clients):
    # Only eu can take it, and eu's engine does not begin to answer.
    await clients.hang("ap", "server")
    await clients.until_free("ap", 0)
    await clients.hang("eu", "engine")
    placed = await clients.placed_by("eu")
    asked = asyncio.create_task(clients.ask("us", ABROAD))
    await clients.until_placed_by("eu", placed + 1)
    await clients.hang("ap", "off")
    await clients.until_free("ap", 1)

    clients.leaf_mesh.cut("us", "eu")
    placed_again = await asked
    assert_whole(placed_again)
    assert (placed_again.decision["peer"], placed_again.decision["attempt"]) == ("ap", 2)

    await clients.hang("eu", "off")
    for region in MODELS:
        await assert_answered_at_home(clients, region)
    assert (await clients.ask("us", ABROAD)).decision["peer"] == "ap"

    clients.leaf_mesh.mend("us", "eu")
    await clients.until_free("eu", 1)
    await clients.hang("ap", "server")
    await clients.until_free("ap", 0)
    healed = await clients.ask("us", ABROAD)
    assert_whole(healed)
    assert healed.decision["peer"] == "eu"
