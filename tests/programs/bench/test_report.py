import math

import pytest

from tests.programs.bench.report import markdown, number, shown
from tests.programs.bench.results import Results
from tests.programs.bench.spread import Spread
from tests.programs.bench.test_targets import played


def row(text, name):
    [found] = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_targets_come_first_and_conditions_last():
    text = markdown(played())
    assert text.startswith("| target |")
    assert text.rstrip().splitlines()[-1].startswith("- machine:")
    assert "**plain: 200 tokens, plain, 64 at once, by wrk**" in text


def test_what_a_system_adds_is_its_own_less_that_of_the_direct_path():
    text = markdown(played(ttft_p50_ms=8.0)).split("**many: ")[1].split("**")[1]
    assert row(text, "TTFT p50, ms: added")[1:3] == ["", "2.00 (2.00–2.00)"]
    assert row(text, "TTFT p50, ms: added")[3] == "0.00 (0.00–0.00)"


def test_a_difference_inside_the_spread_is_called_inconclusive():
    found = played()
    found.rounds["plain"]["mesh"][0]["front_cpu_us"] = 90.0
    found.rounds["plain"]["mesh"][1]["front_cpu_us"] = 120.0
    text = markdown(found).split("**plain: ")[1].split("**")[1]
    assert row(text, "router CPU, µs: mesh to this")[3] == "1.05× (0.90–1.20), inconclusive"


def test_an_absent_system_is_in_the_report_with_the_reason():
    found = Results(settings={"direct": "x"}, absent={"dynamo": "can't be installed: no network"})
    assert "- dynamo: **absent**, can't be installed: no network" in markdown(found)


def test_lost_requests_are_shown():
    assert "2.91%" in markdown(played(failed=3.0))


def test_a_cell_that_no_system_could_play_is_shown_empty():
    found = Results(cells={"plain": "plain: …"}, settings={"direct": "x"})
    found.add("plain", "direct", {})
    assert "**plain: …**" in markdown(found)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"), (-12.34, "-12.3"), (math.nan, "–")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_a_spread_is_shown_with_its_ends():
    assert shown(Spread(2.0, 1.0, 3.0), " ms") == "2.00 ms (1.00–3.00)"
    assert shown(None) == "–"


def test_the_mesh_over_dynamo_s_engines_is_compared_with_dynamo_alone():
    found = played()
    found.apart += ["dynamo", "mesh-dynamo"]
    found.settings |= dict.fromkeys(found.apart, "as they are")
    for name, times_s in (("dynamo", 8.0), ("mesh-dynamo", 12.0)):
        for _ in range(2):
            found.add("many", name, {"front_cpu_us": 50.0, "ttft_p50_ms": times_s})
    text = markdown(found).split("**many: ")[1].split("**")[1]
    over_same = row(text, "TTFT p50, ms: mesh-dynamo to this")[1:]
    assert over_same == ["", "", "", "", "", "1.50× (1.50–1.50)", ""]
    assert row(text, "router CPU, µs: mesh to this")[-2:] == ["2.00× (2.00–2.00)", ""]
    assert row(text, "TTFT p50, ms: added")[-2:] == ["", ""]
    assert "mesh-dynamo to this" not in markdown(found).split("**plain: ")[1].split("**many: ")[0]
