"""What a replay found, for people and for the command that ends with it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mesh.core.recording import Header, Plain
from mesh.core.settings import RouterSettings
from schemas.decision import Placement

SWAPS_SHOWN = 10
NOTHING = "no decision"  # in the place of a place
MEANINGS = {
    Placement.HOLD.value: "the request waits in the router's queue",
    Placement.SHED.value: "the request is refused",
    NOTHING: (
        "that router had nothing to decide at this event, because the request was already "
        "placed, still waited, or had ended"
    ),
}
VALUE_CHARS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An event of which something else came; `line` is its place in the file, from 1.

    `at_s`: seconds since the first event. `where`: the first part of the effects that differs;
    `recorded` and `replayed`: what stands there, None where there is nothing.
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
            f"in what came of {self.event}:\n"
            f"  {self.where}\n"
            f"    recorded: {_short(self.recorded)}\n"
            f"    replayed: {_short(self.replayed)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a replay found. `ended`: the recording's own last word, None if it was cut off.

    `first`: the first effect that differs in anything; `first_decision`: the first request that
    goes to another place. With other settings the former says little: receipts name the policy.
    """

    header: Header
    settings: RouterSettings
    events: int
    span_s: float
    decisions: int
    decisions_changed: int
    swaps: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (was, would be): how often
    first: Difference | None
    first_decision: Difference | None
    ended: str | None

    @property
    def agrees(self) -> bool:
        """Whether every effect of every event was the same."""
        return self.first is None

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
            yield "the recording was cut off: what came in the last second may be missing"
        else:
            yield f"the recording ended with: {self.ended}"
        if self.settings == header.settings:
            yield from self._same_again()
        else:
            yield from self._other_settings()

    def _same_again(self) -> Iterator[str]:
        if self.first is None:
            yield "every decision and every other effect is the same"
            return
        yield f"first difference {self.first}"
        yield from self._decisions()

    def _other_settings(self) -> Iterator[str]:
        if not self.decisions and not self.decisions_changed:
            yield "no request came while this was recorded, so there was nothing to decide"
        elif not self.decisions_changed:
            yield (
                f"none of the {self.decisions} decisions differs: every request would have gone "
                "to the same place at the same moment"
            )
        else:
            yield from self._decisions()
            yield (
                "Up to the first of them this is exact. After it, it is an indication: the "
                "recorded fleet answered to what was decided then. What would have come of the "
                "other choices, `mesh sim` with a --trace or --workload can say."
            )

    def _decisions(self) -> Iterator[str]:
        if self.first_decision is not None:
            yield f"first decision that differs {self.first_decision}"
        yield f"{self.decisions_changed} decisions differ; {self.decisions} were recorded"
        ranked = sorted(self.swaps.items(), key=lambda item: (-item[1], item[0]))
        if ranked:
            yield "  how often  recorded → replayed"
        for (was, would_be), count in ranked[:SWAPS_SHOWN]:
            yield f"  {count:>9}  {was} → {would_be}"
        if len(ranked) > SWAPS_SHOWN:
            yield f"  {sum(count for _, count in ranked[SWAPS_SHOWN:]):>9}  other changes"
        places = {place for pair in self.swaps for place in pair}
        yield from (f"  {place}: {MEANINGS[place]}" for place in MEANINGS if place in places)


def _changed(was: RouterSettings, now: RouterSettings) -> str:
    names = [name for name in was.__slots__ if getattr(was, name) != getattr(now, name)]
    return ", ".join(f"{n} {getattr(now, n)} instead of {getattr(was, n)}" for n in names)


def _short(value: Plain) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_CHARS_MAX else text[:VALUE_CHARS_MAX] + "…"
