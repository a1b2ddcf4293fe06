"""What a planned fleet must do, and whether a run did it.

Every region counts by itself: a fleet that serves two regions well and leaves the third waiting
does not meet its target, however good the mean. A request that was shed or failed has no time to
first token, so how many may be lost is part of the target.
"""

from dataclasses import dataclass

from mesh.replay.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Seconds; answers a second over all regions; and the share of requests that may be lost."""

    ttft_p90_s: float
    throughput_per_s: float | None = None
    lost_max: float = 0.01

    def missed(self, report: Report) -> dict[str, str]:
        """Each region that misses its part and how; empty if none does."""
        found = {region: self._missed(figures) for region, figures in report["regions"].items()}
        return {region: why for region, why in found.items() if why}

    def met(self, report: Report) -> bool:
        """Whether the whole target is met."""
        return not self.missed(report) and not self.is_slow(report)

    def is_slow(self, report: Report) -> bool:
        """Whether too few answers came a second, over all regions."""
        wanted = self.throughput_per_s
        return wanted is not None and throughput_per_s(report) < wanted

    def _missed(self, figures: Report) -> str:
        requests, ok = figures["requests"], figures["ok"]
        if requests - ok > self.lost_max * requests:
            return f"{(requests - ok) / requests:.1%} lost"
        p90_s = figures["ttft_s"]["p90"]
        if p90_s is not None and p90_s > self.ttft_p90_s:
            return f"TTFT p90 {p90_s:.2f} s"
        return ""


def throughput_per_s(report: Report) -> float:
    """Complete answers a second."""
    duration_s: float = report["duration_s"]
    return report["ok"] / duration_s if duration_s else 0.0
