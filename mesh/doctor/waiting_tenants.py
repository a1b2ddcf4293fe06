"""Whose requests wait in the routers of all regions, where one tenant has most of them."""

from collections import Counter
from collections.abc import Iterable

from schemas.explain import OTHERS, RouterRequests
from schemas.ids import RegionId

WAITING_MIN = 16  # requests; fewer wait at any busy moment
NAMED_MAX = 3


def flood(answers: Iterable[RouterRequests]) -> tuple[RegionId, str, str] | None:
    """The tenant that more than half of the waiting requests are of, after the region where most of
    them wait and before what that is beside the others' in words; None where few wait, there is no
    such tenant, or no other. Over all regions: routers spread a flood."""
    waiting, work = Counter[str](), Counter[str]()
    places = Counter[tuple[str, RegionId]]()
    for region, one in ((told.region, one) for told in answers for one in told.tenants):
        waiting[one.tenant] += one.waiting
        work[one.tenant] += one.tokens
        places[one.tenant, region] += one.waiting
    if waiting.total() < WAITING_MIN or len(waiting) < 2:
        return None
    first, *others = sorted(waiting, key=lambda one: (one == OTHERS, -waiting[one], -work[one]))
    if 2 * waiting[first] <= waiting.total():
        return None

    total = work.total()
    shares = {one: f", {100 * work[one] / total:.0f} %" if total else "" for one in waiting}
    lately = " of the last minute's work" if total else ""
    held = sorted((-n, region) for (tenant, region), n in places.items() if tenant == first and n)
    where = ", ".join(f"{region} {-n}" for n, region in held)
    said = [
        f"{waiting[first]} of {waiting.total()} waiting requests ({where}){shares[first]}{lately}"
    ]
    said += [f"{_name(one)}: {waiting[one]}{shares[one]}" for one in others[: NAMED_MAX - 1]]
    return held[0][1], _name(first), "; ".join(said)


def _name(tenant: str) -> str:
    return {"": "no tenant", OTHERS: "others"}.get(tenant, tenant)
