"""A router as several processes: what they are called, and where each has its page.

A process of Python uses one core. The workers of a router are routers of their region like any
others, so they need a name each, from the router's own: r1-0, r1-1. They share one port for
clients, where the kernel gives each connection to one of them; what is asked of one process, as
metrics are, has a port of its own for each: the first one's, and those that follow.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

from infra.address import PORT_MAX, Address
from schemas.ids import REGION_ROUTERS_MAX, NameInvalid, RouterId, checked_name

WORKERS_MAX = REGION_ROUTERS_MAX


def worker_names(router: RouterId, workers: int) -> tuple[RouterId, ...]:
    """The routers that its processes are; a lone process is the router itself.

    Raises NameInvalid where the router's name leaves no room for a number.
    """
    if workers == 1:
        return (router,)
    return tuple(RouterId(checked_name("worker", f"{router}-{n}")) for n in range(workers))


def worker_page(metrics: Address, worker: int) -> Address:
    """Where that worker shows its metrics, if the first one does so at `metrics`."""
    return Address(metrics.host, metrics.port + worker)


def workers_among(router: RouterId, names: Iterable[RouterId]) -> tuple[RouterId, ...]:
    """Those of the names that are this router or workers of it, however many it runs."""
    ours = re.compile(rf"{re.escape(router)}(-[0-9]+)?")
    return tuple(sorted(name for name in names if ours.fullmatch(name)))


def crowd_problems(workers: Mapping[RouterId, int]) -> Iterator[tuple[str, str]]:
    """What is wrong with a region of these routers: the key it is wrong with, and what to do.

    `workers`: how many processes each of them is.
    """
    many = sum(workers.values())
    if many > REGION_ROUTERS_MAX:
        yield (
            "workers",
            f"{many} processes of all routers; at most {REGION_ROUTERS_MAX}, as peers hear no more",
        )
    split = [router for router, count in workers.items() if count > 1]
    try:
        names = {name for router in split for name in worker_names(router, workers[router])}
    except NameInvalid as problem:
        yield "routers", f"{problem}, its number included"
        return
    for repeated in sorted(names & set(workers)):
        yield "routers", f'"{repeated}" is what a worker of another one is called; rename it'


def page_problems(workers: int, metrics: Address | None) -> Iterator[tuple[str, str]]:
    """What is wrong with the pages of so many workers, likewise."""
    if workers > 1 and metrics is None:
        yield (
            "metrics",
            f"{workers} workers need a page each, or a scrape would meet one at random; "
            'give the first one\'s address, like "127.0.0.1:9101" (the others follow it)',
        )
    if metrics is not None and metrics.port + workers - 1 > PORT_MAX:
        yield "metrics", f"{workers} ports from {metrics.port} on pass {PORT_MAX}; begin lower"


def pages(metrics: Address | None, workers: int) -> Iterator[Address]:
    """The pages of all workers; none where they have none of their own."""
    if metrics is not None:
        yield from itertools.takewhile(
            lambda page: page.port <= PORT_MAX, (worker_page(metrics, n) for n in range(workers))
        )
