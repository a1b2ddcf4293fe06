"""What a world does when something in it goes wrong: every request still ends, exactly once."""

from random import Random

import pytest

from mesh.sim.config import Cut, EngineCrash, EngineHang, EngineSlow, ReplicaCrash, RouterCrash
from mesh.sim.world import report
from schemas.ids import ReplicaId
from tests.mesh.sim.build import AP, EU, US, arrivals, config, leftovers, node, played, steady
from tests.mesh.sim.random_faults import random_faults

US1 = ReplicaId("us-1")


def report_of(workload, world_config):
    world = played(workload, world_config)
    assert leftovers(world) == {}
    return report(world, workload)


def test_what_a_crashed_replica_had_not_begun_is_placed_again():
    # Prefills of a second each: the crash meets one that no client has seen anything of.
    workload = arrivals((0.0, US, node(900, 3, name=1)), (0.1, US, node(900, 3, name=2)))
    result = report_of(
        workload,
        config({US: 2}, faults=(ReplicaCrash(replica=US1, at_s=0.3),), policy="least-load"),
    )
    assert result["ok"] == 2
    # Two seconds until the replica is called lost, and then its prompt is computed elsewhere.
    assert 2.0 < result["ttft_s"]["p99"] < 4.5


def test_an_answer_that_has_begun_ends_with_an_error_when_its_replica_crashes():
    workload = arrivals((0.0, US, node(100, 1000)))
    result = report_of(workload, config(faults=(ReplicaCrash(replica=US1, at_s=1.0, until_s=2.0),)))
    assert result["failures"] == {"engine_failed": 1}


def test_an_engine_that_crashes_under_its_agent_is_noticed_at_once():
    workload = arrivals((0.0, US, node(900, 3)))
    result = report_of(
        workload, config({US: 2}, faults=(EngineCrash(replica=US1, at_s=0.3, until_s=5.0),))
    )
    assert result["ok"] == 1
    assert result["ttft_s"]["mean"] < 2.0  # a prefill, what was lost of the first, and no waiting


@pytest.mark.parametrize("fault", [EngineCrash, ReplicaCrash])
def test_a_replica_that_comes_back_serves_again_with_an_empty_cache(fault):
    asked = node(100, 3)
    workload = arrivals((0.0, US, asked), (10.0, US, asked), (11.0, US, asked))
    result = report_of(workload, config(faults=(fault(replica=US1, at_s=5.0, until_s=6.0),)))
    assert result["ok"] == 3
    assert result["cached_token_ratio"] == pytest.approx(96 / 300)


def test_a_hanging_engine_goes_on_where_it_stood():
    workload = arrivals((0.0, US, node(100, 100)))
    smooth = report_of(workload, config())
    hung = report_of(workload, config(faults=(EngineHang(replica=US1, at_s=0.5, until_s=3.5),)))
    assert hung["ok"] == 1
    assert hung["e2e_s"]["mean"] == pytest.approx(smooth["e2e_s"]["mean"] + 3.0)


def test_what_waits_in_a_hanging_engine_is_answered_by_others_before_its_agent_notices():
    dice, rows = Random(1), []
    for number in range(1, 161):
        at_s = dice.uniform(5.0, 15.0) if number > 80 else dice.uniform(0.0, 10.0)
        rows.append((at_s, US, node(60, 16, name=number)))
    workload = arrivals(*sorted(rows, key=lambda row: row[0]))
    hung = report_of(
        workload,
        config({US: 3}, faults=(EngineHang(replica=US1, at_s=10.0),), policy="round-robin"),
    )
    assert hung["ok"] >= 158, "what it had begun breaks"
    # 0.070 s; its agent takes 4.5 s to notice, and one request that waits for it makes it 0.097.
    assert hung["ttft_s"]["mean"] < 0.08


def test_a_slow_engine_takes_its_factor_longer():
    workload = arrivals((1.0, US, node(100, 5)))
    smooth = report_of(workload, config())
    slow = report_of(workload, config(faults=(EngineSlow(replica=US1, at_s=0.5, factor=3.0),)))
    ratio = slow["gpu_busy_s"] / smooth["gpu_busy_s"]
    assert ratio == pytest.approx(3.0)


def test_clients_of_a_crashed_router_are_cut_off_and_its_engines_are_freed():
    workload = arrivals(
        (0.0, US, node(100, 5000)), (2.0, US, node(name=3)), (6.0, US, node(name=4))
    )
    result = report_of(workload, config(faults=(RouterCrash(region=US, at_s=1.0, until_s=3.0),)))
    assert result["failures"] == {"connection_lost": 1, "no_connection": 1}
    assert result["ok"] == 1
    # The engine works on in vain until the agent receives the restarted router's keepalive.
    assert 2.5 < result["gpu_busy_s"] < 3.5


def test_behind_a_cut_a_region_serves_itself_and_joins_again():
    fleet = {US: 1, EU: 2, AP: 2}
    both = (
        Cut(one=US, other=EU, at_s=0.0, until_s=20.0),
        Cut(one=US, other=AP, at_s=0.0, until_s=20.0),
    )
    crowd = [(2.0 + 0.05 * n, US, node(100, 20, name=10 + n)) for n in range(100)]
    behind = report_of(arrivals(*crowd), config(fleet, faults=both))
    assert (behind["ok"], behind["forwarded"]) == (100, 0)
    after = [(at_s + 20.0, region, asked) for at_s, region, asked in crowd]
    assert report_of(arrivals(*after), config(fleet, faults=both))["forwarded"] > 20


def test_a_cut_between_asker_and_answerer_ends_what_had_begun():
    workload = arrivals((0.0, US, node(100, 4000)))
    cut = Cut(one=US, other=EU, at_s=5.0)
    result = report_of(workload, config({US: 0, EU: 1}, faults=(cut,)))
    assert result["failures"] == {"engine_failed": 1}
    # The agent receives nothing from the router that sent it any more and stops its engine.
    assert 11.5 < result["gpu_busy_s"] < 13.0


@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_whatever_is_drawn(seed):
    fleet = {US: 2, EU: 2, AP: 1}
    names = [
        ReplicaId(f"{region}-{n + 1}") for region, count in fleet.items() for n in range(count)
    ]
    schedule = random_faults(
        Random(seed), replicas=names, regions=list(fleet), count=12, within_s=20.0
    )
    workload = steady(300, 0.1, US, EU, US, AP, prompt=300, answer=60)
    world_config = config(
        fleet,
        faults=schedule,
        seed=seed,
        jitter_s=0.01,
        loss=0.05,
        token_error=0.2,
        hold_s_max=10.0,
        request_s_max=60.0,
    )
    world = played(workload, world_config)
    result = report(world, workload)
    assert result["requests"] == result["ok"] + result["shed"] + result["failed"] == 300
    assert result["ok"] > 50, schedule
    assert leftovers(world) == {}, schedule


def test_drawn_faults_are_of_every_kind_and_never_two_of_one_thing_at_once():
    schedule = random_faults(
        Random(1), replicas=[US1, ReplicaId("eu-1")], regions=[US, EU], count=300, within_s=5000.0
    )
    kinds = {type(fault) for fault in schedule}
    assert kinds == {ReplicaCrash, EngineCrash, EngineHang, EngineSlow, RouterCrash, Cut}
    crashed_until = 0.0
    for fault in schedule:
        if getattr(fault, "replica", None) == US1:
            assert fault.at_s >= crashed_until
            crashed_until = getattr(fault, "until_s", 0.0) or fault.until_s
