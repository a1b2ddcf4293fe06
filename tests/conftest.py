"""Fixtures that every part of the suite shares."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.nats_server import NatsServer, running_nats_server

pytest_plugins = ["tests.support.machine_needs"]


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A real nats-server with JetStream on a free port, open to anyone on loopback."""
    async with running_nats_server(tmp_path / "nats") as server:
        yield server
