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
class Finding:
    """One thing about one region. `value`: the measure that belongs to it, in `unit`s."""

    region: str
    check: str
    about: str
    verdict: Verdict
    detail: str
    value: float | None = None
    unit: str | None = None


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
    ) -> None:
        """Write one down."""
        self.findings.append(Finding(self.region, check, about, verdict, detail, value, unit))


def verdict_if(good: bool, otherwise: Verdict = Verdict.BAD) -> Verdict:
    """OK where it is good."""
    return Verdict.OK if good else otherwise


def is_healthy(findings: list[Finding]) -> bool:
    """Whether nothing is bad."""
    return all(finding.verdict is not Verdict.BAD for finding in findings)
