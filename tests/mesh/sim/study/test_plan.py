"""Plans by hand: peaks that shift, targets that can't be met, simulations that run out."""

from collections.abc import Mapping
from functools import cache

import pytest

from agents.sim.profiles import L4_LLAMA
from mesh.replay.report import RunReport
from mesh.sim.config import WorldConfig
from mesh.sim.study.plan import Plan, Planner, PlanTarget, ReplicaCounts, Simulations, demand_of
from mesh.sim.workload import Arrival, RequestNode, Segment, Workload
from mesh.sim.world import run
from schemas.ids import RegionId

US, EU, AP = RegionId("us"), RegionId("eu"), RegionId("ap")
REGIONS = (US, EU, AP)
HALF_S = 6.0
PEAK_GAP_S, QUIET_GAP_S = 1 / 5, 1 / 3


def request(number: int) -> RequestNode:
    """512 tokens that no other request shares: 0.3 s of an L4, alone in its iteration."""
    return RequestNode(prompt=(Segment(2 * number, 512),), answer=Segment(2 * number + 1, 1))


def shifted_peaks() -> Workload:
    """Five requests a second are 1.5 engines, three are 0.9: us first at its peak, then eu."""
    arrivals: list[Arrival] = []
    for region, first_gap_s, second_gap_s in (
        (US, PEAK_GAP_S, QUIET_GAP_S),
        (EU, QUIET_GAP_S, PEAK_GAP_S),
    ):
        at_s = 0.0
        while at_s < 2 * HALF_S:
            arrivals.append(Arrival(at_s, region, request(len(arrivals))))
            at_s += first_gap_s if at_s < HALF_S else second_gap_s
    return Workload(name="shifted", arrivals=tuple(sorted(arrivals, key=lambda a: a.at_s)))


def play(workload: Workload, topology: str, replicas: ReplicaCounts) -> RunReport:
    return played(workload.arrivals, topology, tuple(replicas.items()))


@cache
def played(
    arrivals: tuple[Arrival, ...], topology: str, replicas: tuple[tuple[RegionId, int], ...]
) -> RunReport:
    """Several tests play the same fleets."""
    fleets = {region: [L4_LLAMA] * count for region, count in replicas}
    workload = Workload(name="shifted", arrivals=arrivals)
    return run(workload, WorldConfig(regions=fleets, topology=topology))


def planner(
    simulations: Simulations, target: PlanTarget, workload: Workload, replicas_max: int = 8
) -> Planner:
    demand = demand_of(workload, REGIONS, L4_LLAMA)
    return Planner(simulations, target, demand, REGIONS, replicas_max=replicas_max)


def simulated(limit: int = 100, shown: list[str] | None = None) -> Simulations:
    def show(number: int, what: str) -> None:
        if shown is not None:
            shown.append(what)

    return Simulations(shifted_peaks, play, limit=limit, show=show)


def test_shifted_peaks_need_two_and_two_alone_and_three_together() -> None:
    shown: list[str] = []
    simulations = simulated(shown=shown)
    target = PlanTarget(ttft_p90_s=2.0)
    planning = planner(simulations, target, shifted_peaks())
    local, mesh = planning.plan("region-local"), planning.plan("mesh")
    assert local.replicas == {US: 2, EU: 2, AP: 0}
    assert mesh.total == 3, "2.4 engines of work at any time"
    assert (local.is_least, mesh.is_least) == (True, True)
    assert mesh.report is not None and target.met(mesh.report)
    assert mesh.report["forwarded"] > 0
    assert len(shown) == len(set(shown)) == simulations.count, "no simulation twice"


def test_a_target_that_nothing_meets_is_given_up_soon() -> None:
    simulations = simulated()
    planning = planner(simulations, PlanTarget(ttft_p90_s=0.1), shifted_peaks(), replicas_max=16)
    local, mesh = planning.plan("region-local"), planning.plan("mesh")
    assert simulations.count == 3 + 3, "of each: the guess, twice as many, and the most"
    assert local.why_not.startswith("16 replicas can't meet the target: us TTFT p90 0.")
    assert mesh.why_not.startswith("32 replicas can't meet the target: us TTFT p90 0.")


