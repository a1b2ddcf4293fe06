"""Replay: feed a live router's recording to a fresh core and find where the two first differ.

The core has no clock, no randomness and no I/O of its own, so the same header and the same events
must give the same effects. If they do, the recording explains all that the router did; the first
effect that differs names the change (of code, or of settings) that matters. With another policy
the recording answers how many decisions would have been different.

The recorded events are answers to what the recorded router did: heartbeats show the load of its
placements, and attempts end that the other core may never have made. So the replay is exact up to
the first difference, and after it the counts are an indication. What another policy would have
gained is a question for the twin. The replay goes on after the first difference, because that may
be a tie with another winner, and the counts show whether the behaviour differs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, NamedTuple, TypeVar

from mesh.core import recording
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.recording import Plain, RecordedStep, RecordingEnd, RecordingHeader, RecordingInvalid
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from schemas.decision import Placement

SWAPS_MAX = 10_000  # pairs of places counted apart
SWAPS_SHOWN = 10
VALUE_CHARS_MAX = 200
OTHERS = ("others", "others")
NOTHING = "no decision"  # instead of a place
MEANINGS = {
    Placement.HOLD.value: "the request waits in the router's queue",
    Placement.SHED.value: "the request is refused",
    NOTHING: (
        "that router had nothing to decide at this event, because the request was already "
        "placed, still waited, or had ended"
    ),
}

T = TypeVar("T")


class DecisionKey(NamedTuple):
    """The attempt that a decision is about."""

    key: int
    attempt: int
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectDifference:
    """An event with other effects than recorded; `line` is its place in the file, from 1.

    `at_s`: seconds since the first event. `where`: the first part of the effects that differs;
    `recorded` and `replayed`: its values, None where there is none.
    """

    line: int
    at_s: float
    event: str
    where: str
    recorded: Plain
    replayed: Plain

    def __str__(self) -> str:
        return (
            f"at line {self.line}, {self.at_s:.3f} s after the first event, "
            f"in the effects of {self.event}:\n"
            f"  {self.where}\n"
            f"    recorded: {_short(self.recorded)}\n"
            f"    replayed: {_short(self.replayed)}"
        )


@dataclass(slots=True, kw_only=True)
class ReplayComparison:
    """The result of a replay. `ended`: the recording's reason for its end, None if it was cut off.

    `first`: the first effect that differs in anything; `first_decision`: the first request that
    goes to another place. With other settings the former is of little use: receipts name the
    policy.
    """

    header: RecordingHeader
    settings: RouterSettings
    events: int = 0
    span_s: float = 0.0
    decisions: int = 0
    swaps: Counter[tuple[str, str]] = field(default_factory=Counter)  # (recorded, replayed)
    first: EffectDifference | None = None
    first_decision: EffectDifference | None = None
    ended: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether every effect of every event was the same."""
        return self.first is None

    @property
    def decisions_changed(self) -> int:
        return self.swaps.total()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        header = self.header
        yield (
            f"router {header.region}/{header.router}, version {header.version}: "
            f"{self.events} events in {self.span_s:.1f} s, {self.decisions} decisions"
        )
        if self.settings != header.settings:
            yield f"replayed with {_changed(header.settings, self.settings)}"
        if self.ended is None:
            yield "the recording was cut off: the last second may be missing"
        else:
            yield f"the recording ended with: {self.ended}"
        if self.settings == header.settings:
            yield from self._with_same_settings()
        else:
            yield from self._with_other_settings()

    def _with_same_settings(self) -> Iterator[str]:
        if self.first is None:
            yield "every decision and every other effect is the same"
            return
        yield f"first difference {self.first}"
        yield from self._decisions()

    def _with_other_settings(self) -> Iterator[str]:
        if not self.decisions and not self.swaps:
            yield "no request came while this was recorded, so there was nothing to decide"
        elif not self.swaps:
            yield (
                f"none of the {self.decisions} decisions differs: every request would have gone "
                "to the same place at the same moment"
            )
        else:
            yield from self._decisions()
            yield (
                "Up to the first of them this is exact. After it, it is an indication: the "
                "recorded heartbeats and answers follow from the recorded decisions. To see the "
                "effects of the other decisions, run `mesh sim` with a --trace or --workload."
            )

    def _decisions(self) -> Iterator[str]:
        if self.first_decision is not None:
            yield f"first decision that differs {self.first_decision}"
        yield f"{self.decisions_changed} decisions differ; {self.decisions} were recorded"
        ranked = sorted(self.swaps.items(), key=lambda item: (-item[1], item[0]))
        if ranked:
            yield "  how often  recorded → replayed"
        for (recorded, replayed), count in ranked[:SWAPS_SHOWN]:
            yield f"  {count:>9}  {recorded} → {replayed}"
        if len(ranked) > SWAPS_SHOWN:
            yield f"  {sum(count for _, count in ranked[SWAPS_SHOWN:]):>9}  other changes"
        places = {place for pair in self.swaps for place in pair}
        yield from (f"  {place}: {MEANINGS[place]}" for place in MEANINGS if place in places)


