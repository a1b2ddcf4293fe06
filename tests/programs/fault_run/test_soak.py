"""A minute of load, a kill and a rest: everything is back. And what counts as not back."""

from pathlib import Path

import pytest

from tests.programs.fault_run.soak import MEMORY, grown, shown, soak


@pytest.mark.timeout(600)
async def test_after_a_fault_all_that_is_held_is_back(tmp_path: Path) -> None:
    result, before, after = await soak(tmp_path, 0.5, 4, 1)
    assert result.violations == []
    assert before.keys() == after.keys() >= {"nats-us", "router-eu-r2", "agent-ap-1", "engine-us-0"}
    assert "| nats (3) | streams | 15 | 15 |" in shown(before, after)
    assert after["router-us-r1"]["inflight"] == 0


def test_what_is_not_back_is_named() -> None:
    before = {"router-us-r1": {MEMORY: 40.0, "descriptors": 20.0}}
    more_memory = {"router-us-r1": {MEMORY: 60.0, "descriptors": 20.0}}
    assert grown(before, more_memory) == []
    leak = {"router-us-r1": {MEMORY: 61.0, "descriptors": 21.0}}
    assert grown(before, leak) == [
        "router-us-r1: memory, MB: 40 before, 61 after",
        "router-us-r1: descriptors: 20 before, 21 after",
    ]
