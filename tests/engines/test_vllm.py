"""The mesh over vLLM on the CPU, and the simulated engine beside it: `make test-engines`."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from agents.sim.engine import EngineSim
from agents.sim.events import PrefillFinished, SimRequest
from agents.sim.kv_cache import block_keys
from agents.sim.profiles import L4_LLAMA
from tests.engines import cached_tokens, coding_agent, install, probed_speed, route_table, routes
from tests.engines.contract import (
    KEYS,
    CodingAgentContract,
    GoesOnContract,
    KeyedEngineContract,
)
from tests.engines.mesh_over_engines import MeshOverEngines, mesh_over
from tests.engines.tiny_llama import KV_BYTES_PER_TOKEN
from tests.engines.vllm_server import BLOCK_TOKENS, ENVIRONMENT, KV_GIB, START_WITHIN_S, Vllm
from tests.programs.bench.processes import output_of

BATCH_TOKENS = 256

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(2 * START_WITHIN_S),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    async with mesh_over(Vllm, tmp_path_factory.mktemp("vllm"), KEYS) as mesh:
        yield mesh


class TestVllm(KeyedEngineContract, CodingAgentContract, GoesOnContract):
    column = route_table.VLLM
    begin_alike = (True, True, True, True)

    async def test_the_heartbeat_knows_how_much_its_cache_holds(self, mesh):
        assert mesh.beats["us-0"].kv_capacity_tokens == KV_GIB * 1024**3 // KV_BYTES_PER_TOKEN

    async def test_a_probe_finds_its_speed(self, mesh):
        await probed_speed.check(mesh)


# As Qwen's, in what it takes.
SYSTEM_FIRST = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
)


async def test_system_turns_that_a_template_takes_first_alone_are_expected_where_they_go(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(SYSTEM_FIRST)

    class StrictVllm(Vllm):
        more = ("--chat-template", str(template))

    async with mesh_over(StrictVllm, tmp_path, ("",)) as mesh:
        await mesh.until(lambda: mesh.beats["us-0"].system_first, "the agent to know the template")
        _, *later = await coding_agent.asked(mesh, "strict")
        coding_agent.check(later)
        again, moved, after, other = later
        assert moved.cached < again.cached < after.cached
        assert other.cached > coding_agent.WITHIN


class EmbeddingVllm(Vllm):
    more = ("--runner", "pooling", "--convert", "embed")


async def test_the_routes_of_an_embedding_model_are_those_of_the_table(tmp_path):
    async with mesh_over(EmbeddingVllm, tmp_path, ("",)) as mesh:
        route_table.check(route_table.EMBEDDING_VLLM, await routes.found(mesh))


def prompt(start: int, tokens: int) -> list[int]:
    """Token ids of the model's vocabulary; other starts, other first blocks."""
    return [5 + (start * 37 + at * 13) % 200 for at in range(tokens)]


COMMON = prompt(7, 300)
TOGETHER = [
    *([prompt(tokens, tokens)] * 2 for tokens in (100, 320, 1000)),
    [COMMON + prompt(8, 200), COMMON + prompt(9, 200), COMMON + prompt(10, 20)],
]


def simulated(prompts: list[list[int]]) -> list[int]:
    """Cached tokens of each prompt in the simulated engine, all of them sent at one moment."""
    profile = replace(L4_LLAMA, batch_tokens=BATCH_TOKENS, arrival_s=1.0)
    engine = EngineSim(profile, block_tokens=BLOCK_TOKENS)
    for number, ids in enumerate(prompts):
        keys = block_keys(b"".join(one.to_bytes(2, "big") for one in ids), 2 * BLOCK_TOKENS)
        engine.submit(SimRequest(number, len(ids), cached_tokens.ANSWER_TOKENS, keys), 0.0)
    found = {}
    while engine.wake_at is not None:
        for event in engine.step(engine.wake_at).events:
            if isinstance(event, PrefillFinished):
                found[event.request_id] = event.cached_tokens
    return [found[number] for number in range(len(prompts))]


async def test_the_simulated_engine_finds_cached_what_vllm_does_of_prompts_sent_together():
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    output = await output_of(
        (
            *("env", *(f"{name}={value}" for name, value in environment.items())),
            *(str(install.programs(install.VLLM) / "python"), "-m", cached_tokens.__name__),
            *(str(install.llama()), str(BATCH_TOKENS), str(BLOCK_TOKENS)),
        ),
        given=json.dumps(TOGETHER).encode(),
        within_s=START_WITHIN_S,
    )
    found = json.loads(output.splitlines()[-1])
    assert found == [[0, 96], [0, 288], [0, 992], [0, 288, 288]]
    assert found == [simulated(prompts) for prompts in TOGETHER]
