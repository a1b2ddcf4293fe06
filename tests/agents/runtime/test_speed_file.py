"""The engine's speed on disk: kept, read again, and ignored where it can't be."""

import logging

import pytest

from agents.core.known_speed import SPEED_BYTES_MAX, of_last_run
from agents.core.prefill_speed import PrefillLine
from agents.runtime.speed_file import FILE_NAME, SpeedFile

SPEED = of_last_run("vllm", ("m",), PrefillLine(0.0005, 0.03))


def test_what_one_run_keeps_the_next_one_reads(tmp_path):
    file = SpeedFile(tmp_path)
    assert file.read() is None
    file.keep(None)
    assert not list(tmp_path.iterdir())
    file.keep(SPEED)
    assert SpeedFile(tmp_path).read() == SPEED
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_what_is_known_is_not_written_again(tmp_path):
    file = SpeedFile(tmp_path)
    file.keep(SPEED)
    (tmp_path / FILE_NAME).unlink()
    file.keep(SPEED)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [b"", b"no JSON", b" " * (SPEED_BYTES_MAX + 1)])
def test_an_invalid_file_is_ignored_with_a_warning(tmp_path, caplog, data):
    (tmp_path / FILE_NAME).write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert SpeedFile(tmp_path).read() is None
    assert "is ignored" in caplog.text


def test_a_folder_that_is_gone_stops_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        SpeedFile(tmp_path / "gone").keep(SPEED)
    assert "can't be written" in caplog.text
