"""How a study is going: one bar over all runs on a terminal, nothing anywhere else."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class StudyBar:
    """`with StudyBar(runs, console) as bar:` and `bar.show` as runs go on."""

    def __init__(self, runs: int, console: Console) -> None:
        self._shares = [0.0] * runs
        self._ended = [0] * runs
        self._bar = Progress(
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._row = self._bar.add_task("", total=float(runs))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, run: int, ended: int, share: float) -> None:
        """That run has so many requests behind it, and is so far."""
        self._shares[run], self._ended[run] = share, ended
        done = sum(share >= 1.0 for share in self._shares)
        self._bar.update(
            self._row,
            completed=sum(self._shares),
            description=f"{sum(self._ended)} requests, {done} of {len(self._shares)} runs",
        )
