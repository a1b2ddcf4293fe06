"""Every setting of every rival can be played, and is named once."""

import pytest

from tests.programs.studies.mesh.rivals import RIVALS
from tests.programs.studies.tables.case import case, fleet
from tests.programs.studies.tables.plays import play

SETTINGS = [(rival, number) for rival in RIVALS for number in range(len(rival.settings))]


@pytest.mark.parametrize(
    ("rival", "number"), SETTINGS, ids=[f"{one.name} {number}" for one, number in SETTINGS]
)
def test_a_setting_answers_everything_on_an_idle_fleet(rival, number):
    asked = {"workload": "short", "rate_per_s": 10.0, "duration_s": 1.0, "seed": 3}
    result = play(case((rival.name,), rival.system(number), fleet(3), **asked))
    assert result["ok"] == result["requests"] > 0


def test_names_and_settings_are_unique_and_the_chosen_one_exists():
    names = [rival.name for rival in RIVALS]
    assert len(names) == len(set(names))
    for rival in RIVALS:
        texts = [setting.text for setting in rival.settings]
        assert len(texts) == len(set(texts))
        assert 0 <= rival.chosen < len(texts)


@pytest.mark.parametrize("name", ["gorgo", "skywalker"])
def test_only_gorgo_gives_up_after_a_minute_of_waiting(name):
    rival = next(one for one in RIVALS if one.name == name)
    asked = {"workload": "loogle", "rate_per_s": 25.0, "duration_s": 2.0, "seed": 3}
    result = play(case((name,), rival.system(), fleet(3), **asked))
    assert (result["shed"] > 0) == (name == "gorgo")
    assert result["ttft_s"]["p99"] > 60.0 or result["shed"]


def test_routers_of_one_region_may_have_the_settings_that_central_ones_play():
    rivals = {rival.name: rival for rival in RIVALS}
    local = {setting.policy for setting in rivals["region-local prefix"].settings}
    for name in ("cache-aware", "smg", "llm-d precise", "dynamo"):
        rival = rivals[name]
        assert rival.settings[rival.chosen].policy in local


def test_the_nearest_rivals_play_in_every_cell():
    played = {rival.name for rival in RIVALS if rival.everywhere}
    assert {"skywalker-ch", "region-local", "e2", "dynamo", "llm-d precise"} <= played
