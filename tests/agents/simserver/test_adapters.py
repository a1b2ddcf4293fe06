"""A simulated engine with LoRA adapters: vLLM's calls, and nothing shared between two of them."""

import asyncio

import pytest

from tests.agents.simserver.support import MODEL, Engine, config, faults, running

WITH_ADAPTERS = config(adapters_max=2, adapter_load_s=0.0)
LONG = "one two three four five six seven eight " * 40


async def call(engine: Engine, what: str, name: str) -> tuple[int, str]:
    body = {"lora_name": name, "lora_path": f"/adapters/{name}"}
    async with engine.http.post(f"{engine.url}/v1/{what}_lora_adapter", json=body) as response:
        return response.status, await response.text()


async def rows(engine: Engine) -> dict[str, dict]:
    async with engine.http.get(f"{engine.url}/v1/models") as response:
        return {row["id"]: row for row in (await response.json())["data"]}


async def asked(engine: Engine, model: str) -> tuple[int, dict]:
    body = {"model": model, "prompt": LONG, "max_tokens": 8}
    return await engine.post("/v1/completions", body)


async def test_an_adapter_is_a_model_with_a_parent_while_it_is_loaded() -> None:
    async with running(WITH_ADAPTERS) as engine:
        status, problem = await asked(engine, "sql")
        assert (status, problem["error"]["code"]) == (404, "model_not_found")
        assert (await call(engine, "load", "sql"))[0] == 200
        row = (await rows(engine))["sql"]
        assert (row["parent"], row["root"]) == (MODEL, "/adapters/sql")
        assert (await asked(engine, "sql"))[0] == 200
        assert (await call(engine, "unload", "sql"))[0] == 200
        assert "sql" not in await rows(engine)
        assert (await asked(engine, "sql"))[0] == 404


async def test_what_it_refuses() -> None:
    async with running(WITH_ADAPTERS) as engine:
        assert (await call(engine, "unload", "a"))[0] == 404
        assert (await call(engine, "load", "a"))[0] == 200
        status, text = await call(engine, "load", "a")
        assert status == 400 and "already been loaded" in text
        assert (await call(engine, "load", "b"))[0] == 200
        status, text = await call(engine, "load", "c")
        assert status == 400 and "unload one first" in text
    async with running(config()) as plain:
        assert (await call(plain, "load", "a"))[0] == 404


async def test_two_loads_of_one_name_at_a_time_are_one_and_an_error() -> None:
    async with running(config(adapters_max=2, adapter_load_s=10.0)) as engine:  # 0.2 s of the wall
        both = await asyncio.gather(call(engine, "load", "a"), call(engine, "load", "a"))
        assert sorted(status for status, _ in both) == [200, 400]
        assert "a" in await rows(engine)


async def test_a_failed_load_leaves_its_place_free() -> None:
    settings = config(adapters_max=1, adapter_load_s=0.0, faults=faults(adapter_loads_fail=True))
    async with running(settings) as engine:
        assert (await call(engine, "load", "a"))[0] == 404
        async with engine.http.delete(f"{engine.url}/sim/faults"):
            pass
        assert (await call(engine, "load", "b"))[0] == 200


async def test_two_adapters_share_neither_prefixes_nor_answers() -> None:
    async with running(WITH_ADAPTERS) as engine:
        texts = []
        for name in ("a", "b"):
            await call(engine, "load", name)
        for model in (MODEL, "a", "b"):
            for is_second in (False, True):
                _, body = await asked(engine, model)
                cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert bool(cached) is is_second, model
                assert body["model"] == model
            texts.append(body["choices"][0]["text"])
        assert len(set(texts)) == 3


@pytest.mark.parametrize("body", [{}, {"lora_name": 3, "lora_path": "/x"}, {"lora_name": "a"}])
async def test_a_bad_body_is_a_400(body) -> None:
    async with running(WITH_ADAPTERS) as engine:
        assert (await engine.post("/v1/load_lora_adapter", body))[0] == 400
