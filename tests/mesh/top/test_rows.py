"""Tables of `mesh top`: order, filter, and what finds room in a narrow terminal."""

from dataclasses import replace

import pytest

from mesh.top.rows import (
    REPLICAS,
    REQUESTS,
    TABLES,
    Frame,
    Level,
    RegionRow,
    ReplicaRow,
    RequestRow,
    TrafficRow,
    age,
    fitting,
    frame_lines,
    level,
    matches,
    ordered,
    table_lines,
)

COLUMNS = {column.title: column for column in REPLICAS}
ROWS = [
    ReplicaRow("us", "us-0", "ready", running=3, kv_used_ratio=0.5, models=("llama",), age_s=0.1),
    ReplicaRow("us", "us-1", "silent", age_s=42.0),
    ReplicaRow("eu", "eu-0", "drained", running=7, kv_used_ratio=0.25, models=("qwen",), age_s=0.1),
]
FRAME = Frame(
    regions=(
        RegionRow(
            "us", "away", "serving", 2, 1, 0, 3, 0, 120.4, 0.5, 0.9, 0.25, 1.5,
            {"eu": 0.081, "ap": 0.2}, None, 12.0, "no bus",
        ),
    ),
    replicas=tuple(ROWS),
    traffic=(TrafficRow("us", "eu", 0.081, 4.0, 0.0, 0.25, 1.5, 0.1),),
    requests=(
        RequestRow(
            1_700_000_000.0, "q\x1b[31m1", "us", "eu", "eu-0", 200, "ok", 0.25, 2.0, 10, 0, 5, "m"
        ),
    ),
    notes=("us: its bus is away: no bus",),
)  # fmt: skip


def names(rows):
    return [row.replica for row in rows]


@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_not_known_comes_last_either_way(reverse):
    found = names(ordered(ROWS, COLUMNS["run"], reverse=reverse))
    assert found == [*(["eu-0", "us-0"] if reverse else ["us-0", "eu-0"]), "us-1"]


def test_equals_are_sorted_by_name():
    assert names(ordered(reversed(ROWS), COLUMNS["region"], reverse=False)) == [
        "eu-0",
        "us-0",
        "us-1",
    ]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("", ["us-0", "us-1", "eu-0"]), ("US-", ["us-0", "us-1"]), ("silent", ["us-1"]),
     ("qwen", ["eu-0"]), ("nothing", [])],
)  # fmt: skip
def test_a_filter_is_a_text_of_any_cell(wanted, found):
    assert names(row for row in ROWS if matches(REPLICAS, row, wanted)) == found


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_every_table_fits_its_width(width):
    for table in TABLES:
        rows = list(table.rows(FRAME))
        lines = list(table_lines(table.columns, rows, width))
        assert len(lines) == 1 + len(rows)
        assert max(map(len, lines)) <= width


def test_in_80_columns_the_first_questions_are_answered():
    titles = {
        table.name: [one.title for one in fitting(table.columns, list(table.rows(FRAME)), 80)]
        for table in TABLES
    }
    assert {"region", "bus", "state", "ready", "pend", "run", "held"} <= set(titles["regions"])
    assert {"replica", "state", "pend", "run", "kv", "hit", "age"} <= set(titles["replicas"])
    assert {"request", "replica", "outcome", "wait ms"} <= set(titles["requests"])
    assert "models" in [one.title for one in fitting(REPLICAS, ROWS, 200)]


def test_a_column_may_be_kept_and_a_blank_one_is_not():
    models, wide = COLUMNS["models"], fitting(REPLICAS, ROWS, 40, COLUMNS["models"])
    assert models in wide and len(wide) < len(REPLICAS)
    fresh = [row for row in ROWS if row.age_s < 1]
    assert COLUMNS["age"] not in fitting(REPLICAS, fresh, 200)
    assert COLUMNS["age"] in fitting(REPLICAS, ROWS, 200)


@pytest.mark.parametrize(("age_s", "text"), [(1.9, " "), (12.3, "12 s"), (600.0, "10 min")])
def test_ages_are_shown_of_what_is_old(age_s, text):
    assert age(age_s) == text


@pytest.mark.parametrize(
    ("outcome", "found"),
    [
        ("ok", Level.GOOD),
        ("refused", Level.WARNING),
        ("shed", Level.WARNING),
        ("failed", Level.BAD),
    ],
)
def test_what_a_client_did_wrong_is_no_fault_of_the_mesh(outcome, found):
    assert level(replace(FRAME.requests[0], outcome=outcome)) is found


def test_a_frame_as_text():
    lines = list(frame_lines(FRAME, 200, 1_700_000_000.0))
    assert lines[:2] == ["2023-11-14 22:13:20.000 UTC", "us: its bus is away: no bus"]
    text = "\n".join(lines)
    assert "ap 200 eu 81" in text and "12 s" in text and "22:13:20" in text
    assert "\x1b" not in text and "q\\x1b[31m1" in text
    silent = next(line for line in lines if line.startswith("us-1"))
    assert silent.split()[:5] == ["us-1", "us", "silent", "–", "–"]


def test_a_table_without_rows_is_its_titles():
    assert next(iter(table_lines(REQUESTS, [], 200))).split()[0] == "arrived"
