"""Replay: a live router's recording, fed to a fresh core, and where the two first differ.

The core has no clock, no chance and no world of its own, so the same header and the same events
must give the same effects. If they do, the recording explains all that the router did; the first
effect that differs names the change (of code, or of settings) that would have mattered. With
another policy the recording is a question: how many decisions would have been others?

That question has a limit. The events are answers to what the recorded router did: heartbeats
show the load of its placements, attempts end that the other core may never have made. Up to the
first difference the replay is exact; after it the counts are an indication. What another policy
would have gained is asked of the twin, whose world answers back.

Rejected: stopping at the first difference. One difference may be a tie that fell otherwise; the
counts tell it from another behaviour.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, NamedTuple, TypeVar

from mesh.core import events as ev
from mesh.core import recording
from mesh.core.recording import End, Header, Plain, RecordingInvalid, Step
from mesh.core.router import RouterCore
from mesh.sim.verdict import NOTHING, Difference, Verdict

SWAPS_MAX = 10_000  # pairs of places counted apart
OTHERS = ("others", "others")

T = TypeVar("T")


class Case(NamedTuple):
    """What one decision was about."""

    key: int
    attempt: int
    request: str


class RecordingFile:
    """A recording's header and its steps, in order; `ended` and `line` tell how far it went."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self.line = 0
        self.ended: str | None = None
        self.header: Header = self._decoded(recording.decode_header, self._next_line() or b"")

    def steps(self) -> Iterator[Step]:
        """Every step. A last line that a crash cut short is left out. Raises RecordingInvalid."""
        while (line := self._next_line()) is not None:
            found = self._decoded(recording.decode_line, line)
            if isinstance(found, End):
                self.ended = found.why
                return
            yield found

    def _next_line(self) -> bytes | None:
        line = self._file.readline(recording.LINE_BYTES_MAX + 1)
        if len(line) > recording.LINE_BYTES_MAX:
            raise RecordingInvalid(f"{self._path}: line {self.line + 1} is too long for a step")
        if not line.endswith(b"\n"):
            return None
        self.line += 1
        return line

    def _decoded(self, decode: Callable[[bytes], T], line: bytes) -> T:
        try:
            return decode(line)
        except RecordingInvalid as error:
            raise RecordingInvalid(f"{self._path}: line {max(1, self.line)}: {error}") from error


def replay(path: Path, **changed: Any) -> Verdict:
    """Feed the recording to a fresh core; `changed`: settings that shall differ, e.g. `policy`.

    Raises OSError, RecordingInvalid for a file that can't be read (both name the file), and
    ValueError for a setting out of range. Print the verdict, and end with failure unless it
    `agrees` or settings were changed.
    """
    with path.open("rb") as file:
        return _Replay(RecordingFile(path, file), changed).run()


class _Replay:
    """One run through a file."""

    def __init__(self, file: RecordingFile, changed: Mapping[str, Any]) -> None:
        header = file.header
        self._file = file
        self._settings = replace(header.settings, **changed)
        self._core = RouterCore(
            region=header.region,
            router=header.router,
            epoch=header.epoch,
            settings=self._settings,
            dice=Random(header.seed),
            peers=header.peers,
        )
        self._events = 0
        self._began = self._now = 0.0
        self._decisions = 0
        self._swaps: Counter[tuple[str, str]] = Counter()
        self._first: Difference | None = None
        self._first_decision: Difference | None = None

    def run(self) -> Verdict:
        for step in self._file.steps():
            self._step(step)
        return Verdict(
            header=self._file.header,
            settings=self._settings,
            events=self._events,
            span_s=self._now - self._began,
            decisions=self._decisions,
            decisions_changed=self._swaps.total(),
            swaps=dict(self._swaps),
            first=self._first,
            first_decision=self._first_decision,
            ended=self._file.ended,
        )

    def _step(self, step: Step) -> None:
        self._now = step.now
        if not self._events:
            self._began = step.now
        self._events += 1
        effects = self._effects(step.event)
        was = _places(step.effects)
        self._decisions += len(was)
        if effects == step.effects:
            return
        if self._first is None:
            self._first = self._difference(
                step, *_first_difference(step.effects, effects, "effects")
            )
        would_be = _places(effects)
        for case in sorted(was.keys() | would_be.keys()):
            swap = was.get(case, NOTHING), would_be.get(case, NOTHING)
            if swap[0] != swap[1]:
                self._swapped(step, case, swap)

    def _swapped(self, step: Step, case: Case, swap: tuple[str, str]) -> None:
        known = swap in self._swaps or len(self._swaps) < SWAPS_MAX
        self._swaps[swap if known else OTHERS] += 1
        if self._first_decision is None:
            where = f"attempt {case.attempt} of request {case.request}"
            self._first_decision = self._difference(step, where, *swap)

    def _effects(self, event: ev.Event) -> list[Plain]:
        try:
            return recording.plain_effects(self._core.handle(event, self._now))
        except Exception as error:  # the recorded core may have broken here, too
            return recording.plain_error(error)

    def _difference(self, step: Step, where: str, recorded: Plain, replayed: Plain) -> Difference:
        return Difference(
            line=self._file.line,
            at_s=step.now - self._began,
            event=type(step.event).__name__,
            where=where,
            recorded=recorded,
            replayed=replayed,
        )


def _places(effects: list[Plain]) -> dict[Case, str]:
    """Where the decisions among these effects send each request."""
    found = {}
    for effect in effects:
        if (decided := effect.get("Decided")) is not None:
            decision = decided["decision"]
            place = decision["replica"] or decision["peer"] or decision["placement"]
            found[Case(decided["key"], decision["attempt"], decision["request"])] = place
    return found


def _first_difference(was: Plain, now: Plain, where: str) -> tuple[str, Plain, Plain]:
    """The innermost first part that differs, of two values that do."""
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        pairs = [(f"{where}.{name}", was[name], now[name]) for name in was]
    elif isinstance(was, list) and isinstance(now, list):
        length = max(len(was), len(now))
        padded = zip(_padded(was, length), _padded(now, length), strict=True)
        pairs = [(f"{where}[{index}]", *pair) for index, pair in enumerate(padded)]
    else:
        return where, was, now
    deeper = next(((path, a, b) for path, a, b in pairs if a != b), None)
    return (
        (where, was, now) if deeper is None else _first_difference(deeper[1], deeper[2], deeper[0])
    )


def _padded(values: list[Plain], length: int) -> list[Plain]:
    return values + [None] * (length - len(values))
