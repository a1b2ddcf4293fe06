"""What `make fidelity-engines` plays, and how its rounds are compared."""

import json

from agents.sim.profile_files import find_profile
from tests.agents.core.test_engine_curves import FILE
from tests.programs.live.fidelity_engines import LOADS, TURNS, conversations, rows, twin


def test_the_same_seed_gives_the_same_conversations():
    load = LOADS["vLLM"][1]
    assert conversations("one", 5, load) == conversations("one", 5, load)
    assert conversations("one", 5, load) != conversations("two", 5, load)


def test_the_twin_plays_prompts_of_as_many_tokens_as_the_engine_counted(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(FILE))
    chats = conversations("one", 4, LOADS["vLLM"][1])
    for chat in chats:
        chat.prompt_tokens = [400, 600, 800]
    result = twin(chats, find_profile(str(profile)), seed=1)
    assert (result["ok"], result["failed"]) == (4 * TURNS, 0)
    assert 0.4 < result["cached_token_ratio"] < 1000 / 1800


def test_rounds_are_compared_one_by_one_and_a_miss_is_marked():
    def result(p50, p90):
        return {"ttft_s": {"p50": p50, "p90": p90}, "cached_token_ratio": 0.5}

    pairs = [(1.0, 1.1), (2.0, 2.1), (0.5, 0.4)]
    found = [(result(live, live), result(would, 2 * live)) for live, would in pairs]
    p50, p90, cached = rows("vLLM", found)
    assert p50[-2:] == ["+5.0% (-20.0%–+10.0%)", "15%"]
    assert p90[-2:] == ["+100.0% (+100.0%–+100.0%): **miss**", "15%"]
    assert cached[2] == "50.0 (50.0–50.0)"
