"""Tables of round trips, and what is wrong with those that can't be used."""

import pytest

from mesh.sim.rtt import RttInvalid, RttTable, load_rtt
from tests.mesh.sim.build import AP, EU, US


def test_the_default_table_is_known_in_both_directions():
    table = RttTable()
    assert table.rtt_s(US, EU) == table.rtt_s(EU, US) == pytest.approx(0.080)
    assert table.rtt_s(EU, AP) == pytest.approx(0.220)
    assert table.rtt_s(US, US) == 0.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "from,to,rtt_ms\nus,eu,91.5\nus,ap,140\n"),
        ("t.csv", "# ms\nus,eu,91.5\nus, ap ,140\n"),
        ("t.json", '{"us-eu": 91.5, "us-ap": 140}'),
        ("t.json", '[["us", "eu", 91.5], ["us", "ap", 140]]'),
    ],
)
def test_a_file_may_be_csv_or_json(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    table = load_rtt(path)
    assert table.rtt_s(EU, US) == pytest.approx(0.0915)
    with pytest.raises(RttInvalid, match="add that pair"):
        table.rtt_s(EU, AP)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("t.csv", "us,eu\n", "each line"),
        ("t.csv", "us,eu,fast\n", "fast"),
        ("t.csv", "us,eu,-1\n", "not 0 to"),
        ("t.csv", "us,eu,nan\n", "not 0 to"),
        ("t.csv", "US,eu,1\n", "region name"),
        ("t.json", '{"us-eu-ap": 1}', "write"),
        ("t.json", "{", "t"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, text, why):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RttInvalid, match=why):
        load_rtt(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RttInvalid, match=r"nothing\.csv"):
        load_rtt(tmp_path / "nothing.csv")
