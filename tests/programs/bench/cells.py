"""What is asked of every system: lengths, paces, how many at once, and by which client.

The gap of 5 ms between events is a fast small model's; that of 50 ms makes 20 tokens a second.
"""

from dataclasses import dataclass
from enum import StrEnum


class Client(StrEnum):
    """Who asks."""

    WRK = "wrk"
    OWN = "own"  # `stream_client`, which sees every event
    AIPERF = "aiperf"


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the benchmark."""

    name: str
    client: Client
    prompt_tokens: int
    events: int  # of an answer; 0: not streamed
    gap_ms: int
    streams: int  # at once
    seconds: float = 2.0  # wrk: how long
    each: int = 1  # others: streams one after another on each connection
    ramp_s: float = 0.0
    acks_at_once: bool = False  # own: see `stream_client`
    in_step: bool = True  # the engine sends the events of all streams together, or each in its time
    is_quick: bool = False

    def title(self) -> str:
        """In words."""
        answer = f"{self.events} events {self.gap_ms} ms apart" if self.events else "plain"
        many = f"{self.streams:,} at once"
        acks = ", acknowledged at once" if self.acks_at_once else ""
        step = "" if self.in_step else ", out of step"
        how = f"{many}{step}, by {self.client}{acks}"
        return f"{self.name}: {self.prompt_tokens:,} tokens, {answer}, {how}"


CELLS = (
    Cell("plain", Client.WRK, 200, 0, 0, 64, is_quick=True),
    Cell("plain-4k", Client.WRK, 4_000, 0, 0, 64),
    Cell("stream", Client.WRK, 200, 32, 5, 64, is_quick=True),
    Cell("one", Client.OWN, 200, 32, 5, 1, each=12),
    Cell("one-acked", Client.OWN, 200, 32, 5, 1, each=24, acks_at_once=True, is_quick=True),
    Cell("many", Client.OWN, 200, 32, 5, 64, each=12, ramp_s=0.16, is_quick=True),
    Cell(
        "many-acked",
        Client.OWN,
        200,
        32,
        5,
        64,
        each=12,
        ramp_s=0.16,
        acks_at_once=True,
        is_quick=True,
    ),
    Cell(
        "apart-acked",
        Client.OWN,
        200,
        32,
        5,
        64,
        each=12,
        ramp_s=0.16,
        acks_at_once=True,
        in_step=False,
        is_quick=True,
    ),
    Cell("many-4k", Client.OWN, 4_000, 32, 5, 64, each=12, ramp_s=0.16),
    Cell("long-answers", Client.OWN, 4_000, 512, 10, 64, ramp_s=0.5),
    Cell("long-prompts", Client.OWN, 100_000, 32, 5, 1, each=12, is_quick=True),
    Cell("thousand", Client.OWN, 200, 60, 50, 1_000, ramp_s=2.0, is_quick=True),
    Cell("aiperf", Client.AIPERF, 200, 32, 5, 64, each=4),
)


def chosen(only: frozenset[str], is_quick: bool) -> tuple[Cell, ...]:
    """Those that are named; if none is, all, or all quick ones."""
    named = tuple(cell for cell in CELLS if cell.name in only)
    return named or tuple(cell for cell in CELLS if cell.is_quick or not is_quick)
