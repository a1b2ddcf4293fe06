"""What `mesh batch` shows: tables, bars, and the same in plain lines where there is no terminal."""

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from mesh.batch_client.job_answers import FileAnswer, JobAnswer
from mesh.batch_client.job_end import Estimate
from mesh.batch_client.watch import Look
from schemas.batch import ERRORS_MAX, JobStatus, LineError
from schemas.problems import counted

PLAIN_COLUMNS = 160
ERRORS_SHOWN = 10
LINE_EVERY_S = 10.0
STEP_S = 30.0  # a check or an output that takes longer may wait for something
MEBIBYTE = 1024 * 1024
COLOURS = {
    JobStatus.COMPLETED: "green",
    JobStatus.FAILED: "bold red",
    JobStatus.EXPIRED: "bold red",
    JobStatus.CANCELLED: "yellow",
}


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; plain, and wide enough for every table, where there is none."""
    found = Console(stderr=stderr)
    if found.is_terminal:
        return found
    return Console(stderr=stderr, width=PLAIN_COLUMNS, color_system=None)


def time_text(at: float | None, now_at: float) -> str:
    """The local time, with its day if that is not today's."""
    if at is None:
        return "-"
    then, now = datetime.fromtimestamp(at), datetime.fromtimestamp(now_at)
    return then.strftime("%H:%M:%S" if then.date() == now.date() else "%Y-%m-%d %H:%M")


