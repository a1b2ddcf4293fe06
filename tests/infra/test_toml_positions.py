"""Every key and item of a TOML text has the line and column where it is written."""

import tomllib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.toml_positions import Position, TomlPositions
from infra.topology import DEFAULT_FILE

TEXT = """\
# [mesh] "not a table"
[mesh] # of tables = { }
name = "a # is no comment [[" # but this is

["regions"."u>s"]
http = '127.0.0.1:1'
'replicas' = [ # three
  "a", "b]",   # two on a line
  "c",
]
routing . proactive = { idle_share = 0.1, more = [1, { deep = 2 }] }
text = \"\"\"
[no.table]
key = 1 \\\"\"\" and the end\"\"\"\"
other = '''
]]''''
since = 2026-01-01 10:00:00
last = 1
[[links]]
between = ["us", "eu"]
[[links]]
[links.more]
rtt_ms = 1
"""
PLACES = {
    "mesh": (2, 1),
    "mesh.name": (3, 1),
    "regions": (5, 1),
    "regions.u>s": (5, 1),
    "regions.u>s.http": (6, 1),
    "regions.u>s.replicas": (7, 1),
    "regions.u>s.replicas.0": (8, 3),
    "regions.u>s.replicas.1": (8, 8),
    "regions.u>s.replicas.2": (9, 3),
    "regions.u>s.routing": (11, 1),
    "regions.u>s.routing.proactive.idle_share": (11, 25),
    "regions.u>s.routing.proactive.more.1.deep": (11, 56),
    "regions.u>s.last": (18, 1),
    "links": (19, 1),
    "links.0.between.1": (20, 18),
    "links.1": (21, 1),
    "links.1.more.rtt_ms": (23, 1),
}


def test_the_text_is_toml():
    tomllib.loads(TEXT)


@pytest.mark.parametrize(("names", "place"), PLACES.items(), ids=PLACES)
def test_a_key_has_its_place(names: str, place: tuple[int, int]):
    assert TomlPositions(TEXT).of(tuple(names.split("."))) == Position(*place)


def test_what_is_not_written_has_the_place_of_the_table_around_it():
    positions = TomlPositions(TEXT)
    assert positions.of(("links", "0", "rtt_ms")) == (19, 1)
    assert positions.of(("regions", "eu", "http")) == (5, 1)
    assert positions.of(("tenants", "acme")) is None


def paths(value: object, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key and item of what tomllib read."""
    if names:
        yield names
    inner = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else ()
    for name, each in (*inner, *items):
        yield from paths(each, (*names, str(name)))


def test_the_packaged_file_has_a_line_for_every_key():
    text = DEFAULT_FILE.read_text()
    lines, positions = text.splitlines(), TomlPositions(text)
    for names in paths(tomllib.loads(text)):
        position = positions._found[names]
        written = lines[position.line - 1][position.column - 1 :]
        assert written.startswith((names[-1], "[", '"')) or names[-1].isdigit(), names


@given(st.text(alphabet="ab.=[]{},\"'#\\\n 1", max_size=60))
def test_whatever_is_toml_has_a_place_for_each_of_its_keys(text: str):
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    positions = TomlPositions(text)
    assert set(paths(tables)) <= set(positions._found)
