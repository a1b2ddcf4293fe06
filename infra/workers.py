"""A router as several processes: the name of each, and the address of its metrics page.

A process of Python uses one core. The workers of a router are routers of their region like any
others, so each has a name, made from the router's: r1-0, r1-1. They share one port for clients,
where the kernel assigns each connection to one of them; what concerns one process, as metrics do,
has a port for each: the first one's, and those that follow.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from infra.address import PORT_MAX, Address
from schemas.ids import REGION_ROUTERS_MAX, NameInvalid, RouterId, checked_name

WORKERS_MAX = REGION_ROUTERS_MAX


def worker_names(router: RouterId, workers: int) -> tuple[RouterId, ...]:
    """The names of its processes; a single one has the router's own name.

    Raises NameInvalid if the router's name leaves no room for a number.
    """
    if workers == 1:
        return (router,)
    return tuple(RouterId(checked_name("worker", f"{router}-{n}")) for n in range(workers))


def worker_page(metrics: Address, worker: int) -> Address:
    """The page of that worker, if the first one's is `metrics`."""
    return Address(metrics.host, metrics.port + worker)


def workers_among(router: RouterId, names: Iterable[RouterId]) -> tuple[RouterId, ...]:
    """Those of the names that are this router or its workers, however many it runs."""
    ours = re.compile(rf"{re.escape(router)}(-[0-9]+)?")
    return tuple(sorted(name for name in names if ours.fullmatch(name)))


def crowd_problems(
    workers: Mapping[RouterId, int], runners: Collection[RouterId] = ()
) -> Iterator[tuple[str, str]]:
    """Errors of a region with these routers: the key, what is wrong with it and what to do.

    `workers`: the number of processes of each router. `runners`: its batch runners, each of which
    is one more router to peers.
    """
    total = sum(workers.values()) + len(runners)
    if total > REGION_ROUTERS_MAX:
        limit = f"at most {REGION_ROUTERS_MAX}, as peers accept no more"
        whose = "routers and batch runners" if runners else "routers"
        yield "workers", f"{total} processes of all {whose}; {limit}"
    split = [router for router, count in workers.items() if count > 1]
    try:
        names = {name for router in split for name in worker_names(router, workers[router])}
    except NameInvalid as problem:
        yield "routers", f"{problem}, its number included"
        return
    for repeated in sorted(names & {*workers, *runners}):
        yield "routers", f'"{repeated}" is also the name of a worker of another router; rename it'


def page_problems(workers: int, metrics: Address | None) -> Iterator[tuple[str, str]]:
    """Errors of the metrics pages of so many workers, likewise."""
    if workers > 1 and metrics is None:
        yield (
            "metrics",
            f"{workers} workers need a page each, or a scrape would reach one at random; "
            'give the first one\'s address, like "127.0.0.1:9101" (the others follow it)',
        )
    if metrics is not None and metrics.port + workers - 1 > PORT_MAX:
        yield "metrics", f"{workers} ports from {metrics.port} on pass {PORT_MAX}; begin lower"


def pages(metrics: Address | None, workers: int) -> Iterator[Address]:
    """The pages of all workers, if they have any."""
    if metrics is not None:
        yield from itertools.takewhile(
            lambda page: page.port <= PORT_MAX, (worker_page(metrics, n) for n in range(workers))
        )
