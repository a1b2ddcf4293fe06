"""Every setting of every rival can be played, and is named once."""

import pytest

from tests.programs.studies.mesh.rivals import RIVALS, WAITS
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


def test_only_gorgo_gives_up_waiting():
    impatient = {rival.name for rival in RIVALS if not set(WAITS) <= set(rival.system().setting)}
    assert impatient == {"gorgo", "gorgo-proxy"}
