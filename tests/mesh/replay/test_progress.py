"""What is shown while a run goes on."""

import asyncio
import io
import random

import pytest
from rich.console import Console

from mesh.replay.play import OpenLoop, progress_shown
from mesh.replay.schedule import Departure
from mesh.replay.tally import RequestOutcome, RequestResult, RunTally
from mesh.replay.trace import TraceRequest
from tests.support.until import PATIENCE_S


class Screen(io.StringIO):
    """A console's file with an event for each text that is written."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self._wanted = wanted
        self.shown = asyncio.Event()

    def write(self, text: str) -> int:
        size = super().write(text)
        if self._wanted in self.getvalue():
            self.shown.set()
        return size


@pytest.mark.parametrize(
    ("terminal", "wanted"),
    [
        (True, "2/3 1 ok, 1 shed, 0 failed, 0 in flight"),
        (False, "2 of 3 sent: 1 ok, 1 shed, 0 failed, 0 in flight\n"),
    ],
)
async def test_counts_are_shown_while_the_run_goes_on(terminal: bool, wanted: str) -> None:
    answers = iter(
        [RequestResult(RequestOutcome.OK), RequestResult(RequestOutcome.SHED, "status_429")]
    )

    async def ask(region: str, body: bytes, due_s: float) -> RequestResult:
        return next(answers)

    plan = [Departure(n, due_s, "us", TraceRequest(0, 1, 1)) for n, due_s in enumerate((0, 0, 99))]
    ledger = RunTally(("us",), random.Random(0))
    replay = OpenLoop(plan, ask, lambda departure: b"", ledger, max_in_flight=9)
    screen = Screen(wanted)
    console = Console(file=screen, force_terminal=terminal, color_system=None, width=120)
    async with progress_shown(replay, console, line_every_s=0.01):
        running = asyncio.create_task(replay.run())
        async with asyncio.timeout(PATIENCE_S):
            await screen.shown.wait()
        replay.stop()
        await running
    assert ledger.total.requests == 2
