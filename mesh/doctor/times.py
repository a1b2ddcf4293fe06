"""Durations as a report shows them: milliseconds, with as many digits as a measurement bears."""

import re

_GO_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)(s|ms|µs|us|ns))?")
_UNIT_S = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "ns": 1e-9}


def as_ms(seconds: float) -> float:
    """Milliseconds with three significant digits."""
    return float(f"{seconds * 1000:.3g}")


def go_duration_s(text: str) -> float | None:
    """Seconds of a duration as nats-server writes it (`1m2.5s`, `80.469123ms`); None if none."""
    found = _GO_DURATION.fullmatch(text)
    if found is None or not text:
        return None
    hours, minutes, rest, unit = found.groups()
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(rest or 0) * _UNIT_S[unit or "s"]
