"""What every study has; where its regions come from differs."""

import pytest

from mesh.sim.study.scenario import Scenario
from mesh.sim.study.settings import PlanSettings, SimSettings


def test_a_scenario_alone_is_no_study_and_the_error_names_what_it_lacks() -> None:
    with pytest.raises(TypeError, match="region_names"):
        Scenario(workload="chat")  # type: ignore[abstract]


def test_every_study_names_its_regions() -> None:
    assert SimSettings(workload="chat", regions=({"us": 1, "ap": 0},)).region_names == ("us", "ap")
    planned = PlanSettings.model_validate({"workload": "chat", "ttft_p90": 1, "regions": "us,ap"})
    assert planned.region_names == ("us", "ap")
