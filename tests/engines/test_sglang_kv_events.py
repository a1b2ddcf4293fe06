"""The mesh follows the KV events of a real SGLang, and has it load LoRA adapters:
`make test-engines`."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from tests.engines import install, tiny_lora
from tests.engines.engine import MODEL
from tests.engines.kv_events_contract import (
    NAME,
    Followed,
    KvEventsContract,
    followed,
    predicted_and_cached,
)
from tests.engines.sglang_server import START_WITHIN_S, PublishingSglang
from tests.engines.tiny_llama import SHAPE
from tests.programs.bench import tiny_model
from tests.programs.bench.processes import output_of

ADAPTERS = ("sql", "law", "med")
LOADED = 2
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(3 * START_WITHIN_S),
]


class SmallSglang(PublishingSglang):
    cache_tokens = 5_120
    more = (
        *("--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "4"),
        *("--max-lora-rank", str(tiny_lora.RANK), "--lora-target-modules", tiny_lora.MODULE),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Followed]:
    folder = tmp_path_factory.mktemp("kv")
    python = str(install.programs(install.SGLANG) / "python")
    shape = (str(SHAPE["hidden_size"]), str(tiny_model.CONFIG["num_hidden_layers"]))
    await output_of(
        (python, tiny_lora.__file__, str(folder / "lora"), *shape, *ADAPTERS), within_s=60.0
    )
    known = [
        option for name in ADAPTERS for option in ("--adapter", f"{name}={folder}/lora/{name}")
    ]
    options = (*known, "--load-adapters", str(LOADED))
    async with followed(SmallSglang, folder, *options) as mesh:
        yield mesh


async def said(mesh: Followed, model: str) -> str:
    body = {"model": model, "prompt": "Where are you?", "max_tokens": 8, "temperature": 0}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{mesh.url}/v1/completions", json=body | {"ignore_eos": True}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["text"]


class TestSglangKvEvents(KvEventsContract):
    async def test_an_adapter_is_loaded_when_asked_for_and_the_one_used_last_makes_room(self, mesh):
        first = [await said(mesh, model) for model in (MODEL, *ADAPTERS)]
        assert len({*first}) == len(first)
        listed = {name for name in ADAPTERS if name in await _listed(mesh)}
        assert listed == set(ADAPTERS[-LOADED:])
        assert [await said(mesh, model) for model in (MODEL, *ADAPTERS)] == first

    async def test_what_an_adapter_has_cached_is_not_predicted_for_the_model(self, mesh):
        asked = {"model": ADAPTERS[0]}
        await predicted_and_cached(mesh, 4, **asked)
        await mesh.until(lambda: bool(mesh.held), "the prompt to be reported")
        predicted, cached = await predicted_and_cached(mesh, 4)
        assert predicted <= 64 and cached <= 64
        predicted, cached = await predicted_and_cached(mesh, 4, **asked)
        assert cached > 300 and abs(predicted - cached) <= 0.25 * cached


async def _listed(mesh: Followed) -> set[str]:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{mesh.engines[NAME].url}/v1/models") as answer,
    ):
        return {row["id"] for row in (await answer.json())["data"]}
