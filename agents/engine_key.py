"""The API key that an engine wants: where it is read, and what is no key.

It comes from a file or the environment, never from a command line, which every user of a machine
can read. It is held as a SecretStr, whose repr is stars.
"""

import logging
import stat
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

ENGINE_KEY = "MESH_ENGINE_KEY"  # of the environment
KEY_CHARS_MAX = 4096
_OPEN_TO_OTHERS = stat.S_IRWXO | stat.S_IWGRP  # a group of services may read it

log = logging.getLogger(__name__)


class EngineKeyInvalid(ValueError):
    """There is no usable key; the message says where and what to do, and holds nothing of it."""


def engine_key(file: Path | None, environ: Mapping[str, str]) -> SecretStr | None:
    """The key in the file, else in the environment; None where neither is given.

    Raises EngineKeyInvalid. A file that others may read is warned of.
    """
    if file is not None:
        return _read(file)
    text = environ.get(ENGINE_KEY)
    return None if text is None else checked_key(text, ENGINE_KEY)


def checked_key(text: str, where: str) -> SecretStr:
    """A key as it stands in `where`, without the line ends after it. Raises EngineKeyInvalid."""
    key = text.rstrip("\r\n")
    if not key:
        raise EngineKeyInvalid(f"{where} is empty: write the engine's API key into it")
    if len(key) > KEY_CHARS_MAX:
        raise EngineKeyInvalid(f"{where} has more than {KEY_CHARS_MAX} characters: no API key")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise EngineKeyInvalid(
            f"{where} must be the engine's API key alone: one line of ASCII characters, no spaces"
        )
    return SecretStr(key)


def _read(file: Path) -> SecretStr:
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(file.stat().st_mode)
            data = opened.read(KEY_CHARS_MAX + 3)  # a line end may follow; more is no key
    except OSError as error:
        raise EngineKeyInvalid(f"{file} can't be read: {error.strerror}") from error
    if mode & _OPEN_TO_OTHERS:
        log.warning("%s may be read or written by others (mode %04o): chmod 600", file, mode)
    return checked_key(data.decode("utf-8", "replace"), str(file))
