"""Pushing: when a replica may be given more work (SkyWalker 3.3 compares the three).

`blind` (BP): always; the engine queues what it can't run. `outstanding:N` (SP-O): while fewer
than N requests are in it or on their way. `pending` (SP-P): while nothing waits in it, which
adapts to how long requests are; the default.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

OUTSTANDING_MAX = 100_000


class PushingKind(StrEnum):
    """The three rules."""

    BLIND = "blind"
    OUTSTANDING = "outstanding"
    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class Pushing:
    """One rule. `outstanding_max`: requests in a replica, for OUTSTANDING alone."""

    kind: PushingKind
    outstanding_max: int = 0

    def __str__(self) -> str:
        if self.kind is PushingKind.OUTSTANDING:
            return f"{self.kind}:{self.outstanding_max}"
        return str(self.kind)


BLIND, PENDING = Pushing(PushingKind.BLIND), Pushing(PushingKind.PENDING)


def parse_pushing(text: str) -> Pushing:
    """Read `blind`, `pending` or `outstanding:N`. Raises ValueError that says what fits."""
    if text in ("blind", "pending"):
        return Pushing(PushingKind(text))
    match = re.fullmatch(r"outstanding:([0-9]{1,9})", text)
    if match is not None and 1 <= (most := int(match[1])) <= OUTSTANDING_MAX:
        return Pushing(PushingKind.OUTSTANDING, most)
    raise ValueError(
        f"pushing is blind, pending or outstanding:N with N from 1 to {OUTSTANDING_MAX}, "
        f"not {text[:40]!r}"
    )
