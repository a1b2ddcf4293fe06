"""What a region must not be able to say to a peer: every name that it has no right to."""

from collections.abc import Collection

from infra.nats import permissions
from infra.nats.permissions import covers, widest
from schemas import subjects
from schemas.catalog import CHANNELS

# Subjects of NATS itself: services, JetStream, key-value buckets, object stores, system events.
NATS_OWN = ("$JS.>", "$KV.>", "$O.>", "$SRV.>", "$SYS.>", "anything.else")


def everything(region: str) -> tuple[str, str]:
    """Patterns of all that a region owns."""
    return f"{subjects.ROOT}.{region}.>", subjects.inboxes(region)


def unspoken(speaker: str, listener: str, regions: Collection[str]) -> tuple[str, ...]:
    """All patterns of the channel table, for every region, that `spoken` leaves out."""
    allowed = permissions.allowed_across(speaker, listener)
    named = [
        *(
            row.subject(region=region, asker=asker)
            for region in (speaker, listener)
            for asker in regions
            for row in CHANNELS
        ),
        *(subjects.inboxes(region) for region in (speaker, listener)),
        *(
            pattern
            for third in sorted(set(regions) - {speaker, listener})
            for pattern in everything(third)
        ),
        *NATS_OWN,
    ]
    return widest(p for p in named if not any(covers(may, p) for may in allowed))


def concrete(patterns: tuple[str, ...]) -> list[str]:
    """A subject for each pattern."""
    return [pattern.replace("*", "x").replace(">", "x.y") for pattern in patterns]


def overlaps(a: str, b: str) -> bool:
    """Whether some subject is matched by both."""
    a_tokens, b_tokens = a.split("."), b.split(".")
    for left, right in zip(a_tokens, b_tokens, strict=False):
        if ">" in (left, right):
            return True
        if left != right and "*" not in (left, right):
            return False
    return len(a_tokens) == len(b_tokens)
