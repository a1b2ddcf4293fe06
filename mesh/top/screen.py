"""The live screen of `mesh top`: draws frames and answers keys."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from mesh.explain.terminal import printable
from mesh.top.rows import (
    REGIONS,
    TABLES,
    Column,
    Frame,
    Level,
    RegionRow,
    ReplicaRow,
    RequestRow,
    Row,
    Table,
    fitting,
    key,
    level,
    matches,
    ordered,
    table_lines,
)
from mesh.top.watch import FleetWatch
from schemas.ids import RegionId, ReplicaId

ROWS_MAX = 500  # drawn of one table; the filter finds the others
REGION_LINES_MAX = 9  # above the other tables
FILTER_CHARS_MAX = 64
BETWEEN_COLUMNS = 2
MARGIN = 3  # beside a table, for its scroll bar
STYLES = {Level.GOOD: "", Level.WARNING: "yellow", Level.BAD: "red", Level.OLD: "dim"}
KEYS = """\
1 2 3 4   regions, replicas, traffic, requests; Tab: the next one
up down   or k j: move
Enter     detail: of a replica its last heartbeat, of a request what `mesh explain` prints;
          of a region its replicas
s         sort by the next column
r         reverse the order
/         filter: rows that have this text; Escape ends it
q         quit, or close this; Ctrl-C quits

A dash means not known. "age" appears where data is older than 2 s. TTFT (p50, p99) is of streamed
answers of the last minute. A region whose bus is "away" keeps its last state until it is back."""

Lines = Callable[[], Iterable[str]]


class TextPage(ModalScreen[None]):
    """Lines of text over everything else, until a key closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,question_mark", "dismiss", "close"),
        Binding("j", "down", show=False),
        Binding("k", "up", show=False),
    ]

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="page"):
            yield Static(id="lines")
        yield Footer()

    def on_mount(self) -> None:
        self.draw()

    def draw(self) -> None:
        text = "\n".join(printable(line) for line in self._lines())
        for shown in self.query("#lines").results(Static):  # none while the page opens or closes
            shown.update(Text(text))

    def action_down(self) -> None:
        self.query_one("#page", VerticalScroll).scroll_down()

    def action_up(self) -> None:
        self.query_one("#page", VerticalScroll).scroll_up()


