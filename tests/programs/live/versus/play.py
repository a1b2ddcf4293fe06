"""Sends each request when it is due, whatever became of those before it, and keeps what came."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from mesh.replay.client import EndpointClient, new_session
from mesh.replay.schedule import Departure
from tests.programs.live.versus.judge import Seen, seen
from tests.programs.studies.tables.client_view import PATIENCE_S

ANSWER_S_MAX = 120.0  # beyond patience: for the answer's other tokens


async def play(
    plan: Sequence[Departure], bodies: Sequence[bytes], endpoints: Mapping[str, str]
) -> list[Seen]:
    """What each request's client got. `endpoints`: each region's base URL."""
    async with new_session(timeout_s=PATIENCE_S + ANSWER_S_MAX) as session:
        client = EndpointClient(session, endpoints)
        started_s = time.monotonic()
        tasks = []
        async with asyncio.TaskGroup() as group:
            for leaving, body in zip(plan, bodies, strict=True):
                due_s = started_s + leaving.due_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                tasks.append(group.create_task(client.send(leaving.region, body, due_s)))
        return [seen(task.result()) for task in tasks]
