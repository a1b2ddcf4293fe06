"""Whose requests wait in a region's routers, where one tenant has most of them."""

from collections import Counter
from collections.abc import Iterable

from schemas.explain import OTHERS, RouterRequests

WAITING_MIN = 16  # requests; fewer wait at any busy moment
NAMED_MAX = 3


def flood(answers: Iterable[RouterRequests]) -> tuple[str, str] | None:
    """The tenant that more than half of the waiting requests are of, and what that is beside the
    others' in words; None where few wait, there is no such tenant, or no other."""
    waiting, work = Counter[str](), Counter[str]()
    for one in (one for answer in answers for one in answer.tenants):
        waiting[one.tenant] += one.waiting
        work[one.tenant] += one.tokens
    if waiting.total() < WAITING_MIN or len(waiting) < 2:
        return None
    first, *others = sorted(waiting, key=lambda one: (one == OTHERS, -waiting[one], -work[one]))
    if 2 * waiting[first] <= waiting.total():
        return None

    total = work.total()
    shares = {one: f", {100 * work[one] / total:.0f} %" if total else "" for one in waiting}
    lately = " of the last minute's work" if total else ""
    said = [f"{waiting[first]} of {waiting.total()} waiting requests{shares[first]}{lately}"]
    said += [f"{_name(one)}: {waiting[one]}{shares[one]}" for one in others[: NAMED_MAX - 1]]
    return _name(first), "; ".join(said)


def _name(tenant: str) -> str:
    return {"": "no tenant", OTHERS: "others"}.get(tenant, tenant)
