"""A router as several processes: names, pages, and what can't be."""

import pytest

from infra.address import Address
from infra.topology import TopologyError, parse
from infra.workers import pages, worker_names, worker_page, workers_among
from schemas.ids import NameInvalid, RouterId

PAGE = Address("10.0.0.1", 9101)
ONE_REGION = """
[mesh]
name = "one"
[regions.us]
http = "127.0.0.1:8101"
nats = "127.0.0.1:4101"
leaf = "127.0.0.1:4201"
replicas = 1
"""


def test_a_lone_process_is_the_router_itself():
    assert worker_names(RouterId("r1"), 1) == ("r1",)


def test_several_are_called_after_it():
    assert worker_names(RouterId("r1"), 3) == ("r1-0", "r1-1", "r1-2")


def test_a_name_has_to_leave_room_for_the_number():
    assert worker_names(RouterId("r" * 30), 2)[1] == "r" * 30 + "-1"
    with pytest.raises(NameInvalid, match="worker name"):
        worker_names(RouterId("r" * 31), 2)


def test_their_pages_follow_the_first_ones():
    assert worker_page(PAGE, 2) == Address("10.0.0.1", 9103)
    assert [page.port for page in pages(PAGE, 2)] == [9101, 9102]
    assert list(pages(None, 2)) == []


def test_workers_are_found_among_others():
    names = [RouterId(name) for name in ("r1-1", "r1", "r2-0", "r10", "r1-a", "r1-0")]
    assert workers_among(RouterId("r1"), names) == ("r1", "r1-0", "r1-1")


def test_a_file_says_how_many_and_where():
    us = parse(ONE_REGION + 'workers = 2\nmetrics = "127.0.0.1:9101"', "mesh.toml").region("us")
    assert (us.workers, [str(a) for key, a in us.addresses() if key == "metrics"]) == (
        2,
        ["127.0.0.1:9101", "127.0.0.1:9102"],
    )
    assert parse(ONE_REGION, "mesh.toml").region("us").workers == 1


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("workers = 2", "regions.us.metrics: 2 workers need a page each"),
        ('workers = 2\nmetrics = "127.0.0.1:8100"', "regions.us.metrics: 127.0.0.1:8101 is also"),
        ('workers = 2\nmetrics = "127.0.0.1:65535"', "regions.us.metrics: 2 ports from 65535 on"),
        ("workers = 0", "regions.us.workers: "),
        ("workers = 17", "regions.us.workers: "),
        ('workers = "two"', "regions.us.workers: "),
        (
            'workers = 2\nmetrics = "127.0.0.1:9101"\nrouters = ["r1", "r1-1"]',
            'regions.us.routers: "r1-1" is also the name of a worker of another router',
        ),
        (
            f'workers = 2\nmetrics = "127.0.0.1:9101"\nrouters = ["{"r" * 31}"]',
            "regions.us.routers: worker name",
        ),
        (
            'workers = 16\nmetrics = "127.0.0.1:9101"\nrouters = ["a", "b", "c", "d", "e"]',
            "regions.us.workers: 80 processes of all routers; at most 16, as peers accept no more",
        ),
        (
            'workers = 9\nmetrics = "127.0.0.1:9101"\nrouters = ["a", "b"]',
            "regions.us.workers: 18 processes of all routers; at most 16, as peers accept no more",
        ),
        (f"routers = {[f'r{n}' for n in range(17)]}", "regions.us.routers: "),
    ],
)
def test_what_cannot_be_is_said_by_its_key(lines, problem):
    with pytest.raises(TopologyError) as caught:
        parse(ONE_REGION + lines, "mesh.toml")
    assert problem in str(caught.value)
