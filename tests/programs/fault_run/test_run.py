"""A short run on real processes, and its table."""

import pytest

from tests.programs.fault_run.clients import Request, Router, blame
from tests.programs.fault_run.reading import End
from tests.programs.fault_run.report import table
from tests.programs.fault_run.run import AFTER, BEFORE, Result, Settings, run
from tests.programs.fault_run.schedule import Kind, Shape, faults

SHAPE = Shape(regions=("us", "eu"), routers=("r1",), replicas=1)
KINDS = (Kind.ROUTER_KILLED, Kind.AGENT_STOPPED, Kind.LINK_CUT)
SETTINGS = Settings(
    seed=327,  # short stops and pauses
    shape=SHAPE,
    requests=1,
    faults=len(KINDS),
    kinds=KINDS,
    streams=4,
    quick=True,
    well_s=0.3,
)


@pytest.mark.timeout(240)
async def test_a_short_run_breaks_the_mesh_and_every_request_ends_once(tmp_path):
    shown: list[str] = []
    result = await run(SETTINGS, tmp_path, shown.append)
    text = table(result)
    assert result.violations == [], text
    assert {fault.kind for fault in result.faults} == {*KINDS}
    assert len(shown) == len(KINDS)
    assert sum(one.end is End.WHOLE for one in result.requests) > 10, text
    for row in (BEFORE, *KINDS, AFTER):
        assert f"| {row} | " in text
    assert "violations: 0; seed: 327." in text


def test_a_table_counts_by_what_went_on_and_shows_what_is_wrong():
    fault = next(faults(1, SHAPE, kinds=(Kind.LINK_CUT,)))
    wrong = Request(3, "router-us-r1", 0.0, 2.5, violations=["tokens of two attempts"])
    spells = [
        (BEFORE, Request(1, "router-us-r1", 0.0, 1.0, End.WHOLE)),
        (fault.kind, Request(2, "router-us-r1", 0.0, 1.5, End.REFUSED, "503 no_replica")),
        (fault.kind, wrong),
    ]
    result = Result(SETTINGS, [fault], spells, ["an agent ended by itself"])
    lines = table(result).splitlines()
    assert "| before any fault | 0 | 1 | 1 | 0 | 0 | 0 | 0 | 100.00 | 1.0 |" in lines
    assert "| leaf link cut | 1 | 2 | 0 | 1 | 0 | 0 | 1 | 0.00 | 2.5 |" in lines
    assert "| all | 1 | 3 | 1 | 1 | 0 | 0 | 1 | 33.33 | 2.5 |" in lines
    assert "HTTP errors: 1 × 503 no_replica." in lines
    assert "Requests: 3; faults: 1; violations: 2; seed: 327." in lines
    assert "- request 3 (leaf link cut, router-us-r1): tokens of two attempts" in lines
    assert "- an agent ended by itself" in lines


@pytest.mark.parametrize("end", [end for end in End if end is not End.WHOLE])
def test_before_any_fault_every_request_is_answered_whole(end):
    broken = Request(1, "router-us-r1", 0.0, 1.0, end, "503 no_replica")
    assert Result(SETTINGS, spells=[(BEFORE, broken)]).violations
    whole = Request(1, "router-us-r1", 0.0, 1.0, End.WHOLE)
    assert not Result(SETTINGS, spells=[(BEFORE, whole)]).violations


def test_no_load_of_a_run_saturates_the_mesh():
    spells = [(Kind.AGENT_STOPPED, Request(1, "r", 0.0, 1.0, End.REFUSED, "429 saturated"))]
    assert Result(SETTINGS, spells=spells).violations
    spells = [(Kind.AGENT_STOPPED, Request(1, "r", 0.0, 1.0, End.REFUSED, "503 no_replica"))]
    assert not Result(SETTINGS, spells=spells).violations


def test_a_plain_answer_that_is_cut_is_wrong_where_its_router_lived():
    clock_s = 10.0
    request = Request(1, "r", 9.0)
    lost = blame(Router("r", "u", kills=[9.5]), request, clock_s, "reset")
    assert (lost, request.violations) == (End.ROUTER_LOST, [])
    assert blame(Router("r", "u"), request, clock_s, "reset") is End.WRONG
    assert request.violations == ["its connection broke though its router lived: reset"]


def test_a_broken_connection_is_blamed_on_a_kill_only_if_there_was_one():
    router = Router("router-us-r1", "http://127.0.0.1:1", kills=[10.0])
    assert router.killed_within(9.0, 11.0)
    assert router.killed_within(10.5, 11.0), "its socket may have taken the connection still"
    assert not router.killed_within(12.0, 13.0)
    assert not router.killed_within(8.0, 9.0)
