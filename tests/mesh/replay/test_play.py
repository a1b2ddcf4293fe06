"""A run is ready from every format that a replay can play."""

from itertools import combinations
from pathlib import Path

import orjson
import pytest

from mesh.replay.play import PreparedReplay, prepare
from mesh.replay.settings import ReplaySettings
from mesh.replay.trace_formats import FORMATS

DATA = Path("tests/data")
PATHS = {
    "mooncake": DATA / "mooncake" / "conversation_first60.jsonl",
    "azure": DATA / "azure" / "conv_first60.csv",
    "lmcache": DATA / "lmcache" / "taubench",
}


def job(name: str, **changes: object) -> PreparedReplay:
    url = {"us": "http://localhost:1"}
    return prepare(ReplaySettings(url=url, trace=PATHS[name], format=name, **changes))


def prompts(ready: PreparedReplay) -> list[str]:
    bodies = (orjson.loads(ready.body(departure, "m")) for departure in ready.plan)
    return [body["messages"][0]["content"] for body in bodies]


@pytest.mark.parametrize("name", FORMATS)
def test_every_request_has_its_time_and_the_recorded_length(name):
    ready = job(name)
    times = [departure.due_s for departure in ready.plan]
    assert times == sorted(times)
    assert times[0] == 0.0
    for departure, prompt in zip(ready.plan, prompts(ready), strict=True):
        assert len(prompt) == 4 * departure.request.input_tokens


def test_azure_prompts_have_nothing_in_common():
    for one, other in combinations(prompts(job("azure")), 2):
        assert one[:32] != other[:32]


def test_lmcache_prompts_repeat_their_blocks_as_text():
    ready = job("lmcache")
    rows = list(zip(ready.plan, prompts(ready), strict=True))
    repeated = 0
    for (left, one), (right, other) in combinations(rows, 2):
        same = sum(a == b for a, b in zip(left.request.blocks, right.request.blocks, strict=False))
        assert one[: 64 * same] == other[: 64 * same]
        repeated += same
    assert repeated > 1000
