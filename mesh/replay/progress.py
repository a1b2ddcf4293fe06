"""How a run is going: a bar on a terminal, a plain line now and then anywhere else."""

import asyncio
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mesh.replay.run import Replay
from mesh.replay.tally import Outcome

BAR_EVERY_S = 0.25
LINE_EVERY_S = 10.0


class ProgressView:
    """`async with ProgressView(replay, console)`: shows the run until the block ends."""

    def __init__(
        self, replay: Replay, console: Console, *, line_every_s: float = LINE_EVERY_S
    ) -> None:
        self._replay = replay
        self._console = console
        self._line_every_s = line_every_s
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
        )
        self._row = self._bar.add_task("", total=len(replay.plan))
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watcher:
            self._watcher.cancel()
        if self._console.is_terminal:
            self._bar.stop()

    async def _watch(self) -> None:
        while True:
            if self._console.is_terminal:
                self._draw()
                await asyncio.sleep(BAR_EVERY_S)
            else:
                await asyncio.sleep(self._line_every_s)
                sent, planned = self._replay.sent, len(self._replay.plan)
                self._console.print(f"{sent} of {planned} sent: {self._counts()}", highlight=False)

    def _draw(self) -> None:
        ended = self._replay.ledger.total.requests
        self._bar.update(self._row, completed=ended, description=self._counts())
        self._bar.refresh()

    def _counts(self) -> str:
        outcomes = self._replay.ledger.total.outcomes
        ends = ", ".join(f"{outcomes[outcome]} {outcome.value}" for outcome in Outcome)
        return f"{ends}, {self._replay.in_flight} in flight"
