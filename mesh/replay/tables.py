"""Tables for people, on consoles of any width.

Text columns give way first: they fold at their spaces. If that is not enough, columns marked as
extra are left out, the last first, and a line names them. So a number is never cut in two and
never shortened to dots, and a wide console shows everything. Files always have everything.

Where the output is no terminal nothing is folded or left out: what reads it has no width.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

PLAIN_COLUMNS = 10_000  # where the output is no terminal


class Column(NamedTuple):
    """One column. `is_text`: it may fold. `is_extra`: it may be left out."""

    head: str
    is_text: bool = False
    is_extra: bool = False


Row = Sequence[str]


def table_console() -> Console:
    """Where tables are printed: as wide as the terminal, and plain where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_COLUMNS, color_system=None)


def print_table(columns: Sequence[Column], rows: Sequence[Row], console: Console) -> None:
    """The rows under their heads, and a line that names columns that were left out."""
    kept = [_Sized.of(column, [row[at] for row in rows]) for at, column in enumerate(columns)]
    dropped: list[str] = []
    while sum(one.least for one in kept) > (room := console.width - _around(len(kept), console)):
        extra = next((one for one in reversed(kept) if one.column.is_extra), None)
        if extra is None:
            break
        kept.remove(extra)
        dropped.insert(0, extra.column.head)
    console.print(_table(kept, room, console))
    if dropped:
        say(f" (no room for {', '.join(dropped)} in {console.width} columns)", console)


def say(line: str, console: Console) -> None:
    """A line of prose, folded by the terminal and not by us."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)


class _Sized(NamedTuple):
    """A column's cells, its whole width, and the least that its words allow."""

    column: Column
    cells: Sequence[str]
    whole: int
    least: int

    @classmethod
    def of(cls, column: Column, cells: Sequence[str]) -> "_Sized":
        texts = (column.head, *cells)
        whole = max(map(cell_len, texts))
        words = (word for text in texts for word in text.split())
        return cls(column, cells, whole, max(map(cell_len, words)) if column.is_text else whole)


def _table(sized: Sequence[_Sized], room: int, console: Console) -> Table:
    """Every column as wide as it wants, text columns as wide as is left to them."""
    table = Table(box=_box(console))
    left = room - sum(one.least for one in sized)
    for column, _, whole, least in sized:
        width = min(whole, least + max(0, left))
        left -= width - least
        table.add_column(
            column.head,
            justify="left" if column.is_text else "right",
            no_wrap=not column.is_text,
            overflow="fold",
            width=width,
        )
    for cells in zip(*(one.cells for one in sized), strict=True):
        table.add_row(*cells)
    return table


def _around(columns: int, console: Console) -> int:
    """What a table takes beside its cells: padding, and lines if there are any."""
    empty = Table(box=_box(console))
    for _ in range(columns):
        empty.add_column(width=1)
    unbounded = console.options.update_width(PLAIN_COLUMNS)
    return Measurement.get(console, unbounded, empty).maximum - columns


def _box(console: Console) -> box.Box | None:
    return box.SIMPLE_HEAD if console.is_terminal else None
