"""One cause is one row: what follows from a region's own trouble says so.

A region whose nats-server does not answer can't be reached over any link, and one whose routers
are all silent sends no digest and answers no ping. Both is found again from every other region.
Nothing is left out: such a finding keeps its verdict and names the region in `because`. Where
others reach a region whose server does not answer *us*, it is we who are cut off: its row says so,
nothing follows from it, and there is nothing to start anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from mesh.doctor.findings import Finding, Remedy, Verdict
from mesh.doctor.reach import Silence

# What the routers of a region send at this moment: a server counts a link as up for seconds more.
OF_ROUTERS = ("link", "round trip")

Part = Literal["router", "agent"]
HEARD_OF: Mapping[str, Part] = {"router": "router", "heartbeat": "agent"}  # by check


class ByHand(Protocol):
    """What an operator can do about it."""

    def server(self, region: str, silence: Silence) -> Remedy:
        """Where that region's nats-server does not answer."""
        ...

    def part(self, kind: Part, region: str, name: str) -> Remedy:
        """Where one of its routers is not heard, or a replica's agent."""
        ...

    def stream(self, region: str, name: str) -> Remedy:
        """Where one of its streams is missing or altered."""
        ...


def folded(
    findings: Sequence[Finding], silences: Mapping[str, Silence], by_hand: ByHand
) -> list[Finding]:
    """The findings, led by a row for each server that does not answer (`silences`, by region)."""
    mute = _routers_silent(findings)
    dead = {region for region in silences if not _looks(region, findings)[0]}

    def explained(one: Finding) -> Finding:
        if one.verdict is Verdict.BAD and (kind := HEARD_OF.get(one.check)) is not None:
            return replace(one, remedy=by_hand.part(kind, one.region, one.about))
        if one.verdict is Verdict.BAD and one.check == "stream":
            return replace(one, remedy=by_hand.stream(one.region, one.about))
        if one.verdict is Verdict.OK or one.peer is None:
            return one
        if one.peer in dead or (one.peer in mute and one.check in OF_ROUTERS):
            return replace(one, because=one.peer)
        return one

    rows = [_row(region, silence, findings, by_hand) for region, silence in silences.items()]
    return [*rows, *(explained(one) for one in findings)]


def _routers_silent(findings: Sequence[Finding]) -> set[str]:
    """Regions that have routers of which none was heard at home."""
    routers = [one for one in findings if one.check == "router"]
    heard = {one.region for one in routers if one.verdict is not Verdict.BAD}
    return {one.region for one in routers} - heard


def _row(region: str, silence: Silence, findings: Sequence[Finding], by_hand: ByHand) -> Finding:
    reached, cut_off = _looks(region, findings)
    detail = f"no answer at {silence.url}: {silence.why}"
    if reached:
        detail += f"; but {', '.join(reached)} reach it: is the way from here to there open?"
    elif cut_off:
        detail += f"; nor is it reached from {', '.join(cut_off)}"
    remedy = None if reached else by_hand.server(region, silence)
    return Finding(region, "bus", "server", Verdict.BAD, detail, remedy=remedy)


def _looks(region: str, findings: Sequence[Finding]) -> tuple[list[str], list[str]]:
    """From where routers of that region are heard, and from where they are not at all."""
    looks = [one for one in findings if one.peer == region and one.check in OF_ROUTERS]
    reached = dict.fromkeys(one.region for one in looks if one.verdict is Verdict.OK)
    cut_off = dict.fromkeys(one.region for one in looks if one.region not in reached)
    return list(reached), list(cut_off)
