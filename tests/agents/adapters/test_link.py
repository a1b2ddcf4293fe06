"""When frames may go: not while the bus is away, nor right after it."""

import asyncio

import pytest

from agents.adapters import link as module
from agents.adapters.link import Link


async def test_frames_wait_for_routers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.05)
    loop, link = asyncio.get_running_loop(), Link()
    assert link.is_there.is_set()
    link.lost()
    assert not link.is_there.is_set()
    began = loop.time()
    link.back()
    assert link.has_returned.is_set()
    await link.is_there.wait()
    assert loop.time() - began >= 0.04


async def test_a_second_loss_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.02)
    link = Link()
    link.lost()
    link.back()
    link.lost()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(link.is_there.wait(), 0.1)
    link.back()
    await link.is_there.wait()
