"""Tables on narrow and wide consoles: nothing is cut, and what has no room is named."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mesh.replay.report import Column, print_table, table_console

COLUMNS = (
    *(Column("run", is_text=True), Column("requests"), Column("ok")),
    *(Column("output tok/s", is_extra=True), Column("forwarded", is_extra=True)),
)
ROW = ("mesh central:us load 0.9", "123456", "123450", "98765.4", "4321")


def shown(width: int, *rows: tuple[str, ...], is_terminal: bool = True) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=is_terminal, color_system=None)
    print_table(COLUMNS, rows, console)
    return text.getvalue()


def test_a_wide_console_shows_all_on_one_line() -> None:
    text = shown(100, ROW)
    assert any(all(cell in line for cell in ROW) for line in text.splitlines())
    assert "no room" not in text


def test_names_fold_before_a_column_is_left_out() -> None:
    text = shown(62, ROW)
    assert all(part in text for part in (*ROW[0].split(), *ROW[1:]))
    assert not any(ROW[0] in line for line in text.splitlines())
    assert "no room" not in text


def test_columns_are_left_out_from_the_last_and_named() -> None:
    assert "(no room for forwarded in 52 columns)" in shown(52, ROW)
    narrow = shown(38, ROW)
    assert "(no room for output tok/s, forwarded in 38 columns)" in narrow
    assert {"123456", "123450"} <= set(narrow.split())


@given(
    st.integers(45, 120),
    st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,9}( [a-z]{1,9}){0,6}", fullmatch=True), st.integers(0)),
        max_size=3,
    ),
)
def test_no_number_is_ever_cut(width: int, given_rows: list[tuple[str, int]]) -> None:
    rows = [(name, str(n % 10**6), str(n % 10**5), "1.5", "7") for name, n in given_rows]
    text = shown(width, *rows)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines() if "no room" not in line)
    for _, requests, ok, *_ in rows:
        assert {requests, ok} <= set(text.split())


def test_what_is_no_terminal_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setenv("COLUMNS", "40")
    console = table_console()
    assert console.width > 1000
    assert console.color_system is None
