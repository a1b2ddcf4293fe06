"""What every study has: its regions, the texts of its options, its fleets of engines."""

import pytest

from agents.sim.profiles import PROFILES
from mesh.sim.study.scenario import (
    EVERYWHERE,
    Scenario,
    deal,
    listed,
    paired,
    parse_pattern,
    speed_for_fleets,
)
from mesh.sim.study.settings import PlanSettings, SimSettings
from mesh.sim.workloads import make
from mesh.sim.workloads.capacity import offered
from schemas.ids import RegionId

L4, A100 = "l4-llama3.1-8b", "a100-mistral-7b"
US, EU = RegionId("us"), RegionId("eu")


def test_a_scenario_alone_is_no_study_and_the_error_names_what_it_lacks() -> None:
    with pytest.raises(TypeError, match="region_names"):
        Scenario(workload="chat")  # type: ignore[abstract]


def test_every_study_names_its_regions() -> None:
    assert SimSettings(workload="chat", regions=({"us": 1, "ap": 0},)).region_names == ("us", "ap")
    planned = PlanSettings.model_validate({"workload": "chat", "ttft_p90": 1, "regions": "us,ap"})
    assert planned.region_names == ("us", "ap")


def test_a_pattern_is_spelled_out() -> None:
    assert parse_pattern(f"{L4}*3+{A100}") == (L4, L4, L4, A100)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("l4", "unknown profile 'l4': use one of l4-llama3.1-8b"),
        (f"{L4}*", "write PROFILE\\*NUMBER"),
        (f"{L4}*0", "from 1 to 9999"),
        (f"{L4}*1001", "longer than 1000"),
        (f"{L4}+", "unknown profile ''"),
    ],
)
def test_a_bad_pattern_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_pattern(text)


def test_a_pattern_is_assigned_in_turn_and_a_region_may_have_its_own() -> None:
    fleets = deal({EVERYWHERE: (L4, L4, A100), EU: (A100,)}, {US: 5, EU: 2})
    assert [engine.name for engine in fleets[US]] == [L4, L4, A100, L4, L4]
    assert [engine.name for engine in fleets[EU]] == [A100, A100]


def test_a_mixed_fleet_is_full_at_the_sum_of_its_parts() -> None:
    workload = make("toolbench", duration_s=30.0)
    fleets = deal({EVERYWHERE: (L4, L4, A100)}, {US: 3})
    speed = speed_for_fleets(workload, fleets, 0.5)
    full = 2 / offered(workload, PROFILES[L4]) + 1 / offered(workload, PROFILES[A100])
    assert speed == pytest.approx(0.5 * full)


def test_a_closed_loop_has_no_load() -> None:
    with pytest.raises(ValueError, match="closed loop"):
        speed_for_fleets(make("tot", duration_s=5.0), deal({EVERYWHERE: (L4,)}, {US: 1}), 0.5)


def test_a_list_is_split_at_commas() -> None:
    assert listed("round-robin, least-load") == ["round-robin", "least-load"]


def test_pairs_become_a_dict_in_their_order() -> None:
    assert list(paired("us=4,eu=2").items()) == [("us", "4"), ("eu", "2")]  # type: ignore[union-attr]


def test_what_is_no_text_is_left_to_the_field() -> None:
    assert listed(["a"]) == ["a"]
    assert paired({"us": 1}) == {"us": 1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [("a,,b", "empty part"), ("", "empty part"), ("a,b,a", "a is named twice")],
)
def test_a_bad_list_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        listed(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("us", "write REGION=NUMBER"), ("us=", "write REGION=NUMBER"), ("us=1,us=2", "us is named")],
)
def test_bad_pairs_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        paired(text)
