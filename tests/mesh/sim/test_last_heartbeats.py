"""A router that starts reads the last word of every replica instead of waiting for the next."""

import pytest

from mesh.sim.config import ReplicaCrash, RouterCrash
from mesh.sim.world import run
from tests.mesh.sim.build import EU, US, arrivals, config, node, steady

SLOW_S = 10.0


@pytest.mark.parametrize("topology", ["mesh", "region-local", "central:us"])
def test_heartbeats_ten_seconds_apart_do_not_begin_with_errors(topology: str) -> None:
    asked = steady(40, 0.25, US, EU)
    result = run(asked, config({US: 1, EU: 1}, heartbeat_s=SLOW_S, topology=topology))
    assert (result["ok"], result["failures"]) == (40, {})


def test_a_router_that_comes_back_between_two_heartbeats_knows_its_replicas() -> None:
    until_s = 3.0
    crash = RouterCrash(region=US, at_s=1.0, until_s=until_s)
    asked = arrivals((until_s + 0.01, US, node()))
    result = run(asked, config(heartbeat_s=SLOW_S, faults=(crash,)))
    assert result["ok"] == 1
    assert result["ttft_s"]["mean"] < 1.0, "it did not wait for the next beat"


def test_the_last_word_of_a_replica_that_is_gone_is_believed_and_then_found_out() -> None:
    gone = ReplicaCrash(replica="us-1", at_s=1.0)
    crash = RouterCrash(region=US, at_s=2.0, until_s=3.0)
    asked = arrivals((3.01, US, node(name=5)))
    result = run(asked, config({US: 2}, faults=(gone, crash)))
    assert result["ok"] == 1
