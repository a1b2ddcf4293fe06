"""One frame of `mesh top` as plain text or as JSON."""

from collections.abc import Iterator

import orjson

from mesh.explain.text import clock, printable
from mesh.top.rows import TABLES, Frame, Row, Table, ordered, table_lines

REQUESTS_SHOWN = 20
TITLES = {"traffic": "traffic: requests of the last minute, by where they were served"}


def frame_lines(frame: Frame, width: int, unix_s: float) -> Iterator[str]:
    """All tables below each other, each of at most that width."""
    yield clock(unix_s)
    for note in frame.notes:
        yield printable(note)
    for table in TABLES:
        rows = sorted_rows(table, frame)
        if table.name == "requests":
            rows = rows[:REQUESTS_SHOWN]
        if rows:
            yield ""
            yield TITLES.get(table.name, table.name)
            yield from table_lines(table.columns, rows, width)


def sorted_rows(table: Table, frame: Frame) -> list[Row]:
    column = next(one for one in table.columns if one.title == table.sorted_by)
    return ordered(table.rows(frame), column, reverse=table.reverse)


def as_json(frame: Frame) -> str:
    return orjson.dumps(frame, option=orjson.OPT_INDENT_2).decode()
