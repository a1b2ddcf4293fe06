import dataclasses
import math

import orjson

from tests.programs.bench.results import Results


def test_a_round_that_could_not_be_played_keeps_its_place():
    found = Results()
    found.add("plain", "mesh", {"a": 1.0})
    found.add("plain", "mesh", {})
    found.add("plain", "mesh", {"a": 3.0})
    values = found.values("plain", "mesh", "a")
    assert (values[0], values[2]) == (1.0, 3.0)
    assert math.isnan(values[1])
    assert found.has("plain", "mesh")
    assert not found.has("plain", "direct")
    assert found.values("other", "mesh", "a") == []


def test_results_can_be_kept_as_json():
    found = Results(settings={"mesh": "x"})
    found.add("plain", "mesh", {"a": math.nan})
    assert orjson.loads(orjson.dumps(dataclasses.asdict(found)))["rounds"]["plain"]["mesh"]
