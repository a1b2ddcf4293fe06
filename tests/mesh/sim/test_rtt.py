"""Tables of round trips, and what is wrong with those that can't be used."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        ("t.csv", "\ufefffrom,to,rtt_ms\r\nus,eu,91.5\r\nus,ap,140\r\n"),
        ("t.txt", '{"us-eu": 91.5, "us-ap": 140}'),
        ("t.json", '{"us-eu": 91.5, "us-ap": 140}'),
        ("t.json", '[["us", "eu", 91.5], ["us", "ap", 140]]'),
    ],
)
def test_a_file_may_be_csv_or_json(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    table = load_rtt(path)
    assert table.rtt_s(EU, US) == pytest.approx(0.0915)
    with pytest.raises(RttInvalid, match="add that pair"):
        table.rtt_s(EU, AP)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("t.csv", "us,eu\n", "line 1: 'us,eu' has 2 columns; write two regions and milliseconds"),
        ("t.csv", "us,eu,80\n\neu;ap;220\n", "line 3: 'eu;ap;220' has 1 columns"),
        ("t.csv", "us,eu,fast\n", "line 1: 'fast' is no number of milliseconds"),
        ("t.csv", "us,eu,-1\n", "'-1' is no number of milliseconds from 0 to 10000"),
        ("t.csv", "us,eu,nan\n", "no number"),
        ("t.csv", "us,eu,1e9\n", "no number"),
        ("t.csv", 'us,eu,"80\n', "line 1: "),
        ("t.csv", "US,eu,1\n", "line 1: region name 'US': use 1 to 32 lower-case"),
        ("t.csv", "us,us,1\n", "us twice"),
        ("t.csv", "us,eu,1\neu,us,2\n", "line 2: eu and us are there already"),
        ("t.csv", "", "it has no pair of regions; write two"),
        ("t.csv", "from,to,rtt_ms\n", "it has no pair"),
        ("t.csv", "us,eu\0,1\n", "region name"),
        ("t.json", '{"us-eu-ap": 1}', 'pair 1 is .*; write {"us-eu": 80}, or'),
        ("t.json", '{"us-eu": true}', "True is no number"),
        ("t.json", '{"us-eu": NaN}', "nan is no number"),
        ("t.json", '{"us-eu": [80]}', "no number"),
        ("t.json", f'{{"us-eu": {"9" * 4000}}}', "999… is no number"),
        ("t.json", f'{{"us-eu": {"9" * 5000}}}', "begins as JSON and is none"),
        ("t.json", '{"us-eu": 1, "us-eu": 2}', "there twice"),
        ("t.json", '[["us", "eu"]]', "pair 1 is"),
        ("t.json", "[80]", "pair 1 is 80; write"),
        ("t.json", '[[{"a": 1}, "eu", 1]]', "region name"),
        ("t.json", "{", "begins as JSON and is none"),
        ("t.json", "[" * 100_000, "begins as JSON and is none"),
        ("t.json", "80", "has 1 columns"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, text, why):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RttInvalid, match=re.escape(str(path)) + ": .*" + why) as caught:
        load_rtt(path)
    assert len(str(caught.value)) < len(str(path)) + 300, "one line that can be read"


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_any_file_is_a_table_or_one_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("rtt") / "t"
    path.write_bytes(content)
    try:
        assert load_rtt(path).ms
    except RttInvalid as error:
        assert str(path) in str(error)


def test_what_is_too_large_or_no_text_is_not_read(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"us,eu,80\n" * 200_000)
    with pytest.raises(RttInvalid, match="bytes are no table"):
        load_rtt(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RttInvalid, match="no text in UTF-8"):
        load_rtt(path)
    with pytest.raises(RttInvalid, match="can't read"):
        load_rtt(tmp_path)


def test_a_missing_pair_is_named_with_how_many_are_missing(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("us,eu,80\n")
    table = load_rtt(path)
    table.check([EU, US])
    with pytest.raises(RttInvalid, match=r"between us and ap, eu and ap: write"):
        table.check([US, EU, AP])
    with pytest.raises(RttInvalid, match=r"and 10 more: write"):
        table.check([US, EU, AP, "sa", "af", "me"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RttInvalid, match=r"nothing\.csv"):
        load_rtt(tmp_path / "nothing.csv")
