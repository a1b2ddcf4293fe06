"""A run as a table: what was done, and how the requests that ended meanwhile ended."""

from collections import Counter

from tests.programs.fault_run.reading import End
from tests.programs.fault_run.run import AFTER, BEFORE, Result
from tests.programs.fault_run.schedule import Kind

VIOLATIONS_SHOWN = 20


def table(result: Result) -> str:
    """Markdown: a row for each kind of fault, the HTTP errors by code, and every violation."""
    seen = {spell for spell, _ in result.spells}
    spells = [spell for spell in (BEFORE, *Kind, AFTER) if spell in seen]
    done = Counter(str(fault.kind) for fault in result.faults)
    lines = [
        "| while | faults | requests | " + " | ".join(End) + " | whole % | slowest s |",
        "| --- " + "| ---: " * (4 + len(End)) + "|",
        *(_row(result, str(spell), done[str(spell)]) for spell in spells),
        _row(result, "all", len(result.faults)),
        "",
    ]
    codes = Counter(one.detail for one in result.requests if one.end is End.REFUSED)
    lines += [f"HTTP errors: {', '.join(f'{n} × {c}' for c, n in codes.most_common()) or 'none'}."]
    violations = result.violations
    lines += [
        f"Requests: {len(result.requests)}; faults: {len(result.faults)}; "
        f"violations: {len(violations)}; seed: {result.settings.seed}."
    ]
    lines += [f"- {line}" for line in violations[:VIOLATIONS_SHOWN]]
    if len(violations) > VIOLATIONS_SHOWN:
        lines.append(f"- and {len(violations) - VIOLATIONS_SHOWN} more")
    return "\n".join(lines)


def _row(result: Result, spell: str, faults: int) -> str:
    requests = [one for name, one in result.spells if spell in (name, "all")]
    ends = Counter(one.end for one in requests)
    slowest = max((one.seconds for one in requests), default=0.0)
    whole = 100.0 * ends[End.WHOLE] / max(1, len(requests))
    counts = " | ".join(str(ends[end]) for end in End)
    return f"| {spell} | {faults} | {len(requests)} | {counts} | {whole:.2f} | {slowest:.1f} |"
