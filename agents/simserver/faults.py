"""What can be made to go wrong, for drills: set by `--fault` at the start or POST /sim/faults.

Faults differ in what a caller sees: a slow engine, one that accepts and never answers, one
that answers with errors, one whose stream breaks, one whose process is gone. Rates are drawn
from the server's seed, so a drill repeats.
"""

import random
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.problems import problem_lines


class Hang(StrEnum):
    """What hangs."""

    OFF = "off"
    ENGINE = "engine"  # no tokens any more, also mid-stream; /health and /metrics still answer
    SERVER = "server"  # nothing answers but /sim/faults


class Break(StrEnum):
    """How a stream goes wrong, after `stream_after_tokens` tokens."""

    NONE = "none"
    CUT = "cut"  # the connection ends in the middle of an event
    GARBAGE = "garbage"  # bytes that are no events, then a proper end
    ERROR = "error"  # an error event, [DONE] and a proper end, as a vLLM whose engine core died
    NO_DONE = "no_done"  # a proper end, but without finish reason and [DONE]


class Faults(BaseModel):
    """All switches at once; the defaults are a healthy engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slow: float = Field(default=1.0, ge=1.0, le=1e6, description="times slower than normal")
    hang: Hang = Hang.OFF
    error_rate: float = Field(default=0.0, ge=0.0, le=1.0, description="share of requests")
    error_status: int = Field(default=500, ge=400, le=599)
    stream: Break = Break.NONE
    stream_rate: float = Field(default=1.0, ge=0.0, le=1.0, description="share of streams")
    stream_after_tokens: int = Field(default=1, ge=0, le=1_000_000)
    crash_after_tokens: int | None = Field(
        default=None, ge=0, le=10**9, description="the process dies after so many more tokens"
    )
    adapter_loads_fail: bool = False

    def changed(self, changes: dict[str, object]) -> "Faults":
        """These faults with some switches set anew. Raises FaultsInvalid."""
        try:
            return Faults.model_validate(self.model_dump() | changes)
        except ValidationError as error:
            lines = problem_lines(error, lambda _: Faults.model_fields)
            raise FaultsInvalid("; ".join(lines)) from None


class FaultsInvalid(ValueError):
    """A switch that doesn't exist or a value it can't have; the message says which."""


def parse_switches(switches: tuple[str, ...]) -> Faults:
    """Faults from `name=value` words. Raises FaultsInvalid."""
    changes: dict[str, object] = {}
    for switch in switches:
        name, equals, value = switch.partition("=")
        if not equals:
            raise FaultsInvalid(f"{switch!r}: write name=value, such as slow=3")
        changes[name] = value
    return Faults().changed(changes)


class FaultSwitchboard:
    """The faults now in force, and the dice for those that strike at a rate."""

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self.now = faults
        self._rng = rng
        self._tokens_left = faults.crash_after_tokens

    def set(self, faults: Faults) -> None:
        """Put other faults in force; the count towards a crash starts anew."""
        self.now = faults
        self._tokens_left = faults.crash_after_tokens

    @property
    def slowdown(self) -> float:
        """How many times slower the engine's clock runs; infinite while it hangs."""
        return self.now.slow if self.now.hang is Hang.OFF else float("inf")

    def request_fails(self) -> bool:
        return self.now.error_rate > 0 and self._rng.random() < self.now.error_rate

    def stream_break(self) -> Break:
        if self.now.stream is not Break.NONE and self._rng.random() < self.now.stream_rate:
            return self.now.stream
        return Break.NONE

    def crash_is_due(self, tokens: int = 0) -> bool:
        """Count tokens that came out; True when the process must die."""
        if self._tokens_left is None:
            return False
        self._tokens_left -= tokens
        return self._tokens_left <= 0
