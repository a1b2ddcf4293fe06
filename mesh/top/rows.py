"""What `mesh top` shows, as values: rows of regions, replicas, traffic and requests.

None is "not known" and shown as a dash: a missing signal is not zero. Ages are seconds since the
last message that the row was made of.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mesh.explain.terminal import clock, printable

STALE_S = 2.0  # as long as routers wait for a silent replica
UNKNOWN = "–"
GOOD = {"serving", "ready", "connected", "ok", "none"}
WARNING = {"draining", "drained", "starting", "unknown", "client_gone", "shed", "refused"}
CONNECTING = "connecting"  # to its bus for the first time
REQUESTS_SHOWN = 20  # in a frame as text
TITLES = {"traffic": "traffic: requests of the last minute, by where they were served"}


@dataclass(frozen=True, slots=True)
class RegionRow:
    region: str
    bus: str
    """connecting, connected, away, or none: no credentials, so that its state comes by its peers'
    buses."""
    state: str
    """What its routers say: serving, no replica (ready, in any region), draining, adopted by
    another region, or silent; connecting or unknown where nothing was received yet."""
    replicas: int
    ready: int | None
    pending: int | None
    running: int | None
    held: int | None
    requests_per_s: float | None
    kv_used_ratio: float | None
    prefix_hit_ratio: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    rtt_s: Mapping[str, float]
    batch_lines: int | None
    """Lines of its batch jobs that have not ended."""
    age_s: float | None
    why_away: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    region: str
    replica: str
    state: str
    pending: int | None = None
    running: int | None = None
    outstanding: int | None = None
    kv_used_ratio: float | None = None
    prefix_hit_ratio: float | None = None
    queued_tokens: int | None = None
    decode_tokens_per_s: float | None = None
    served: int | None = None
    refused: int | None = None
    engine: str | None = None
    models: tuple[str, ...] = ()
    age_s: float | None = None


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """Requests of a region's clients that ended in the last minute, by where they were served."""

    asked: str
    served: str | None
    rtt_s: float | None
    requests_per_s: float | None
    failed_per_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    age_s: float | None


@dataclass(frozen=True, slots=True)
class RequestRow:
    arrived_at: float
    """Seconds since 1970."""
    request: str
    region: str
    served: str | None
    replica: str | None
    status: int | None
    outcome: str
    wait_s: float | None
    """To the first byte, or to its end without one."""
    duration_s: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    model: str | None


Row = RegionRow | ReplicaRow | TrafficRow | RequestRow


@dataclass(frozen=True, slots=True)
class Frame:
    """All that is shown at one moment."""

    regions: tuple[RegionRow, ...] = ()
    replicas: tuple[ReplicaRow, ...] = ()
    traffic: tuple[TrafficRow, ...] = ()
    requests: tuple[RequestRow, ...] = ()
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. `keep`: of too narrow a table, columns with the least go first."""

    title: str
    value: Callable[[Any], Any]
    show: Callable[[Any], str] = str
    keep: int = 9
    is_number: bool = True

    def text(self, row: Row) -> str:
        value = self.value(row)
        return UNKNOWN if value is None or value == "" else printable(self.show(value))


def _named(name: str) -> Callable[[Any], Any]:
    return lambda row: getattr(row, name)


def _column(title: str, name: str, show: Callable[[Any], str] = str, keep: int = 9) -> Column:
    return Column(title, _named(name), show, keep)


def _word(title: str, name: str, keep: int = 9) -> Column:
    return Column(title, _named(name), str, keep, is_number=False)


def percent(ratio: float) -> str:
    return f"{100.0 * ratio:.0f}%"


def ms(seconds: float) -> str:
    return f"{1000.0 * seconds:.0f}"


def rate(per_s: float) -> str:
    return f"{per_s:.1f}" if per_s < 100.0 else f"{per_s:.0f}"


def age(seconds: float) -> str:
    """Nothing while it is fresh."""
    if seconds < STALE_S:
        return " "
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"


def _round_trips(rtt_s: Mapping[str, float]) -> str:
    return " ".join(f"{peer} {ms(each_s)}" for peer, each_s in sorted(rtt_s.items()))


def _clock(at: float) -> str:
    """The time of day in UTC."""
    second = int(at) % 86_400
    return f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"


def _ready(row: RegionRow) -> str | None:
    return None if row.ready is None else f"{row.ready}/{row.replicas}"


REGIONS = (
    _word("region", "region"),
    _word("bus", "bus"),
    _word("state", "state", 7),
    Column("ready", _ready),
    _column("pend", "pending"),
    _column("run", "running"),
    _column("held", "held"),
    _column("req/s", "requests_per_s", rate, 6),
    _column("kv", "kv_used_ratio", percent, 5),
    _column("hit", "prefix_hit_ratio", percent, 4),
    _column("p50 ms", "ttft_p50_s", ms, 3),
    _column("p99 ms", "ttft_p99_s", ms, 5),
    _column("age", "age_s", age, 8),
    Column("rtt ms", lambda row: _round_trips(row.rtt_s), keep=2, is_number=False),
    _column("batch", "batch_lines", keep=1),
)
REPLICAS = (
    _word("replica", "replica"),
    _word("region", "region", 7),
    _word("state", "state"),
    _column("pend", "pending"),
    _column("run", "running"),
    _column("out", "outstanding", keep=4),
    _column("kv", "kv_used_ratio", percent, 6),
    _column("hit", "prefix_hit_ratio", percent, 6),
    _column("queued tok", "queued_tokens", keep=3),
    _column("tok/s", "decode_tokens_per_s", rate, 4),
    _column("served", "served", keep=5),
    _column("refused", "refused", keep=3),
    _column("age", "age_s", age, 8),
    _word("engine", "engine", 2),
    Column("models", lambda row: " ".join(row.models), keep=1, is_number=False),
)
TRAFFIC = (
    _word("asked", "asked"),
    _word("served in", "served"),
    _column("rtt ms", "rtt_s", ms),
    _column("req/s", "requests_per_s", rate),
    _column("failed/s", "failed_per_s", rate),
    _column("p50 ms", "ttft_p50_s", ms),
    _column("p99 ms", "ttft_p99_s", ms),
    _column("age", "age_s", age),
)
REQUESTS = (
    Column("arrived", _named("arrived_at"), _clock, 6, is_number=False),
    _word("request", "request"),
    _word("asked", "region"),
    _word("replica", "replica", 8),
    _column("status", "status", keep=5),
    _word("outcome", "outcome"),
    _column("wait ms", "wait_s", ms),
    _column("ms", "duration_s", ms, 4),
    _column("in", "prompt_tokens", keep=3),
    _column("cached", "cached_tokens", keep=3),
    _column("out", "output_tokens", keep=3),
    _word("model", "model", 1),
)


@dataclass(frozen=True, slots=True)
class Table:
    """One of the tables of a frame. `name`: of the frame's field."""

    name: str
    columns: tuple[Column, ...]
    sorted_by: str
    reverse: bool = False

    def rows(self, frame: Frame) -> tuple[Row, ...]:
        found: tuple[Row, ...] = getattr(frame, self.name)
        return found


