"""The simulated engine's vectors: the same for the same input, counted, and without a token."""

import base64
import math
import struct

import pytest

from agents.simserver.embeddings import DIMENSIONS, INPUTS_MAX
from tests.agents.simserver.support import MODEL, config, faults, running

PATH = "/v1/embeddings"


async def asked(engine, **fields):
    return await engine.post(PATH, {"model": MODEL, "input": "hello"} | fields)


def vector(answer: dict, index: int = 0) -> list[float]:
    return answer["data"][index]["embedding"]


async def test_equal_inputs_have_equal_vectors_of_length_one():
    async with running() as engine:
        _, several = await asked(engine, input=["hello", "other", "hello"])
        status, alone = await asked(engine)
        _, ids = await asked(engine, input=[int.from_bytes(b"hell", "little"), ord("o")])
    assert status == 200
    assert vector(several, 0) == vector(several, 2) == vector(alone) == vector(ids)
    assert vector(several, 1) != vector(alone)
    assert len(vector(alone)) == DIMENSIONS
    assert math.hypot(*vector(alone)) == pytest.approx(1.0)
    assert several["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert [each["index"] for each in several["data"]] == [0, 1, 2]


async def test_dimensions_and_base64():
    async with running() as engine:
        _, plain = await asked(engine, dimensions=4)
        _, encoded = await asked(engine, dimensions=4, encoding_format="base64")
    numbers = struct.unpack("<4f", base64.b64decode(vector(encoded)))
    assert list(numbers) == pytest.approx(vector(plain), abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["a"] * (INPUTS_MAX + 1)}, "input"),
        ({"input": "x" * 800_000}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": DIMENSIONS + 1}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
async def test_what_it_refuses(fields, param):
    async with running() as engine:
        status, answer = await asked(engine, **fields)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_it_computes_prompts_and_generates_nothing():
    async with running(config(time_scale=1000.0)) as engine:
        await asked(engine, input=["x" * 400, "y" * 400])
        numbers = await engine.metrics()
    assert numbers["vllm:prompt_tokens_total"] == 200
    assert numbers["vllm:generation_tokens_total"] == 0
    assert numbers["vllm:time_to_first_token_seconds_count"] == 0


async def test_a_fault_switch_makes_it_fail():
    async with running(config(faults=faults(error_rate=1.0))) as engine:
        status, _ = await asked(engine)
    assert status == 500
