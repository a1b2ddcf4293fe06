"""Routers that record, over a real bus, and a replay that decides as they did."""

import asyncio
from pathlib import Path

import pytest

from mesh.adapters.recorder import RecordTo
from mesh.sim.recording_replay import replay
from tests.mesh.sim.test_recording_replay import changed, is_local, line_of
from tests.support.nats_pair import nats_pair
from tests.support.scripted_engine import fail, say, scripted_engine
from tests.support.small_mesh import PATIENT, chat, post, small_mesh

SECRET = "nobody's business"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> tuple[Path, Path]:
    return asyncio.run(recorded(tmp_path_factory.mktemp("recorded")))


async def recorded(tmp_path: Path) -> tuple[Path, Path]:
    """us and eu after 32 requests: placed at home, forwarded, failed, refused, held."""
    us, eu = tmp_path / "us.jsonl", tmp_path / "eu.jsonl"
    async with (
        nats_pair(tmp_path, "us", "eu") as servers,
        scripted_engine() as near,
        scripted_engine() as other,
        scripted_engine() as far,
        small_mesh(servers) as mesh,
    ):
        await mesh.router("us", policy="skywalker", record=RecordTo(path=us), **PATIENT)
        await mesh.router("eu", policy="skywalker", record=RecordTo(path=eu), **PATIENT)
        await mesh.agent("us", "us-0", near)
        await mesh.agent("us", "us-1", other)
        await mesh.agent("eu", "eu-0", far)
        await mesh.until_ready("us", 2)
        await mesh.until_ready("eu", 1)
        for engine in (near, other, far):
            engine.behaviour = say(SECRET)
        near.behaviour = fail(500)
        await ask(mesh, 16)
        near.behaviour = say(SECRET)
        near.waiting = other.waiting = 9
        await mesh.until_ready("us", 0)
        await mesh.until_peer("us", "eu")
        await ask(mesh, 8)
        waiting = asyncio.create_task(ask(mesh, 8))
        far.waiting = 9
        await mesh.until_ready("eu", 0)
        near.waiting = 0
        await waiting
        await mesh.routers["us"].drain()
    return us, eu


async def ask(mesh, count: int) -> None:
    texts = [f"{SECRET} {number % 3} " * 40 for number in range(count)]
    answers = await asyncio.gather(*(post(mesh, chat(text, stream=True)) for text in texts))
    assert [status for status, _, _ in answers] == [200] * count


async def test_a_replay_decides_as_the_live_routers_did(recordings):
    for path, decisions in zip(recordings, (32, 8), strict=True):
        verdict = replay(path)
        assert verdict.agrees, str(verdict)
        assert verdict.decisions >= decisions
        assert verdict.ended == "the router left"


async def test_what_the_recording_shows_is_all_of_it_and_no_text(recordings):
    us, eu = (path.read_bytes() for path in recordings)
    for kind in (b"AttemptFailed", b"PlacedByPeer", b"AnswerEnded", b"RttMeasured", b"Drain"):
        assert b'"event":{"' + kind in us
    assert b'"event":{"RequestArrived"' in eu
    assert SECRET.encode() not in us + eu


async def test_one_event_that_was_changed_is_found_at_its_line(recordings, tmp_path):
    lines = recordings[0].read_bytes().splitlines(keepends=True)
    at = line_of(lines, is_local)

    def unheard_of(step) -> None:
        step["event"]["RequestArrived"]["request"]["model"] = "unheard-of"

    lines[at] = changed(lines[at], unheard_of)
    altered = tmp_path / "altered.jsonl"
    altered.write_bytes(b"".join(lines))
    first = replay(altered).first
    assert first is not None
    assert (first.line, first.event) == (at + 1, "RequestArrived")
