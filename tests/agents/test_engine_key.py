"""Where an engine's key is read, what is no key, and that nothing shows it."""

import logging
from pathlib import Path

import pytest

from agents.config import (
    ENGINE_KEY,
    KEY_CHARS_MAX,
    AgentConfig,
    EngineKeyInvalid,
    checked_key,
    engine_key,
)
from tests.agents.test_config import GIVEN

KEY = "sk-s3cret"


def kept(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_a_file_holds_the_key_and_perhaps_line_ends(tmp_path, end):
    found = engine_key(kept(tmp_path / "key", KEY + end), {ENGINE_KEY: "another"})
    assert found is not None and found.get_secret_value() == KEY


def test_without_a_file_it_comes_from_the_environment_or_is_none():
    found = engine_key(None, {ENGINE_KEY: KEY + "\n"})
    assert found is not None and found.get_secret_value() == KEY
    assert engine_key(None, {}) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"sk-s3cret\nmore", "one line"),
        (b"sk-s3cret\x00", "one line"),
        (b"sk-s3cret\x7f", "one line"),
        (b"key = sk-s3cret", "no spaces"),
        ("sk-s3crét".encode(), "ASCII"),
        (b"\xff\xfe", "ASCII"),
        (b"s3cret" * KEY_CHARS_MAX, "more than"),
    ],
)
def test_what_is_no_key_is_an_error_that_does_not_repeat_it(tmp_path, text, says):
    with pytest.raises(EngineKeyInvalid, match=says) as caught:
        engine_key(kept(tmp_path / "key", text), {})
    assert "s3cr" not in str(caught.value) and str(tmp_path / "key") in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(EngineKeyInvalid, match="nowhere can't be read: No such file"):
        engine_key(tmp_path / "nowhere", {})


@pytest.mark.parametrize(
    ("mode", "is_warned"),
    [(0o600, False), (0o400, False), (0o440, False), (0o644, True), (0o660, True), (0o602, True)],
)
def test_a_key_that_others_may_read_is_warned_of(tmp_path, caplog, mode, is_warned):
    with caplog.at_level(logging.WARNING):
        engine_key(kept(tmp_path / "key", KEY, mode), {})
    assert ("chmod 600" in caplog.text) is is_warned
    assert KEY not in caplog.text


def test_a_configuration_shows_no_key():
    config = AgentConfig(**GIVEN, engine_key=checked_key(KEY, "here"))
    for shown in (repr(config), str(config), config.model_dump_json(), repr(config.model_dump())):
        assert KEY not in shown


def test_a_key_and_a_login_in_the_url_are_one_too_many():
    url = {"engine_url": "http://me:pw@127.0.0.1:8000"}
    with pytest.raises(ValueError, match="not both") as caught:
        AgentConfig(**GIVEN | url, engine_key=checked_key(KEY, "here"))
    assert KEY not in str(caught.value)
