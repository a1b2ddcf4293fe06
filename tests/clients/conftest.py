"""The mesh that clients of others are pointed at."""

from collections.abc import AsyncIterator

import pytest

from agents.sim.profile_files import find_profile
from schemas.engine_routes import TRANSCRIPTIONS
from schemas.http import EMBEDDINGS, MESSAGES, RESPONSES
from tests.agents.simserver.support import config, running
from tests.support.nats_server import NatsServer
from tests.support.small_mesh import PATIENT, small_mesh


@pytest.fixture
async def url(nats_server: NatsServer) -> AsyncIterator[str]:
    """The base URL of a mesh of two simulated engines."""
    # Its memory holds what coding agents ask for.
    settings = config(models=("tiny",), profile=find_profile("h100-llama3.1-8b"))
    async with (
        running(settings) as one,
        running(settings) as two,
        small_mesh({"us": nats_server}) as mesh,
    ):
        await mesh.router("us", **PATIENT)
        for name, engine in (("us-0", one), ("us-1", two)):
            await mesh.agent("us", name, engine)
        for path in (EMBEDDINGS, MESSAGES, RESPONSES, TRANSCRIPTIONS):
            await mesh.until_ready("us", 2, f"tiny on {path}")
        yield mesh.urls["us"] + "/v1"
