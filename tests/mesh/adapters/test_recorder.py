"""The recorder: real files, real limits, and a router that goes on whatever becomes of them."""

import logging
import os
import stat
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mesh.adapters import recorder
from mesh.adapters.recorder import Recorder, RecordingRefused, RecordTo, open_new
from mesh.core import recording
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.recording import RecordedStep, RecordingEnd, RecordingHeader
from schemas.ids import RegionId, RouterId
from tests.mesh.core import build
from tests.support.until import until

LEFT = RecordingEnd("the router left")


def header(**settings: object) -> RecordingHeader:
    return RecordingHeader(
        version="0.1.0",
        region=RegionId("us"),
        router=RouterId("r1"),
        epoch=1,
        seed=1,
        settings=RouterSettings(**settings),
    )


def decide(event: ev.Event, now: float) -> list[fx.Effect]:
    if isinstance(event, ev.Drain):
        raise RuntimeError("a bug of ours")
    return [fx.PassEngineError(7)] if isinstance(event, ev.ClientGone) else []


@asynccontextmanager
async def recorder_to(path: Path, bytes_max: int = 1_000_000, **options):
    made = Recorder(RecordTo(path=path, bytes_max=bytes_max), header(), decide, **options)
    try:
        made.open()
        yield made
    finally:
        await made.close()


def read(path: Path) -> list[RecordedStep | RecordingEnd]:
    first, *lines = path.read_bytes().splitlines(keepends=True)
    assert recording.decode_header(first) == header()
    return [recording.decode_line(line) for line in lines]


async def test_what_is_asked_and_answered_is_in_the_file(tmp_path):
    path = tmp_path / "us.jsonl"
    async with recorder_to(path) as made:
        assert made.handle(ev.ClientGone(7), 1.5) == [fx.PassEngineError(7)]
        assert made.handle(ev.Tick(), 1.6) == []
    answered = RecordedStep(1.5, ev.ClientGone(7), [{"PassEngineError": {"key": 7}}])
    assert read(path) == [answered, RecordedStep(1.6, ev.Tick(), []), LEFT]


async def test_it_is_written_every_second_and_not_only_at_the_end(tmp_path):
    path = tmp_path / "us.jsonl"
    async with recorder_to(path) as made:
        made.handle(ev.Tick(), 1.0)
        await until(lambda: path.stat().st_size)
        assert read(path) == [RecordedStep(1.0, ev.Tick(), [])]


async def test_only_its_owner_may_read_it(tmp_path):
    async with recorder_to(tmp_path / "us.jsonl"):
        assert stat.S_IMODE((tmp_path / "us.jsonl").stat().st_mode) == 0o600


async def test_an_event_that_breaks_the_core_is_recorded_and_goes_on_breaking(tmp_path):
    path = tmp_path / "us.jsonl"
    async with recorder_to(path) as made:
        with pytest.raises(RuntimeError, match="a bug of ours"):
            made.handle(ev.Drain(), 1.0)
        made.handle(ev.Tick(), 2.0)
    broken, after, _ = read(path)
    assert broken == RecordedStep(
        1.0, ev.Drain(), [{"Raised": {"error": "RuntimeError: a bug of ours"}}]
    )
    assert after == RecordedStep(2.0, ev.Tick(), [])


async def test_at_its_limit_the_recording_ends_and_the_router_goes_on(tmp_path, caplog):
    path = tmp_path / "us.jsonl"
    async with recorder_to(path, bytes_max=8192) as made:
        for number in range(200):
            assert made.handle(ev.ClientGone(number), float(number)) == [fx.PassEngineError(7)]
    *steps, end = read(path)
    assert path.stat().st_size <= 8192
    assert end == RecordingEnd("its limit of 8192 bytes")
    assert [step.event.key for step in steps] == list(range(len(steps)))
    assert 10 < len(steps) < 200
    assert len(caplog.records) == 1


async def test_a_disk_that_hangs_never_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "WAITING_BYTES_MAX", 4096)
    path = tmp_path / "us.jsonl"
    async with recorder_to(path) as made:
        for number in range(200):  # without a pause in which anything could be written
            made.handle(ev.ClientGone(number), float(number))
    *steps, end = read(path)
    assert end == RecordingEnd("the disk takes less than the router does")
    assert path.stat().st_size <= 4096 + recorder.END_BYTES
    assert steps


async def test_a_full_disk_is_logged_once_and_the_router_goes_on(tmp_path, caplog):
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")  # every write to it fails
    async with recorder_to(tmp_path / "us.jsonl", open_file=lambda path: full) as made:
        await until(lambda: caplog.records)
        assert made.handle(ev.ClientGone(7), 1.0) == [fx.PassEngineError(7)]
    [record] = caplog.records
    assert (record.levelno, "No space left" in record.message) == (logging.WARNING, True)
    assert full.closed


async def test_a_value_that_cannot_be_written_ends_the_recording_only(tmp_path, caplog):
    path = tmp_path / "us.jsonl"
    async with recorder_to(path) as made:
        assert made.handle(ev.ClientGone(2**70), 1.0) == [fx.PassEngineError(7)]
        made.handle(ev.Tick(), 2.0)
    [end] = read(path)
    assert isinstance(end, RecordingEnd) and "a ClientGone can't be written" in end.why
    assert len(caplog.records) == 1


async def test_the_file_of_the_run_before_is_kept(tmp_path):
    path = tmp_path / "us.jsonl"
    for number in (1, 2, 3):
        async with recorder_to(path) as made:
            made.handle(ev.ClientGone(number), 1.0)
    assert read(path)[0].event == ev.ClientGone(3)
    assert read(tmp_path / "us.jsonl.old")[0].event == ev.ClientGone(2)
    assert len(list(tmp_path.iterdir())) == 2


async def test_two_routers_cannot_have_one_file(tmp_path):
    path = tmp_path / "us.jsonl"
    async with recorder_to(path) as made:
        with pytest.raises(RecordingRefused, match=r"us\.jsonl: another router records there"):
            async with recorder_to(path):
                raise AssertionError("opened")
        made.handle(ev.ClientGone(1), 1.0)
    assert read(path) == [
        RecordedStep(1.0, ev.ClientGone(1), [{"PassEngineError": {"key": 7}}]),
        LEFT,
    ]


def test_what_is_no_file_of_ours_is_left_alone(tmp_path):
    valuable = tmp_path / "valuable"
    valuable.write_text("keep")
    (tmp_path / "link").symlink_to(valuable)
    for name in ("link", ".", "absent/us.jsonl"):
        with pytest.raises(RecordingRefused, match="can't record to"):
            open_new(tmp_path / name)
    with pytest.raises(RecordingRefused, match="no regular file"):
        open_new(Path("/dev/null"))
    assert valuable.read_text() == "keep"


async def test_settings_that_cannot_be_replayed_are_refused_at_the_start(tmp_path):
    made = Recorder(
        RecordTo(path=tmp_path / "us.jsonl"), header(hold_max=2**70), build.core().handle
    )
    with pytest.raises(RecordingRefused, match="64-bit"):
        made.open()
    await made.close()
    assert list(tmp_path.iterdir()) == []
