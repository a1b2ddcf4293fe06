"""A load of one is what a simulated engine, given everything at once, really takes."""

import pytest

from agents.sim.engine import EngineSim
from agents.sim.events import SimRequest
from agents.sim.profiles import A100_MISTRAL, CHAPTER, H100_LLAMA, L4_LLAMA
from mesh.sim.workload import Arrival, RequestNode, Segment, Workload
from mesh.sim.workloads import make
from mesh.sim.workloads.arrivals import at_speed
from mesh.sim.workloads.capacity import batch_size, demand, offered, speed_for_load, work_s
from schemas.ids import RegionId

US = RegionId("us")


def unique(requests: int, prompt: int, answer: int, gap_s: float = 1.0) -> Workload:
    """Requests that share nothing, one every `gap_s`."""
    nodes = (
        RequestNode(prompt=(Segment(2 * at, prompt),), answer=Segment(2 * at + 1, answer))
        for at in range(requests)
    )
    arrivals = tuple(Arrival(at * gap_s, US, node) for at, node in enumerate(nodes))
    return Workload(name="unique", arrivals=arrivals)


def engine_s(profile, requests: int, prompt: int, answer: int) -> float:
    """How long one engine takes for all of them, when all are there from the start."""
    engine = EngineSim(profile)
    for number in range(requests):
        # Answers of differing lengths with this mean, so that sequences don't end in step.
        tokens = max(1, answer + (number * 7 % 11 - 5) * answer // 10)
        engine.submit(SimRequest(number, prompt, tokens), 0.0)
    now = 0.0
    while engine.wake_at is not None:
        now = engine.wake_at
        engine.step(now)
    return now


@pytest.mark.parametrize(
    ("profile", "requests", "prompt", "answer"),
    [
        (L4_LLAMA, 600, 300, 200),  # memory binds the batch
        (L4_LLAMA, 300, 2000, 20),  # nearly all prefill
        (L4_LLAMA, 1500, 20, 100),  # nearly all decode
        (L4_LLAMA, 600, 30, 1),  # one token each
        (A100_MISTRAL, 3000, 1000, 200),
        (H100_LLAMA, 4000, 1000, 200),
        (H100_LLAMA, 300, 12_000, 50),
        (CHAPTER, 800, 4112, 1),
    ],
)
def test_work_is_what_a_full_engine_takes(profile, requests, prompt, answer):
    wanted = demand(unique(requests, prompt, answer))
    measured = engine_s(profile, requests, prompt, answer)
    assert work_s(wanted, profile) == pytest.approx(measured, rel=0.12)


def test_demand_adds_up_and_takes_what_was_asked_before_as_cached():
    wanted = demand(make("short", duration_s=200.0, rate_per_s=20.0))
    assert wanted.prompt_tokens == wanted.requests * 384
    assert wanted.output_tokens == wanted.requests * 256
    assert wanted.uncached_tokens == wanted.requests * 128 + 256 * 256
    assert wanted.duration_s == pytest.approx(200.0, rel=0.03)


def test_the_batch_is_bound_by_memory_or_by_the_scheduler():
    assert batch_size(demand(unique(10, 1800, 200)), L4_LLAMA) == 38_000 // 1900
    assert batch_size(demand(unique(10, 10, 10)), L4_LLAMA) == 256
    assert batch_size(demand(unique(10, 50_000, 10)), L4_LLAMA) == 1


def test_a_workload_at_the_speed_for_a_load_has_that_load():
    workload = make("toolbench", duration_s=200.0, rate_per_s=5.0)
    for load in (0.3, 1.3):
        speed = speed_for_load(workload, L4_LLAMA, 12, load)
        there = at_speed(workload, speed)
        assert offered(there, L4_LLAMA) / 12 == pytest.approx(load, rel=1e-6)


def test_what_has_no_load_is_refused():
    with pytest.raises(ValueError, match="chat is a closed loop"):
        offered(make("chat"), L4_LLAMA)
    with pytest.raises(ValueError, match="all requests come at once"):
        offered(unique(3, 10, 10, gap_s=0.0), L4_LLAMA)
    with pytest.raises(ValueError, match="must be above 0"):
        speed_for_load(unique(3, 10, 10), L4_LLAMA, 0, 1.0)
    with pytest.raises(ValueError, match="must be above 0"):
        speed_for_load(unique(3, 10, 10), L4_LLAMA, 1, 0.0)
