"""Follow a job to its end: poll it, through losses of the connection.

The first look has the endpoint's ordinary patience, so that a wrong address is an error at once;
later ones are repeated for as long as the caller waits, because a job goes on without its watcher.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from mesh.batch_client.endpoint import PAUSE_S_MAX, Endpoint, EndpointError, pause_after
from mesh.batch_client.job_answers import JobAnswer
from mesh.batch_client.job_end import Estimate, ObservedPace, estimate

LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """The job as it was last seen; `lost`: why it could not be seen this time."""

    job: JobAnswer
    estimate: Estimate
    lost: EndpointError | None = None


async def watch(
    endpoint: Endpoint, job_id: str, look_every_s: float = LOOK_EVERY_S
) -> AsyncGenerator[Look]:
    """Looks at the job, the last one at its end. Raises EndpointError for what won't pass."""
    pace = ObservedPace()
    job = await endpoint.job(job_id)
    pause_s = look_every_s
    while True:
        pace.looked(time.monotonic(), job.lines.answered)
        yield _look(job, pace)
        if job.is_over:
            return
        await asyncio.sleep(look_every_s)
        while True:
            try:
                job = await endpoint.job_now(job_id)
                break
            except EndpointError as error:
                wait_s = pause_after(error, pause_s)
                if wait_s is None:
                    raise
                yield _look(job, pace, error)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        pause_s = look_every_s


def _look(job: JobAnswer, pace: ObservedPace, lost: EndpointError | None = None) -> Look:
    lately = pace.answers_lately(time.monotonic())
    return Look(job, estimate(job, pace.lines_per_s, time.time(), answers_lately=lately), lost)