class TopScreen(App[None]):
    """Frames of a `FleetWatch`, one every `every_s` seconds."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #regions { height: auto; padding: 0 1; }
    #notes { height: auto; padding: 0 1; }
    #table { height: 1fr; }
    #filter { dock: bottom; display: none; }
    TextPage { align: center middle; }
    #page { height: 1fr; padding: 1 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"show({number - 1})", table.name, show=False)
            for number, table in enumerate(TABLES, 1)
        ),
        Binding("tab", "next_table", "next table", priority=True),
        Binding("j", "down", show=False),
        Binding("k", "up", show=False),
        Binding("enter", "detail", "detail"),
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("slash", "filter", "filter"),
        Binding("escape", "end_filter", show=False),
        Binding("question_mark", "help", "help"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, watch: FleetWatch, every_s: float) -> None:
        super().__init__()
        self._watch, self._every_s = watch, every_s
        self._frame = Frame()
        self._shown: list[Row] = []
        self._number = 1
        self._filter = ""
        self._order = {table.name: (table.sorted_by, table.reverse) for table in TABLES}

    @property
    def _table(self) -> Table:
        return TABLES[self._number]

    @property
    def _grid(self) -> "DataTable[Text]":
        # Of the lowest screen: the page of a detail may lie over it.
        return self.screen_stack[0].query_one("#table", DataTable)

    def compose(self) -> ComposeResult:
        yield Static(id="regions")
        yield Static(id="notes")
        yield DataTable(id="table", cursor_type="row", zebra_stripes=False)
        yield Input(id="filter", placeholder="rows with this text", max_length=FILTER_CHARS_MAX)
        yield Footer()

    def on_mount(self) -> None:
        self._grid.focus()
        self.refresh_frame()
        self.set_interval(self._every_s, self.refresh_frame)

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self.draw)

    def refresh_frame(self) -> None:
        self._frame = self._watch.frame()
        self.draw()
        if isinstance(self.screen, TextPage):
            self.screen.draw()

    # Drawing.

    def draw(self) -> None:
        base = self.screen_stack[0]
        if not base.query("#table"):  # it is being closed
            return
        base.query_one("#regions", Static).update(self._regions())
        column, rows = self._column(), self._rows()
        self._shown = rows[:ROWS_MAX]
        base.query_one("#notes", Static).update(self._heading(len(rows)))
        self._fill(column)

    def _regions(self) -> Text:
        """The regions above another table, without those that find no room."""
        if self._table.name == "regions":
            return Text("")
        rows = sorted(self._frame.regions, key=key)[: REGION_LINES_MAX - 1]
        lines = [*table_lines(REGIONS, rows, max(1, self.size.width - 2))]
        text = Text()
        for line, row in zip(lines, (None, *rows), strict=True):
            text.append(line + "\n", "bold" if row is None else STYLES[level(row)])
        return text

    def _heading(self, count: int) -> Text:
        text = Text()
        for note in self._frame.notes:
            text.append(printable(note) + "\n", "red")
        for number, table in enumerate(TABLES, 1):
            chosen = table is self._table
            text.append(f"{number} {table.name}", "bold reverse" if chosen else "dim")
            text.append("  ")
        shown = f"{len(self._shown)} of {count} rows" if count > ROWS_MAX else f"{count} rows"
        text.append(f"{shown}, filter: {self._filter}" if self._filter else shown)
        return text

    def _rows(self) -> list[Row]:
        columns = self._table.columns
        rows = (row for row in self._table.rows(self._frame) if matches(columns, row, self._filter))
        return ordered(rows, self._column(), reverse=self._order[self._table.name][1])

    def _column(self) -> Column:
        """That the table is sorted by."""
        title, _ = self._order[self._table.name]
        return next(one for one in self._table.columns if one.title == title)

    def _columns(self) -> list[Column]:
        """Those that find room, the sorted one always among them; its mark takes two characters."""
        width = self.size.width - MARGIN - BETWEEN_COLUMNS
        return fitting(self._table.columns, self._shown, max(1, width), self._column())

    def _fill(self, sorted_by: Column) -> None:
        grid = self._grid
        was = self._key_at(grid.cursor_row) if grid.row_count else None
        scrolled = grid.scroll_y
        with self.batch_update():
            grid.clear(columns=True)
            columns = self._columns()
            for column in columns:
                mark = ""
                if column is sorted_by:
                    mark = " ▼" if self._order[self._table.name][1] else " ▲"
                grid.add_column(Text(column.title + mark, justify=_side(column)))
            for row in self._shown:
                style = STYLES[level(row)]
                cells = (Text(one.text(row), style, justify=_side(one)) for one in columns)
                grid.add_row(*cells, key=key(row))
            keys = [key(row) for row in self._shown]
            if was in keys:
                grid.move_cursor(row=keys.index(was), scroll=False)
                grid.scroll_to(y=scrolled, animate=False)

    def _key_at(self, number: int) -> str | None:
        rows = self._grid.ordered_rows
        return rows[number].key.value if 0 <= number < len(rows) else None

    # Keys.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Under a page of text only its own keys work."""
        return not isinstance(self.screen, TextPage) or action in ("dismiss", "quit")

    def action_show(self, number: int) -> None:
        self._number = number
        self.draw()
        self._grid.move_cursor(row=0)

    def action_next_table(self) -> None:
        self.action_show((self._number + 1) % len(TABLES))

    def action_down(self) -> None:
        self._grid.action_cursor_down()

    def action_up(self) -> None:
        self._grid.action_cursor_up()

    def action_sort(self) -> None:
        title, reverse = self._order[self._table.name]
        titles = [column.title for column in self._columns()]
        following = titles[(titles.index(title) + 1) % len(titles)]
        self._order[self._table.name] = following, reverse
        self.draw()

    def action_reverse(self) -> None:
        title, reverse = self._order[self._table.name]
        self._order[self._table.name] = title, not reverse
        self.draw()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_end_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value = ""
        self._close_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter = event.value
        self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self._grid.focus()

    def action_help(self) -> None:
        self.push_screen(TextPage(KEYS.splitlines))

    def on_data_table_row_selected(self, event: "DataTable.RowSelected") -> None:
        self.action_detail()

    def action_detail(self) -> None:
        wanted = self._key_at(self._grid.cursor_row) if self._grid.row_count else None
        row = next((one for one in self._shown if key(one) == wanted), None)
        match row:
            case RegionRow():
                self._filter_replicas(row.region)
            case ReplicaRow():
                self._replica(RegionId(row.region), ReplicaId(row.replica))
            case RequestRow():
                self.run_worker(self._request(row.request), exclusive=True)

    def _filter_replicas(self, region: str) -> None:
        self.action_show(1)
        self.query_one("#filter", Input).value = region

    def _replica(self, region: RegionId, replica: ReplicaId) -> None:
        """Drawn anew with each frame."""
        watch = self._watch
        self.push_screen(
            TextPage(lambda: watch.fleet.replica_lines(region, replica, watch.clock()))
        )

    async def _request(self, request: str) -> None:
        lines = [f"asking the routers for {request}"]
        page = TextPage(lambda: lines)
        await self.push_screen(page)
        lines[:] = await self._watch.explain(request)
        if page.is_current:
            page.draw()


def _side(column: Column) -> Any:
    return "right" if column.is_number else "left"
