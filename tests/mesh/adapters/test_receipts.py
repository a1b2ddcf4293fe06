"""Receipts on a span and in the log: short, whatever the fleet's size."""

import orjson
import pytest

from mesh.adapters.receipts import CANDIDATES_MAX, attributes, line
from schemas.decision import Candidate, CandidateKind, Decision, Placement


def decision(candidates: int = 0, **fields) -> Decision:
    known = {
        "request": "q-1",
        "region": "us",
        "policy": "least-load",
        "placement": Placement.LOCAL,
        "replica": "us-0",
        "reason": "fewest pending",
        "held_s": 0.25,
        "considered": candidates,
        "candidates": tuple(
            Candidate(name=f"us-{n}", kind=CandidateKind.REPLICA, available=n % 2 == 0)
            for n in range(candidates)
        ),
    }
    return Decision(**(known | fields))


def test_a_span_lists_the_first_candidates_and_counts_them_all():
    told = attributes(decision(1000))
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
    assert attributes(made)["mesh.target"] == target
    assert line(made) == f"q-1 {named} attempt 1 held 0.250 s free 2/4: fewest pending"
