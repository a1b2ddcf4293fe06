"""An agent's name on a real bus with the rules of its role: taken once, and free at once again."""

import asyncio
import time

import pytest

from agents.adapters import name_guard as own_name
from agents.adapters.name_guard import EPOCH, NameGuard, ReplicaNameTaken
from agents.core.name_claim import CLAIM_S
from infra.topology import parse
from schemas import subjects
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.until import PATIENCE_S


@pytest.fixture
async def regions(tmp_path):
    running = NatsRegions(parse(mesh_toml(("us",)), "mesh.toml"), tmp_path)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


async def start(regions, epoch, clock=time.monotonic):
    """The name of an agent that starts now, and its connection."""
    name = NameGuard("us", "us-0", epoch, clock)
    client = await regions.connect("us", "agent-us-0")
    try:
        await name.take(client)
    except ReplicaNameTaken:
        await client.close()
        raise
    await flushed(client)
    return name, client


@pytest.mark.parametrize("epoch", [6, 8])
async def test_a_second_agent_is_refused_and_a_restart_waits_for_nothing(
    regions, epoch, monkeypatch
):
    monkeypatch.setattr(own_name, "CLAIM_S", 20.0)
    ahead_s = [0.0]
    name, client = await start(regions, 7, lambda: time.monotonic() + ahead_s[0])
    holding = asyncio.create_task(name.watch())
    ahead_s[0] = 60.0  # it has been there for a while
    with pytest.raises(ReplicaNameTaken, match="us/us-0 runs already; end that one"):
        await start(regions, epoch)
    assert not holding.done()
    holding.cancel()
    await client.close()
    began = time.monotonic()
    _, client = await start(regions, 9)
    assert time.monotonic() - began < 20.0
    await client.close()


async def test_of_two_at_once_one_stays(regions):
    started = await asyncio.gather(start(regions, 7), start(regions, 8), return_exceptions=True)
    there = [one for one in started if not isinstance(one, ReplicaNameTaken)]
    holding = [asyncio.create_task(name.watch()) for name, _ in there]
    left = sum(isinstance(one, ReplicaNameTaken) for one in started)
    if len(holding) == 2:
        done, _ = await asyncio.wait(holding, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        left += sum(isinstance(task.exception(), ReplicaNameTaken) for task in done)
    assert left == 1
    for task in holding:
        task.cancel()
    for _, client in there:
        await client.close()


async def test_who_does_not_answer_is_waited_for_and_taken_for_gone(regions):
    silent = await regions.connect("us", "agent-us-0")
    await silent.subscribe(subjects.name("us", "us-0"))
    await flushed(silent)
    began = time.monotonic()
    name, client = await start(regions, 7)
    assert time.monotonic() - began >= CLAIM_S
    holding = asyncio.create_task(name.watch())
    asked = await silent.subscribe(subjects.name("us", "us-0"))
    await flushed(silent)
    await silent.publish(subjects.named("us", "us-0"), b"not an epoch")
    name.reconnected()
    assert (await asked.next_msg(timeout=PATIENCE_S)).data == EPOCH.pack(7)
    await silent.publish(subjects.named("us", "us-0"), EPOCH.pack(5))
    with pytest.raises(ReplicaNameTaken):  # who came back finds an older one there
        await asyncio.wait_for(holding, 30)
    await silent.close()
    await client.close()


async def test_the_younger_leaves_to_a_namesake_that_was_stopped_while_it_took_the_name(regions):
    stopped = await regions.connect("us", "agent-us-0")
    asked = await stopped.subscribe(subjects.name("us", "us-0"))
    await flushed(stopped)
    ahead_s = [0.0]
    name, client = await start(regions, 7, lambda: time.monotonic() + ahead_s[0])
    ahead_s[0] = 60.0
    holding = asyncio.create_task(name.watch())
    assert (await asked.next_msg(timeout=PATIENCE_S)).data == EPOCH.pack(7)
    await stopped.publish(subjects.named("us", "us-0"), EPOCH.pack(5))
    with pytest.raises(ReplicaNameTaken):
        await asyncio.wait_for(holding, 30)
    await stopped.close()
    await client.close()


async def test_who_may_not_ask_for_the_name_is_told_so_and_suspects_no_other_agent(
    regions, caplog, monkeypatch
):
    monkeypatch.setattr(own_name, "CLAIM_S", 60.0)
    name = NameGuard("us", "us-1", 7, time.monotonic)
    other = await regions.connect("us", "agent-us-0", on_error=name.complained)
    async with asyncio.timeout(PATIENCE_S):
        await name.take(other)
    assert "us/us-1: the bus forbids this user to ask" in caplog.text
    assert "may hold this name" not in caplog.text
    await other.close()


async def test_an_operator_receives_no_questions_for_names_so_a_start_waits_for_none(
    regions, caplog
):
    operator = await regions.connect("us", "operator")
    await operator.subscribe("mesh.>")
    await flushed(operator)
    _, client = await start(regions, 7)
    assert "may hold this name" not in caplog.text
    await operator.close()
    await client.close()
