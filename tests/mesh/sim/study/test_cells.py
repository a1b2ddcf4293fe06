"""Cells have names that differ, and all play the same requests."""

import pytest

from agents.sim.profiles import PROFILES
from mesh.sim.study.cells import config_of, labels, play, workload_of
from mesh.sim.study.scenario import deal
from mesh.sim.study.settings import SimSettings
from mesh.sim.workloads.capacity import offered
from tests.mesh.sim.study.small import settings

POLICIES = "round-robin,least-load"


def test_a_comparison_of_policies_is_named_after_them() -> None:
    assert labels(settings(policy=POLICIES).cells()) == ["round-robin", "least-load"]


def test_what_varies_beside_policies_is_in_the_name() -> None:
    given = settings(
        policy=POLICIES,
        topology="mesh,central:us",
        load="0.5,1",
        regions=("us=1,eu=1", "us=2,eu=0"),
        pushing="blind",
    )
    names = labels(given.cells())
    assert len(names) == len(set(names)) == 16
    assert names[0] == "round-robin mesh load 0.5 us=1,eu=1"
    assert names[-1] == "least-load central:us load 1 us=2,eu=0"


def test_a_run_is_the_same_again_and_another_seed_is_another_run() -> None:
    given = settings(policy=POLICIES, regions=("us=2,eu=2",))
    first, other = given.cells()
    digest = play(given, first).report["digest"]
    assert play(given, first).report["digest"] == digest
    assert play(given, other).report["digest"] != digest
    seeded = settings(seed=1, regions=("us=2,eu=2",))
    assert play(seeded, seeded.cells()[0]).report["digest"] != digest


def test_load_sets_the_speed_by_the_fleets_capacity() -> None:
    given = settings(load="0.5,1")
    half, full = (play(given, cell).report for cell in given.cells())
    capacity = 2 / offered(workload_of(given), PROFILES["l4-llama3.1-8b"])
    assert half["speed"] == pytest.approx(0.5 * capacity)
    assert full["speed"] == pytest.approx(capacity)
    assert (half["load"], full["load"]) == (0.5, 1.0)


def test_every_option_reaches_the_world() -> None:
    given = settings(
        heartbeat_ms=20,
        gossip_ms=50,
        loss=0.1,
        jitter_ms=3,
        timeout_s=9,
        warmup_s=2,
        seed=7,
        setting=("heartbeat-late-s=0.3", "hold_max=7"),
        profile=("a100-mistral-7b", "eu=a6000-mistral-7b"),
        topology="central:eu",
        pushing="outstanding:5",
        policy="least-load",
    )
    cell = given.cells()[0]
    config = config_of(given, cell, deal(given.patterns, cell.replicas))
    assert (config.heartbeat_s, config.gossip_s, config.loss) == (0.02, 0.05, 0.1)
    assert (config.jitter_s, config.timeout_s, config.warmup_s) == (0.003, 9.0, 2.0)
    assert (config.seed, config.topology) == (7, "central:eu")
    assert config.settings.heartbeat_late_s == 0.3
    assert config.settings.hold_max == 7
    assert config.settings.policy == "least-load"
    assert str(config.settings.pushing) == "outstanding:5"
    engines = {region: [e.name for e in fleet] for region, fleet in config.profiles().items()}
    assert engines == {"us": ["a100-mistral-7b"], "eu": ["a6000-mistral-7b"]}


def test_clients_of_a_region_that_is_not_there_are_found() -> None:
    given = SimSettings.model_validate({"workload": "tot", "regions": ("us=1,eu=1",)})
    with pytest.raises(ValueError, match=r"clients in ap, .* as --clients us=10,eu=10"):
        workload_of(given)


def test_a_limit_is_for_arrivals() -> None:
    given = SimSettings.model_validate({"workload": "toolbench", "limit": 3, "duration_s": 9})
    assert len(workload_of(given).arrivals) == 3
    with pytest.raises(ValueError, match="ends by --duration-s"):
        workload_of(SimSettings.model_validate({"workload": "tot", "limit": 3}))


def test_a_time_without_any_request_is_refused() -> None:
    quiet = {"workload": "chat", "rate_per_s": 1e-6, "duration_s": 1}
    with pytest.raises(ValueError, match="raise --duration-s or --rate-per-s"):
        workload_of(SimSettings.model_validate(quiet))
