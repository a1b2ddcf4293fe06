"""Whether a region's batch runners run, and how many jobs wait where none does.

Runners send nothing by themselves. Each follows the stream of results by a consumer of its own, at
which it always has a request: the server forgets the request when the runner's connection ends, or
a few seconds after the runner stands still.
"""

import asyncio

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from infra.topology import Topology
from mesh.doctor.findings import CheckResult, MonotonicClock, RegionFindings
from schemas.batch import STREAM_LINES, STREAM_RESULTS, STREAM_TASKS, Task, task_subject
from schemas.problems import counted

CHECK = "batch runner"
REQUEST_S = 5.0
LOOK_S = 0.1  # between two looks: a runner's next request comes a moment after the last ended


async def check_batch_runners(
    found: RegionFindings,
    topology: Topology,
    client: Client,
    clock: MonotonicClock,
    listen_s: float,
) -> None:
    """Add whether the region's runners run. Every runner that is seen in `listen_s` counts."""
    names = topology.region(found.region).batch_runners
    try:
        running = await _running(client, len(names), clock, listen_s)
        waiting = await _waiting_jobs(client)
    except (nats.js.errors.Error, nats.errors.Error, TimeoutError):
        return  # the findings of its streams say why
    if running >= len(names):
        detail = f"{running} of {len(names)} run, {counted(waiting, 'job')} to be done"
        found.add(CHECK, ", ".join(names), CheckResult.OK, detail)
    elif running:
        detail = f"{running} of {len(names)} run: see each one's log"
        found.add(CHECK, ", ".join(names), CheckResult.WARNING, detail)
    else:
        verdict = CheckResult.BAD if waiting else CheckResult.WARNING
        waits = "waits" if waiting == 1 else "wait"
        detail = f"no batch runner runs; {counted(waiting, 'job')} {waits}"
        for name in names:
            found.add(CHECK, name, verdict, detail)


async def _running(client: Client, configured: int, clock: MonotonicClock, listen_s: float) -> int:
    """The most runners that are seen at once within that time."""
    manager, until, most = client.jsm(timeout=REQUEST_S), clock() + listen_s, 0
    while True:
        followers = await manager.consumers_info(STREAM_RESULTS)
        most = max(most, sum(bool(follower.num_waiting) for follower in followers))
        if most >= configured or clock() >= until:
            return most
        await asyncio.sleep(LOOK_S)


async def _waiting_jobs(client: Client) -> int:
    """Jobs whose file is to be checked, and those that have lines: each has a consumer."""
    manager = client.jsm(timeout=REQUEST_S)
    unchecked = await manager.stream_info(STREAM_TASKS, task_subject(Task.CHECK, "*"))
    lines = await manager.stream_info(STREAM_LINES)
    return len(unchecked.state.subjects or ()) + lines.state.consumer_count
