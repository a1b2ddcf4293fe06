"""What holds for every maker: seeded, lazy, in order, and clear about what it can't make."""

import os
import subprocess
import sys
from itertools import islice, pairwise, product

import pytest

from mesh.sim.workloads import WORKLOADS, make
from schemas.ids import RegionId
from tests.mesh.sim.workloads.forest import asked, digest, nodes_of

US, EU, XX = RegionId("us"), RegionId("eu"), RegionId("xx")
CLOSED = ("chat", "arena", "tot", "mixed-tree", "diurnal")
CLIENTS = {US: 3, EU: 2}
EVERY = pytest.mark.parametrize("name", WORKLOADS)


@EVERY
def test_the_paper_s_own_setting_needs_no_arguments(name):
    workload = make(name)
    assert bool(workload.clients) == (name in CLOSED)
    assert bool(workload.arrivals) == (name not in CLOSED)
    assert workload.facts["workload"] == name


@EVERY
def test_a_rate_makes_an_open_loop_of_about_that_many_requests(name):
    workload = make(name, clients=CLIENTS, duration_s=400.0, rate_per_s=10.0, seed=2)
    times = [arrival.at_s for arrival in workload.arrivals]
    assert all(one <= two for one, two in pairwise(times))
    assert 0 <= times[0] <= times[-1] <= 400.0
    assert len(asked(workload)) == pytest.approx(4000, rel=0.25)
    share = sum(arrival.region == US for arrival in workload.arrivals) / len(times)
    # mixed-tree's first region has as many trees as its clients have, and larger ones
    assert share == pytest.approx(3 / 5, abs=0.12)


@EVERY
def test_the_seed_decides_and_nothing_else(name):
    first, again, other = (
        digest(make(name, clients=CLIENTS, duration_s=20.0, rate_per_s=5.0, seed=seed))
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_every_process_makes_the_same_under_any_hash_seed():
    code = (
        "from mesh.sim.workloads import *; from tests.mesh.sim.workloads.forest import digest\n"
        "for name in WORKLOADS:\n"
        "    print(digest(make(name, duration_s=5.0)))\n"
        "    print(digest(make(name, duration_s=5.0, rate_per_s=9.0)))\n"
    )
    told = subprocess.check_output(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "4711", "PYTHONPATH": "."},  # this process has another
        text=True,
    )
    assert told.splitlines() == [
        str(digest(make(name, duration_s=5.0, **more)))
        for name in WORKLOADS
        for more in ({}, {"rate_per_s": 9.0})
    ]


@pytest.mark.parametrize("name", CLOSED)
def test_a_client_is_lazy_endless_and_knows_nothing_of_the_others(name):
    crowd = make(name, clients={US: 4000, EU: 1}, duration_s=100.0)
    assert len(crowd.clients) == 4001
    assert crowd.until_s == 100.0
    assert all(0 <= client.starts_at_s <= 5.0 for client in crowd.clients)
    alone = next(make(name, clients={US: 2, EU: 1}).clients[1].trees)
    greedy = list(islice(crowd.clients[0].trees, 200))
    assert len({node.session for node in greedy}) == 200
    assert next(crowd.clients[1].trees) == alone


@EVERY
def test_equal_ids_have_equal_lengths_and_requests_their_own_answers(name):
    nodes = asked(make(name, clients=CLIENTS, duration_s=60.0, rate_per_s=20.0))
    tokens: dict[int, int] = {}
    for node in nodes:
        for part in (*node.prompt, node.answer):
            assert part.tokens >= 1
            assert tokens.setdefault(part.id, part.tokens) == part.tokens
    assert len({node.answer.id for node in nodes}) == len(nodes)


@EVERY
def test_children_go_on_from_their_parent(name):
    workload = make(name, clients=CLIENTS, duration_s=60.0, rate_per_s=20.0)
    for arrival in workload.arrivals:
        for node in nodes_of(arrival.node):
            for child in node.children:
                assert child.session == node.session
                assert child.prompt[: len(node.prompt) + 1] == (*node.prompt, node.answer)


def test_an_unknown_name_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown workload 'chatt': use one of chat, .*loogle"):
        make("chatt")


def test_what_can_t_be_made_is_refused():
    refused = [
        ({"clients": {}}, "clients: give each region"),
        ({"clients": {US: 0}}, "clients: give each region"),
        ({"clients": {US: 3, EU: -1}}, "clients: give each region"),
        ({"duration_s": 0.0}, "duration_s must be above 0"),
        ({"rate_per_s": 0.0}, "rate_per_s must be above 0"),
        ({"rate_per_s": 1e6, "duration_s": 1e6}, "more than 5000000"),
    ]
    for name, (changes, problem) in product(WORKLOADS, refused):
        with pytest.raises(ValueError, match=problem):
            make(name, **changes)
            pytest.fail(f"{name} takes {changes}")
