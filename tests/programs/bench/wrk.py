"""Load by wrk, an independent client: its script, its command line, its report."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.programs.bench.request_bodies import NUMBER_DIGITS, RequestBody

NAME = "wrk"
_BROKEN = re.compile(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)")
_UNIT_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}
_SCRIPT = """\
local number = %(first)d
local head = { ["content-type"] = "application/json" }
local before, after = [==[%(before)s]==], [==[%(after)s]==]
request = function()
  number = number + 1
  return wrk.format("POST", "/v1/chat/completions", head,
    before .. string.format("%%0%(digits)dd", number) .. after)
end
"""


@dataclass(frozen=True, slots=True)
class Report:
    """wrk's report of one run; latencies are those of whole answers."""

    answered: int
    seconds: float
    latency_p50_ms: float
    latency_p99_ms: float
    failed: int  # other statuses, and connections that broke or kept silent


class NoReport(RuntimeError):
    """wrk printed something else; the message quotes it."""


def program() -> str | None:
    """Where wrk is, or None."""
    return shutil.which(NAME)


def script(ask: RequestBody, first: int) -> str:
    """Lua that asks again and again, with numbers from `first` on."""
    fields = {"before": ask.before, "after": ask.after, "first": first, "digits": NUMBER_DIGITS}
    return _SCRIPT % fields


def command(url: str, script_file: Path, *, streams: int, seconds: float) -> tuple[str, ...]:
    """One thread, which is enough for a router and leaves it a core."""
    return (
        *(NAME, "--threads", "1", "--connections", str(streams)),
        *("--duration", f"{seconds:.0f}s", "--timeout", "30s", "--latency"),
        *("--script", str(script_file), f"{url}/v1/chat/completions"),
    )


def parse(text: str) -> Report:
    """Read wrk's report. Raises NoReport."""
    done = re.search(r"(\d+) requests in ([\d.]+)(us|ms|s|m)\b", text)
    if done is None:
        raise NoReport(f"wrk gave no report: {text.strip()[-400:]!r}")
    errors = _BROKEN.search(text)
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    bad = int(refused[1]) if refused else 0
    return Report(
        answered=int(done[1]) - bad,
        seconds=float(done[2]) * _UNIT_MS[done[3]] / 1e3,
        latency_p50_ms=_latency_ms(text, 50),
        latency_p99_ms=_latency_ms(text, 99),
        failed=bad + (sum(map(int, errors.groups())) if errors else 0),
    )


def _latency_ms(text: str, percent: int) -> float:
    found = re.search(rf"^\s*{percent}%\s+([\d.]+)(us|ms|s|m)\s*$", text, re.MULTILINE)
    if found is None:
        raise NoReport(f"wrk named no latency at {percent} %: {text.strip()[-400:]!r}")
    return float(found[1]) * _UNIT_MS[found[2]]
