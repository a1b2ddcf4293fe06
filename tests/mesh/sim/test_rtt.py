"""Tables of round trips, and what is wrong with those that can't be used."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.topology import DEFAULT_FILE
from mesh.sim.rtt import RttInvalid, RttTable, load_rtt
from tests.mesh.sim.build import AP, EU, US


def test_the_default_table_is_known_in_both_directions():
    table = RttTable()
    assert table.rtt_s(US, EU) == table.rtt_s(EU, US) == pytest.approx(0.080)
    assert table.rtt_s(EU, AP) == pytest.approx(0.220)
    assert table.rtt_s(US, US) == 0.0


TOML = """
[[links]]
between = ["us", "eu"]
rtt_ms = 91.5

[[links]]
between = ["us", "ap"]
rtt_ms = 140
"""


def test_the_default_is_the_packaged_mesh_s():
    assert load_rtt(DEFAULT_FILE).ms == {
        pair: pytest.approx(ms) for pair, ms in RttTable().ms.items()
    }


def test_a_file_has_links(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text("\ufeff" + TOML, encoding="utf-8")
    table = load_rtt(path)
    assert table.rtt_s(EU, US) == pytest.approx(0.0915)
    with pytest.raises(RttInvalid, match="add that pair"):
        table.rtt_s(EU, AP)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("t.toml", "", "no pair of regions; write for each pair"),
        ("t.toml", "[links", "not TOML"),
        ("t.toml", "links = 1", "links is no list of tables"),
        ("t.toml", "links = [1]", "links.0: "),
        ("t.toml", TOML + '[[links]]\nbetween = ["ap"]\nrtt_ms = 1', "links.2: between: write two"),
        ("t.toml", TOML.replace("140", "-1"), "links.1: rtt_ms: must be at least 0, not -1"),
        ("t.toml", TOML.replace("140", "nan"), "links.1: rtt_ms: must be a finite number"),
        ("t.toml", TOML.replace('"ap"', '"eu"'), "links.1: us and eu are there already"),
        ("t.toml", TOML.replace("140", "1e9"), "links.1: rtt_ms: must be at most 10000"),
        ("t.toml", TOML.replace('"ap"', '"AP"'), "links.1: between.1: use 1 to 32 lower-case"),
        ("t.toml", TOML.replace('"ap"', '"us"'), "links.1: links us with itself"),
        ("t.csv", "us,eu,80\n", "not TOML: .*; write for each pair"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, text, why):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RttInvalid, match=re.escape(str(path)) + ": .*" + why) as caught:
        load_rtt(path)
    assert len(str(caught.value)) < len(str(path)) + 300, "one line that can be read"


@pytest.mark.parametrize("name", ["t", "t.toml"])
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_any_file_is_a_table_or_one_error(tmp_path_factory, name, content):
    path = tmp_path_factory.mktemp("rtt") / name
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
    path = tmp_path / "t.toml"
    path.write_text('links = [{ between = ["us", "eu"], rtt_ms = 80 }]')
    table = load_rtt(path)
    table.check([EU, US])
    with pytest.raises(RttInvalid, match=r"between us and ap, eu and ap: write"):
        table.check([US, EU, AP])
    with pytest.raises(RttInvalid, match=r"and 10 more: write"):
        table.check([US, EU, AP, "sa", "af", "me"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RttInvalid, match=r"nothing\.csv"):
        load_rtt(tmp_path / "nothing.csv")
