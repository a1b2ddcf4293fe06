"""What an agent's operator may say of residency; other options are tested through the command."""

import pytest
from pydantic import ValidationError

from agents.config import AgentConfig

GIVEN = {
    "region": "eu",
    "replica": "eu-0",
    "engine_kind": "vllm",
    "engine_url": "http://127.0.0.1:8000",
    "nats_url": "nats://127.0.0.1:4222",
}


@pytest.mark.parametrize(
    ("said", "labels"),
    [(None, None), ("none", ()), ("eu", ("eu",)), ("hospital, eu", ("eu", "hospital"))],
)
def test_labels_are_read(said, labels):
    assert AgentConfig(**GIVEN, residency=said).residency == labels


@pytest.mark.parametrize("said", ["", "EU", "eu,", "none,eu."])
def test_labels_that_are_none_are_refused(said):
    with pytest.raises(ValidationError, match="label"):
        AgentConfig(**GIVEN, residency=said)
