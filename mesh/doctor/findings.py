"""What an examination finds, one line each: a verdict and what it rests on."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How it stands."""

    OK = "ok"
    WARNING = "warning"  # it works, and somebody should look
    BAD = "bad"
    UNKNOWN = "unknown"  # not examined: credentials for it were not given


@dataclass(frozen=True, slots=True)
class Remedy:
    """What an operator can do by hand: in words, and as a command line for a shell."""

    what: str
    command: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about one region. `value`: the measure that belongs to it, in `unit`s.

    `peer`: the region at the other end, where there is one. `because`: the region whose own trouble
    explains this one.
    """

    region: str
    check: str
    about: str
    verdict: Verdict
    detail: str
    value: float | None = None
    unit: str | None = None
    peer: str | None = None
    because: str | None = None
    remedy: Remedy | None = None


@dataclass(slots=True)
class Chart:
    """The findings of one region, as they come in."""

    region: str
    findings: list[Finding]

    def note(
        self,
        check: str,
        about: str,
        verdict: Verdict,
        detail: str,
        value: float | None = None,
        unit: str | None = None,
        *,
        peer: str | None = None,
    ) -> None:
        """Write one down."""
        found = Finding(self.region, check, about, verdict, detail, value, unit, peer)
        self.findings.append(found)


def verdict_if(good: bool, otherwise: Verdict = Verdict.BAD) -> Verdict:
    """OK where it is good."""
    return Verdict.OK if good else otherwise


def is_healthy(findings: list[Finding]) -> bool:
    """Whether nothing is bad."""
    return all(finding.verdict is not Verdict.BAD for finding in findings)
