"""The mesh over a prefill and a decode engine of SGLang: `make test-engines`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from schemas.state import ReplicaState
from tests.engines.contract import prompt
from tests.engines.engine import RealEngine
from tests.engines.mesh_over_engines import Asked, MeshOverEngines
from tests.engines.sglang_server import START_WITHIN_S, DecodeSglang, PrefillSglang
from tests.programs.bench.processes import Processes
from tests.support.nats_server import running_nats_server
from tests.support.router_process import router_process

PREFILL, DECODE = "us-0", "us-1"
HELD_S = 60.0  # a request that no replica can take
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(3 * START_WITHIN_S),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOverEngines]:
    folder = tmp_path_factory.mktemp("pairs")
    async with (
        running_nats_server(folder / "nats") as nats,
        router_process(folder, nats.url, workers=1) as router,
        Processes(folder / "logs", ready_within_s=START_WITHIN_S) as processes,
        AsyncExitStack() as stack,
    ):
        mesh = MeshOverEngines(router, nats.url, processes, folder)
        await mesh.listen(stack)
        prefill = PrefillSglang(processes, "prefill", folder)
        decode = DecodeSglang(processes, "decode", folder)
        mesh.engines |= {PREFILL: prefill, DECODE: decode}
        await asyncio.gather(prefill.start(), decode.start())
        options = ("--kv-transfer", "sglang", "--kv-address", prefill.kv_address)
        await mesh.agent(PREFILL, prefill, "--role", "prefill", *options)
        await mesh.agent(DECODE, decode, "--role", "decode", *options[:2])
        await router.until_serves(0)
        await mesh.until(lambda: is_answered(mesh), "an answer of the pair")
        yield mesh


async def is_answered(mesh: MeshOverEngines) -> bool:
    return (await mesh.ask("Who is there?", 2, within_s=20.0)).whole


def pair_of(asked: Asked) -> tuple[str | None, str | None]:
    """Who computed the prompt, and who the answer."""
    assert asked.whole, asked
    return asked.decision.prefill, asked.replica


async def test_prompts_are_computed_by_one_and_answers_by_the_other(mesh):
    asked = await asyncio.gather(*(mesh.ask(prompt(n, 400), 12) for n in range(12)))
    assert {pair_of(one) for one in asked} == {(PREFILL, DECODE)}
    assert {one.stream.usage.output_tokens for one in asked} == {12}
    again = await mesh.ask(prompt(0, 400), 12)
    assert pair_of(again) == (PREFILL, DECODE)


async def test_both_end_what_its_client_leaves(mesh):
    asked = Asked()
    going = asyncio.create_task(mesh.ask(prompt("left", 400), 2000, into=asked))
    await mesh.until(lambda: asked.begun, "a first chunk")
    going.cancel()
    for engine in mesh.engines.values():
        await mesh.until(lambda engine=engine: _is_idle(engine), f"{engine.name} to be idle")


async def test_without_the_prefill_engine_requests_fail_and_with_it_they_are_answered(mesh):
    await mesh.engines[PREFILL].kill()
    await mesh.until(
        lambda: mesh.beats[PREFILL].state is not ReplicaState.READY, "it to be given up"
    )
    asked = await mesh.ask("Who is there?", 2, within_s=HELD_S + 15.0)
    assert not asked.whole, asked  # 503, or an error event: after 10 s comments keep it alive
    await mesh.engines[PREFILL].start()
    await mesh.until(lambda: is_answered(mesh), "an answer of the pair")


async def _is_idle(engine: RealEngine) -> bool:
    found = await engine.counts()
    return found.running == 0 and found.waiting == 0