def replay(path: Path, **changed: Any) -> ReplayComparison:
    """Feed the recording to a fresh core; `changed`: settings that shall differ, e.g. `policy`.

    Raises OSError, RecordingInvalid for a file that can't be read (both name the file), and
    ValueError for a setting out of range.
    """
    with path.open("rb") as file:
        return _Replay(RecordingFile(path, file), changed).run()


class RecordingFile:
    """A recording's header and its steps, in order; `ended` and `line` show how far it was read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self.line = 0
        self.ended: str | None = None
        self.header: RecordingHeader = self._decoded(
            recording.decode_header, self._next_line() or b""
        )

    def steps(self) -> Iterator[RecordedStep]:
        """Every step. A last line that a crash cut short is left out. Raises RecordingInvalid."""
        while (line := self._next_line()) is not None:
            found = self._decoded(recording.decode_line, line)
            if isinstance(found, RecordingEnd):
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


class _Replay:
    """One run through a file."""

    def __init__(self, file: RecordingFile, changed: Mapping[str, Any]) -> None:
        header = file.header
        self._file, self._changed = file, changed
        self._found = ReplayComparison(header=header, settings=replace(header.settings, **changed))
        self._core = RouterCore(
            RouterState(
                region=header.region,
                router=header.router,
                epoch=header.epoch,
                settings=self._found.settings,
                dice=Random(header.seed),
                peers=header.peers,
            )
        )
        self._began: float | None = None

    def run(self) -> ReplayComparison:
        for step in self._file.steps():
            if self._began is None:
                self._began = step.now
            self._found.span_s = step.now - self._began
            self._found.events += 1
            self._compare(step, self._effects(step))
        self._found.ended = self._file.ended
        return self._found

    def _effects(self, step: RecordedStep) -> list[Plain]:
        try:
            return recording.plain_effects(self._core.handle(self._event(step), step.now))
        except Exception as error:  # the recorded core may have raised here, too
            return recording.plain_error(error)

    def _event(self, step: RecordedStep) -> ev.Event:
        """The event; what is to differ also differs in settings that the router took over later."""
        if isinstance(step.event, ev.SettingsChanged) and self._changed:
            return ev.SettingsChanged(replace(step.event.settings, **self._changed))
        return step.event

    def _compare(self, step: RecordedStep, effects: list[Plain]) -> None:
        found = self._found
        recorded = _places(step.effects)
        found.decisions += len(recorded)
        if effects == step.effects:
            return
        if found.first is None:
            where = _first_difference(step.effects, effects, "effects")
            found.first = self._difference(step.event, *where)
        replayed = _places(effects)
        for key in sorted(recorded.keys() | replayed.keys()):
            swap = recorded.get(key, NOTHING), replayed.get(key, NOTHING)
            if swap[0] == swap[1]:
                continue
            counted = swap in found.swaps or len(found.swaps) < SWAPS_MAX
            found.swaps[swap if counted else OTHERS] += 1
            if found.first_decision is None:
                attempt = f"attempt {key.attempt} of request {key.request}"
                found.first_decision = self._difference(step.event, attempt, *swap)

    def _difference(
        self, event: ev.Event, where: str, recorded: Plain, replayed: Plain
    ) -> EffectDifference:
        return EffectDifference(
            line=self._file.line,
            at_s=self._found.span_s,
            event=type(event).__name__,
            where=where,
            recorded=recorded,
            replayed=replayed,
        )


def _places(effects: list[Plain]) -> dict[DecisionKey, str]:
    """Where the decisions among these effects send each request."""
    found = {}
    for effect in effects:
        if (decided := effect.get("Decided")) is not None:
            decision = decided["decision"]
            place = decision["replica"] or decision["peer"] or decision["placement"]
            found[DecisionKey(decided["key"], decision["attempt"], decision["request"])] = place
    return found


def _first_difference(was: Plain, now: Plain, where: str) -> tuple[str, Plain, Plain]:
    """The innermost first part that differs, of two values that do."""
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        parts = [(f"{where}.{name}", was[name], now[name]) for name in was]
    elif isinstance(was, list) and isinstance(now, list):
        parts = [(f"{where}[{at}]", *pair) for at, pair in enumerate(zip_longest(was, now))]
    else:
        return where, was, now
    deeper = next(((path, a, b) for path, a, b in parts if a != b), None)
    return (
        (where, was, now) if deeper is None else _first_difference(deeper[1], deeper[2], deeper[0])
    )


def _changed(was: RouterSettings, now: RouterSettings) -> str:
    names = [name for name in was.__slots__ if getattr(was, name) != getattr(now, name)]
    return ", ".join(f"{n} {getattr(now, n)} instead of {getattr(was, n)}" for n in names)


def _short(value: Plain) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_CHARS_MAX else text[:VALUE_CHARS_MAX] + "…"
