"""Half a minute of load, a kill and a rest: everything is back. And what counts as not back."""

from pathlib import Path

import pytest

from tests.programs.fault_run import breaking
from tests.programs.fault_run import soak as program
from tests.programs.fault_run.soak import (
    MEMORY,
    STORED,
    THREADS,
    WITH_SHARED,
    not_back,
    shown,
    soak,
)

KILLS = 73  # the first fault of this seed kills router-us-r1


@pytest.mark.timeout(600)
async def test_after_a_fault_all_that_is_held_is_back(tmp_path: Path) -> None:
    result, before, after = await soak(tmp_path, 0.5, 4, 1)
    assert result.violations == []
    assert before.keys() == after.keys() >= {"nats-us", "router-eu-r2", "agent-ap-1", "engine-us-0"}
    assert "| nats (3) | streams | 15 | 15 |" in shown(before, after)
    assert after["router-us-r1"]["inflight"] == 0


@pytest.mark.timeout(300)
async def test_a_soak_goes_on_after_a_restart_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaking, "BACK_WITHIN_S", 0.0)
    for seconds in ("FIRST_S", "REST_S"):
        monkeypatch.setattr(program, seconds, 1.0)
    result, before, after = await soak(tmp_path, 0.1, 4, KILLS)
    assert "not ready again after router killed: router-us-r1" in result.violations
    assert before.keys() == after.keys()


def test_what_is_not_back_is_named() -> None:
    before = {"router-us-r1": {MEMORY: 40.0, "descriptors": 20.0}}
    more_memory = {"router-us-r1": {MEMORY: 60.0, "descriptors": 20.0}}
    assert not_back(before, more_memory) == []
    leak = {"router-us-r1": {MEMORY: 61.0, "descriptors": 21.0}}
    assert not_back(before, leak) == [
        "router-us-r1: memory, MB: 40 before, 61 after",
        "router-us-r1: descriptors: 20 before, 21 after",
    ]


def test_a_process_that_is_gone_and_a_page_that_was_not_read_are_named() -> None:
    router = {MEMORY: 40.0, "inflight": 0.0}
    before = {"agent-us-0": {MEMORY: 40.0}, "router-us-r1": router}
    after = {"agent-us-1": {MEMORY: 40.0}, "router-us-r1": {MEMORY: 40.0}}
    assert not_back(before, after) == [
        "agent-us-0: not there after",
        "agent-us-1: not there before",
        "router-us-r1: inflight: not read after",
    ]
    assert "| agent (1) | memory, MB | 40 | 0 |" in shown(before, after)


def test_of_a_nats_server_connections_are_exact_and_threads_are_not_judged() -> None:
    server = {MEMORY: 7.0, THREADS: 9.0, STORED: 1.0, "connections": 6.0, "streams": 5.0}
    before = {"nats-us": server}
    busy = {MEMORY: 64.0, THREADS: 14.0, STORED: 80.0}
    assert not_back(before, {"nats-us": server | busy}) == []
    wrong = {MEMORY: 64.1, "connections": 5.0, "streams": 6.0}
    assert not_back(before, {"nats-us": server | wrong}) == [
        "nats-us: memory, MB: 7 before, 64.1 after",
        "nats-us: connections: 6 before, 5 after",
        "nats-us: streams: 5 before, 6 after",
    ]
    router = {"router-us-r1": {THREADS: 3.0, WITH_SHARED: 70.0}}
    assert not_back(router, {"router-us-r1": {THREADS: 3.0, WITH_SHARED: 170.0}}) == []
    assert not_back(router, {"router-us-r1": {THREADS: 4.0, WITH_SHARED: 70.0}}) != []