def span_text(seconds: float) -> str:
    """A length of time in its two largest units, rounded up."""
    left = max(0, math.ceil(seconds))
    for largest, unit in ((3600, 60), (86_400, 3600)):
        if left >= largest:
            left = -(-left // unit) * unit
    days, hours, minutes = left // 86_400, left % 86_400 // 3600, left % 3600 // 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left % 60} s" if minutes else f"{left} s"


def pace_text(lines_per_s: float | None) -> str:
    """Lines a second; a minute or an hour where that is a fraction."""
    if lines_per_s is None:
        return "-"
    for factor, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if lines_per_s * factor >= 1 or unit == "h":
            break
    return f"{lines_per_s * factor:.3g} lines/{unit}"


def end_text(job: JobAnswer, expected: Estimate, now_at: float) -> str:
    """When the job ends, or why there is no forecast."""
    if job.is_over:
        return f"ended {time_text(job.ended_at, now_at)}"
    if job.status is JobStatus.VALIDATING:
        text = "not known before its file is checked"
        if job.mesh is not None and (waited_s := now_at - job.created_at) > STEP_S:
            text += f", for {span_text(waited_s)} now: `mesh doctor` says if a batch runner runs"
        return text
    if job.status is JobStatus.FINALIZING:
        text = "its output is being written"
        began_at = now_at if job.finalizing_at is None else job.finalizing_at
        if job.mesh is not None and now_at - began_at > STEP_S:
            text += ", or waits for room in the store: `mesh batch files`"
        return text
    if job.status is JobStatus.CANCELLING:
        return "being cancelled"
    if expected.end_at is None:
        return "not known yet"
    source = "the mesh's estimate" if expected.by_mesh else "at the pace seen"
    return (
        f"{time_text(expected.end_at, now_at)}, in {span_text(expected.end_at - now_at)} ({source})"
    )


def lines_text(job: JobAnswer) -> str:
    """How many lines are answered, or why that is not known."""
    lines = job.lines
    if lines.total:
        return f"{lines.answered} of {lines.total}"
    return "none: the file was refused" if job.status is JobStatus.FAILED else "not counted yet"


def late_text(job: JobAnswer, expected: Estimate, now_at: float) -> str:
    """What says that lines will miss the end of the job's window; empty if nothing does."""
    if job.is_over or job.expires_at is None:
        return ""
    end_at = expected.end_at
    if end_at is not None and end_at > job.expires_at:
        by = span_text(end_at - job.expires_at)
        return f"late by {by}: its window ends {time_text(job.expires_at, now_at)}"
    if job.is_late:
        return f"late: lines not answered by {time_text(job.expires_at, now_at)} get an error"
    return ""


def job_table(job: JobAnswer, expected: Estimate, now_at: float) -> Table:
    """Everything of one job."""
    table = Table(show_header=False)
    colour = COLOURS.get(job.status, "cyan")
    lines = job.lines
    rows = [
        ("job", escape(job.id)),
        ("status", f"[{colour}]{job.status}[/{colour}]"),
        ("lines", lines_text(job)),
        ("answered", str(lines.completed)),
        ("with an error", str(lines.failed)),
        ("pace", pace_text(expected.lines_per_s)),
        ("end", end_text(job, expected, now_at)),
        ("window", f"{escape(job.completion_window)}, ends {time_text(job.expires_at, now_at)}"),
        ("created", time_text(job.created_at, now_at)),
        ("endpoint", escape(job.endpoint)),
        ("input file", escape(job.input_file_id)),
        ("output file", escape(job.output_file_id or "-")),
        ("error file", escape(job.error_file_id or "-")),
    ]
    if job.mesh is not None and job.mesh.tokens:
        rows.insert(5, ("tokens", f"{job.mesh.tokens:,}"))
    if late := late_text(job, expected, now_at):
        rows.append(("late", f"[bold red]{late}[/bold red]"))
    rows.extend(("metadata", escape(f"{key}={text}")) for key, text in (job.metadata or {}).items())
    for row in rows:
        table.add_row(*row)
    return table


def jobs_table(jobs: Sequence[JobAnswer], now_at: float) -> Table:
    """A line a job."""
    table = Table("job", "status", "lines", "with an error", "created", "end", "late")
    for job in jobs:
        lines = job.lines
        colour = COLOURS.get(job.status, "cyan")
        end_at = job.ended_at if job.is_over else job.estimated_end_at
        table.add_row(
            escape(job.id),
            f"[{colour}]{job.status}[/{colour}]",
            f"{lines.answered} of {lines.total}" if lines.total else "-",
            str(lines.failed) if lines.total else "-",
            time_text(job.created_at, now_at),
            time_text(end_at, now_at),
            "yes" if job.is_late and not job.is_over else "",
        )
    return table


def files_table(files: Sequence[FileAnswer], now_at: float) -> Table:
    """A line a file, and what they take together."""
    total = sum(file.bytes for file in files) / MEBIBYTE
    table = Table(
        Column("file", no_wrap=True),  # an id is of use only whole
        "purpose",
        Column("name", overflow="fold"),
        Column("bytes", justify="right", overflow="fold"),
        "created",
        "deleted at",
        caption=f"{counted(len(files), 'file')}, {total:.1f} MiB",
    )
    for file in files:
        table.add_row(
            escape(file.id),
            escape(file.purpose),
            escape("".join(c if c.isprintable() else " " for c in file.filename)),
            f"{file.bytes:,}",
            time_text(file.created_at, now_at),
            time_text(file.expires_at, now_at),
        )
    return table


def print_errors(job: JobAnswer, to: Console) -> None:
    """Why the job failed; the first lines of it."""
    listed = job.listed_errors
    for each in listed[:ERRORS_SHOWN]:
        to.print(str(each), markup=False, highlight=False, soft_wrap=True)
    if len(listed) > ERRORS_SHOWN:
        to.print(f"{len(listed) - ERRORS_SHOWN} more: --json lists them", highlight=False)


def file_problem(path: Path, errors: Sequence[LineError]) -> str:
    """What is wrong with an input file, with its lines, and what to do."""
    shown = [
        f"  line {each.line}: {each.message}" if each.line is not None else f"  {each.message}"
        for each in errors[:ERRORS_SHOWN]
    ]
    more = len(errors) - len(shown)
    if more > 0:
        shown.append(f"  and {more}{' or more' if len(errors) >= ERRORS_MAX else ''} others")
    return "\n".join(
        [
            f"{path} was not sent:",
            *shown,
            "Mend it, or give --no-check: the endpoint then judges it.",
        ]
    )


def progress_line(look: Look, now_at: float) -> str:
    """A job's progress in one line."""
    job, lines = look.job, look.job.lines
    if look.lost is not None:
        return f"{look.lost}; the job goes on, trying again"
    parts = [str(job.status)]
    if lines.total:
        failed = f", {lines.failed} with an error" if lines.failed else ""
        parts.append(f"{lines.answered} of {counted(lines.total, 'line')}{failed}")
    if not job.is_over:
        parts.append(f"end: {end_text(job, look.estimate, now_at)}")
    if late := late_text(job, look.estimate, now_at):
        parts.append(late)
    return "; ".join(parts)


class JobProgress:
    """Shows looks at a job: a bar on a terminal; elsewhere a line when its status changes, when the
    connection is lost, and every ten seconds. Use it as a context manager."""

    def __init__(self, to: Console) -> None:
        self._to = to
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            console=to,
            transient=True,
            auto_refresh=False,
            disable=not to.is_terminal,
        )
        self._row = self._bar.add_task("", total=None)
        self._last: tuple[JobStatus, bool] | None = None
        self._printed_s = -math.inf

    def __enter__(self) -> "JobProgress":
        self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()

    def show(self, look: Look, now: float, now_at: float) -> None:
        """`now`: of a monotonic clock; `now_at`: since 1970."""
        line = progress_line(look, now_at)
        if self._to.is_terminal:
            lines = look.job.lines
            self._bar.update(
                self._row,
                total=lines.total or None,
                completed=lines.answered,
                description=line,
                refresh=True,
            )
            return
        state = (look.job.status, look.lost is not None)
        if state != self._last or now - self._printed_s >= LINE_EVERY_S:
            self._last, self._printed_s = state, now
            self._to.print(line, markup=False, highlight=False, soft_wrap=True)


class BytesProgress:
    """A bar of bytes on a terminal; nothing elsewhere. Use it as a context manager."""

    def __init__(self, what: str, total: int | None, to: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            console=to,
            transient=True,
            disable=not to.is_terminal,
        )
        self._row = self._bar.add_task(what, total=total)

    def __enter__(self) -> "BytesProgress":
        self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()

    def show(self, done: int) -> None:
        self._bar.update(self._row, completed=done)
