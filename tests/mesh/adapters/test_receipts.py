"""Receipts on a span and in the log: short, whatever the fleet's size."""

from dataclasses import replace

import orjson
import pytest

from mesh.adapters.span_attributes import CANDIDATES_MAX, decision_attributes, receipt_line
from schemas.decision import Candidate, CandidateKind, Decision, Placement


def decision(count: int = 0, **fields) -> Decision:
    known = {
        "request": "q-1",
        "region": "us",
        "policy": "least-load",
        "placement": Placement.LOCAL,
        "replica": "us-0",
        "reason": "fewest pending",
        "held_s": 0.25,
        "considered": count,
        "candidates": tuple(
            Candidate(name=f"us-{n}", kind=CandidateKind.REPLICA, available=n % 2 == 0)
            for n in range(count)
        ),
    }
    return Decision(**(known | fields))


def test_a_span_lists_the_first_candidates_and_counts_them_all():
    told = decision_attributes(decision(1000))
    listed = orjson.loads(told["mesh.candidates"])
    assert [one["name"] for one in listed] == [f"us-{n}" for n in range(CANDIDATES_MAX)]
    assert told["mesh.considered"] == 1000
    assert told["mesh.placement"] == "local"
    assert told["mesh.held_s"] == 0.25


@pytest.mark.parametrize(
    ("fields", "target", "named"),
    [
        ({}, "us-0", "local us-0"),
        ({"placement": Placement.PEER, "replica": None, "peer": "eu"}, "eu", "peer eu"),
        ({"placement": Placement.HOLD, "replica": None}, "", "hold -"),
    ],
)
def test_the_target_is_whoever_got_the_request(fields, target, named):
    made = decision(4, **fields)
    assert decision_attributes(made)["mesh.target"] == target
    assert receipt_line(made) == f"q-1 {named} attempt 1 held 0.250 s free 2/4: fewest pending"


PRICED = (
    Candidate(
        name="us-1",
        kind=CandidateKind.REPLICA,
        available=False,
        why="heartbeat late",
        seconds=0.1,
    ),
    Candidate(
        name="us-0",
        kind=CandidateKind.REPLICA,
        available=True,
        seconds=0.25,
        terms={"queue_s": 0.05, "prefill_s": 0.2, "rtt_s": None},
    ),
    Candidate(
        name="eu",
        kind=CandidateKind.PEER,
        available=True,
        seconds=0.5,
        terms={"rtt_s": 0.08, "queue_s": 0.42},
    ),
)


def test_a_span_has_the_seconds_of_the_chosen_and_of_the_runner_up_and_the_terms_of_the_first():
    told = decision_attributes(decision(considered=3, candidates=PRICED))
    numbers = {
        name: value for name, value in told.items() if ".chosen" in name or ".runner" in name
    }
    assert numbers == {
        "mesh.chosen.seconds": 0.25,
        "mesh.chosen.queue_s": 0.05,
        "mesh.chosen.prefill_s": 0.2,
        "mesh.runner_up.name": "eu",
        "mesh.runner_up.seconds": 0.5,
    }


def test_the_log_has_the_seconds_of_both():
    made = decision(considered=3, candidates=PRICED)
    assert receipt_line(made).endswith("free 2/3, us-0 0.250 s, eu 0.500 s: fewest pending")


def test_of_a_held_request_the_best_is_the_runner_up():
    held = decision(considered=3, candidates=PRICED, placement=Placement.HOLD, replica=None)
    told = decision_attributes(held)
    assert told["mesh.runner_up.name"] == "us-0"
    assert not any(name.startswith("mesh.chosen") for name in told)


def test_a_span_has_seconds_to_the_microsecond():
    priced = Candidate(
        name="us-0",
        kind=CandidateKind.REPLICA,
        available=True,
        seconds=0.1 + 0.2,
        terms={"queue_s": 1 / 3},
    )
    told = decision_attributes(decision(considered=1, candidates=(priced,), held_s=2 / 3))
    assert told["mesh.held_s"] == 0.666667
    assert told["mesh.chosen.seconds"] == 0.3
    assert told["mesh.chosen.queue_s"] == 0.333333
    (listed,) = orjson.loads(told["mesh.candidates"])
    assert (listed["seconds"], listed["terms"]) == (0.3, {"queue_s": 0.333333})


def test_a_pair_is_named_as_both_its_replicas():
    alone = replace(PRICED[1], seconds=0.4)
    pair = replace(PRICED[1], prefill="us-9")
    made = decision(considered=2, candidates=(pair, alone), prefill="us-9")
    told = decision_attributes(made)
    assert (told["mesh.chosen.seconds"], told["mesh.runner_up.name"]) == (0.25, "us-0")
    assert "us-9 + us-0 0.250 s, us-0 0.400 s" in receipt_line(made)
    told = decision_attributes(replace(made, prefill=None))
    assert (told["mesh.chosen.seconds"], told["mesh.runner_up.name"]) == (0.4, "us-9 + us-0")
