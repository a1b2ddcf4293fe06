"""Which complaints of the server end an agent."""

import asyncio

import pytest

from agents.adapters.bus import BusAuthorization
from infra.bus import BusUnreachable


@pytest.mark.parametrize(
    "complaint",
    [
        'nats: permissions violation for publish to "mesh.us.heartbeat.us-1"',
        'permissions violation for subscription to "mesh.us.replica.us-1.work" using queue "agent"',
    ],
)
async def test_a_subject_of_our_own_refused_is_the_end(complaint) -> None:
    standing = BusAuthorization("us", "us-1")
    standing.check()
    holding = asyncio.create_task(standing.watch())
    standing.complained(Exception(complaint))
    async with asyncio.timeout(5):
        with pytest.raises(BusUnreachable, match="subjects of us/us-1: are these its credentials"):
            await holding
    with pytest.raises(BusUnreachable):
        standing.check()


@pytest.mark.parametrize(
    "complaint",
    [
        'nats: permissions violation for publish to "_inbox.us.r1.7"',
        'nats: permissions violation for publish to "mesh.us.heartbeat.us-12"',
        "nats: slow consumer, messages dropped",
    ],
)
def test_any_other_complaint_is_not(complaint) -> None:
    standing = BusAuthorization("us", "us-1")
    standing.complained(Exception(complaint))
    standing.check()