TABLES = (
    Table("regions", REGIONS, "region"),
    Table("replicas", REPLICAS, "replica"),
    Table("traffic", TRAFFIC, "asked"),
    Table("requests", REQUESTS, "arrived", reverse=True),
)


def key(row: Row) -> str:
    """What a row is of, unique in its table."""
    match row:
        case RegionRow():
            return row.region
        case ReplicaRow():
            return f"{row.region}/{row.replica}"
        case TrafficRow():
            return f"{row.asked}/{row.served or ''}"
        case RequestRow():
            return f"{row.region}/{row.request}"


class Level(StrEnum):
    """How a row is coloured."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    OLD = "old"  # its data is, or there is none yet


def level(row: Row) -> Level:
    """By what the row says of its state, and by its age."""
    match row:
        case RegionRow():
            words = [row.bus, row.state]
        case ReplicaRow():
            words = [row.state]
        case RequestRow():
            words = [row.outcome]
        case _:
            words = []
    if any(word not in GOOD | WARNING | {CONNECTING} for word in words):
        return Level.BAD
    age_s = getattr(row, "age_s", None)
    if CONNECTING in words or (age_s is not None and age_s >= STALE_S):
        return Level.OLD
    return Level.WARNING if any(word in WARNING for word in words) else Level.GOOD


def matches(columns: Iterable[Column], row: Row, wanted: str) -> bool:
    """Whether some cell has that text, whatever its case."""
    wanted = wanted.casefold()
    return not wanted or any(wanted in column.text(row).casefold() for column in columns)


def ordered(rows: Iterable[Row], column: Column, *, reverse: bool) -> list[Row]:
    """Sorted by a column, equals by name; what is not known comes last either way."""
    rows = sorted(rows, key=key)
    known = [row for row in rows if column.value(row) not in (None, "")]
    known.sort(key=lambda row: _comparable(column.value(row)), reverse=reverse)
    return known + [row for row in rows if column.value(row) in (None, "")]


def _comparable(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)


def fitting(
    columns: Sequence[Column], rows: Sequence[Row], width: int, always: Column | None = None
) -> list[Column]:
    """The columns that fit beside each other in so many characters, two between each pair.

    Without those whose cells are all blank. `always` is kept however narrow it is.
    """
    cells = {column.title: [column.text(row) for row in rows] for column in columns}
    kept = [one for one in columns if not rows or any(map(str.strip, cells[one.title]))]
    widths = {title: max(map(len, (title, *texts))) for title, texts in cells.items()}
    while len(kept) > 1 and sum(widths[one.title] + 2 for one in kept) - 2 > width:
        kept.remove(min((one for one in kept if one is not always), key=lambda one: one.keep))
    return kept


def table_lines(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Iterable[str]:
    """The table as lines of plain text of at most that width."""
    columns = fitting(columns, rows, width)
    cells = [[column.title for column in columns]]
    cells += [[column.text(row) for column in columns] for row in rows]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    for line in cells:
        parts = (
            text.rjust(size) if column.is_number else text.ljust(size)
            for column, text, size in zip(columns, line, widths, strict=True)
        )
        yield "  ".join(parts).rstrip()[:width]


def frame_lines(frame: Frame, width: int, unix_s: float) -> Iterator[str]:
    """All tables below each other, each of at most that width."""
    yield clock(unix_s)
    for note in frame.notes:
        yield printable(note)
    for table in TABLES:
        column = next(one for one in table.columns if one.title == table.sorted_by)
        rows = ordered(table.rows(frame), column, reverse=table.reverse)
        if table.name == "requests":
            rows = rows[:REQUESTS_SHOWN]
        if rows:
            yield ""
            yield TITLES.get(table.name, table.name)
            yield from table_lines(table.columns, rows, width)
