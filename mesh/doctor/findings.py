"""What an examination finds: one line per check, with a verdict and its reason."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from infra.process import end_all

MonotonicClock = Callable[[], float]
ENGINE_PAGE = "engine page"  # a check: can its agent read all pages of an engine that is up?
ENGINE_RESULTS = "engine results"  # a check: does an engine that is up answer requests?
PEER_RESULTS = "peer results"  # a check: does a region answer what is forwarded to it?
STREAM_WRITES = "stream writes"  # a check: do the region's streams take any?
RegionCheck = Callable[["RegionFindings"], Awaitable[None]]


class CheckResult(StrEnum):
    """The verdict of a check."""

    OK = "ok"
    WARNING = "warning"  # it works, and should be looked into
    BAD = "bad"
    UNKNOWN = "unknown"  # not examined: credentials for it were not given


@dataclass(frozen=True, slots=True)
class Remedy:
    """What an operator can do by hand: in words, and as a command line for a shell."""

    what: str
    command: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about one region. `value`: what was measured, in `unit`.

    `peer`: the region at the other end of a link. `because`: the region whose own failure explains
    this one.
    """

    region: str
    check: str
    about: str
    verdict: CheckResult
    detail: str
    value: float | None = None
    unit: str | None = None
    peer: str | None = None
    because: str | None = None
    remedy: Remedy | None = None


@dataclass(slots=True)
class RegionFindings:
    """The findings of one region, in the order in which they are added."""

    region: str
    findings: list[Finding] = field(default_factory=list)

    def add(
        self,
        check: str,
        about: str,
        verdict: CheckResult,
        detail: str,
        value: float | None = None,
        unit: str | None = None,
        *,
        peer: str | None = None,
    ) -> None:
        found = Finding(self.region, check, about, verdict, detail, value, unit, peer)
        self.findings.append(found)

    async def run_concurrently(self, *checks: RegionCheck) -> None:
        """Run all at once and add what they find in their order, whichever ends first.

        If one raises, the others are cancelled and what they had found is kept.
        """
        parts = [RegionFindings(self.region) for _ in checks]

        async def run(check: RegionCheck, part: RegionFindings) -> None:
            await check(part)

        tasks = [asyncio.create_task(run(*pair)) for pair in zip(checks, parts, strict=True)]
        try:
            await asyncio.gather(*tasks)
        finally:
            try:
                await end_all(tasks)
            finally:
                self.findings += [one for part in parts for one in part.findings]


def result_if(good: bool, otherwise: CheckResult = CheckResult.BAD) -> CheckResult:
    return CheckResult.OK if good else otherwise


def is_healthy(findings: list[Finding]) -> bool:
    return all(finding.verdict is not CheckResult.BAD for finding in findings)


def remedies(findings: list[Finding]) -> list[tuple[str, Remedy]]:
    """Each once, with its region: first those of what is bad."""
    bad_first = sorted(findings, key=lambda one: one.verdict is not CheckResult.BAD)
    return list(dict.fromkeys((one.region, one.remedy) for one in bad_first if one.remedy))


_GO_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)(s|ms|µs|us|ns))?")
_UNIT_S = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "ns": 1e-9}


def as_ms(seconds: float) -> float:
    """Milliseconds with three significant digits."""
    return float(f"{seconds * 1000:.3g}")


def go_duration_s(text: str) -> float | None:
    """Seconds of a duration as nats-server writes it (`1m2.5s`, `80.469123ms`), or None."""
    found = _GO_DURATION.fullmatch(text)
    if found is None or not text:
        return None
    hours, minutes, rest, unit = found.groups()
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(rest or 0) * _UNIT_S[unit or "s"]
