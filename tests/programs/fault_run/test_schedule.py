"""What is done to the mesh follows from the seed alone."""

from collections import Counter
from itertools import islice

import pytest

from tests.programs.fault_run.schedule import (
    QUICK_REGION_STOP_S,
    QUICK_STOP_S,
    REGION_STOP_S,
    REGION_STOPS,
    STOP_S,
    Kind,
    Shape,
    faults,
    one_round,
)

SHAPE = Shape(regions=("us", "eu", "ap"), routers=("r1", "r2"), replicas=2)
PROGRAMS = {
    *(f"nats-{region}" for region in SHAPE.regions),
    *(f"router-{region}-{router}" for region in SHAPE.regions for router in SHAPE.routers),
    *(f"{kind}-{r}-{at}" for kind in ("agent", "engine") for r in SHAPE.regions for at in (0, 1)),
}
ROUNDS = 40


def some(seed: int = 1, *, quick: bool = False, kinds: tuple[Kind, ...] = tuple(Kind)):
    return list(islice(faults(seed, SHAPE, kinds=kinds, quick=quick), ROUNDS * len(one_round())))


def test_the_same_seed_is_the_same_run_and_another_is_another():
    assert some(1) == some(1)
    assert some(1) != some(2)


def test_every_round_has_every_kind():
    played, size = some(), len(one_round())
    for start in range(0, len(played), size):
        counts = Counter(fault.kind for fault in played[start : start + size])
        assert counts == {**dict.fromkeys(Kind, 1), Kind.REGION_STOPPED: REGION_STOPS}


def test_only_the_chosen_kinds_happen():
    assert {fault.kind for fault in some(kinds=(Kind.LINK_CUT,))} == {Kind.LINK_CUT}


def test_every_program_and_link_has_its_turn_and_no_other():
    played = some()
    assert {name for fault in played for name in fault.programs} == PROGRAMS
    assert {fault.link for fault in played if fault.link} == {*SHAPE.links}
    for fault in played:
        assert bool(fault.programs) != bool(fault.link)
        assert fault.what


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_killed_has_no_end_and_what_is_stopped_one_within_its_limits(quick):
    usual = QUICK_STOP_S if quick else STOP_S
    whole = QUICK_REGION_STOP_S if quick else REGION_STOP_S
    for fault in some(quick=quick):
        if fault.kind.endswith("killed"):
            assert fault.lasts_s is None
        else:
            least, most = whole if fault.kind is Kind.REGION_STOPPED else usual
            assert fault.lasts_s is not None
            assert least <= fault.lasts_s <= most
