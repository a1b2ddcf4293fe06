"""Several checks of a region at once: none waits for what another one waits for."""

import asyncio
from collections.abc import Awaitable, Callable

from infra.ending import end_all
from mesh.doctor.findings import Chart

Work = Callable[[Chart], Awaitable[None]]


async def together(chart: Chart, *works: Work) -> None:
    """Do all at once. What each notes stands in the order of `works`, whoever was done first.

    Where one raises, the others are ended and what they had found is kept.
    """
    pages = [Chart(chart.region, []) for _ in works]

    async def done(work: Work, page: Chart) -> None:
        await work(page)

    tasks = [asyncio.create_task(done(*pair)) for pair in zip(works, pages, strict=True)]
    try:
        await asyncio.gather(*tasks)
    finally:
        try:
            await end_all(tasks)
        finally:
            for page in pages:
                chart.findings += page.findings