def test_a_target_that_no_fleet_meets_gives_the_reason() -> None:
    planning = planner(simulated(), PlanTarget(ttft_p90_s=0.1), shifted_peaks(), replicas_max=2)
    plan = planning.plan("region-local")
    assert plan.replicas is None
    assert plan.why_not.startswith("2 replicas can't meet the target: us TTFT p90 0.")


def test_a_search_out_of_simulations_gives_its_best_fleet_marked_as_no_minimum() -> None:
    target = PlanTarget(ttft_p90_s=2.0)
    whole = simulated()
    planner(whole, target, shifted_peaks()).plan("mesh")
    fewer = simulated(limit=whole.count - 1)
    plan = planner(fewer, target, shifted_peaks()).plan("mesh")
    assert plan.total == 3
    assert not plan.is_least
    none = planner(simulated(limit=1), target, shifted_peaks()).plan("region-local")
    assert none.replicas is None
    assert none.why_not == "no fleet did in 1 simulation", "two replicas do for us alone"
    tight = planner(simulated(limit=1), PlanTarget(ttft_p90_s=0.1), shifted_peaks())
    missed = tight.plan("region-local").why_not
    assert "in 1 simulation; the largest: 2 replicas can't meet the target: us TTFT" in missed


def figures(requests: int, ok: int, p90_s: float) -> RunReport:
    return {"requests": requests, "ok": ok, "ttft_s": {"p90": p90_s}}


def reported(duration_s: float, **regions: RunReport) -> RunReport:
    ok = sum(each["ok"] for each in regions.values())
    return {"regions": regions, "ok": ok, "duration_s": duration_s}


def test_every_region_must_meet_the_target() -> None:
    target = PlanTarget(ttft_p90_s=1.0, throughput_per_s=9.0, lost_max=0.1)
    good = figures(50, 50, 1.0)
    assert target.met(reported(10.0, us=good, eu=good))
    assert not target.met(reported(12.0, us=good, eu=good)), "100 answers in 12 s"
    assert target.missed(reported(10.0, us=good, eu=figures(50, 50, 1.01))) == {
        "eu": "TTFT p90 1.01 s"
    }
    assert target.missed(reported(10.0, us=figures(50, 44, 0.5), eu=good)) == {"us": "12.0% lost"}


GAIN = {US: 3.0, EU: 2.0}  # answers a second for each replica, up to these many of them
ENOUGH = {US: 2, EU: 5}


def grown(workload: Workload, topology: str, replicas: ReplicaCounts) -> RunReport:
    """Not a world but a formula: fleets whose throughput can be added up by hand."""
    rates = {r: GAIN[r] * min(count, ENOUGH[r]) for r, count in replicas.items() if r in GAIN}
    return reported(1.0, **{r: figures(100, int(rate), 0.1) for r, rate in rates.items()})


@pytest.mark.parametrize(
    ("wanted", "fleet"), [(5.0, {US: 1, EU: 1}), (8.0, {US: 2, EU: 1}), (12.0, {US: 2, EU: 3})]
)
def test_regions_on_their_own_grow_where_it_helps_most(
    wanted: float, fleet: Mapping[RegionId, int]
) -> None:
    simulations = Simulations(shifted_peaks, grown, limit=99, show=lambda number, what: None)
    target = PlanTarget(ttft_p90_s=1.0, throughput_per_s=wanted, lost_max=0.999)
    plan: Plan = Planner(
        simulations,
        target,
        demand_of(shifted_peaks(), (US, EU), L4_LLAMA),
        (US, EU),
        replicas_max=8,
    ).plan("region-local")
    assert plan.replicas == fleet
