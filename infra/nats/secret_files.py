"""Secrets in files: passwords of the bus, and files that only their owner may read.

Passwords are random, never chosen. Rendering again keeps every password, so that adding a replica
disturbs no other process; a user who was removed gets a new one when added again. Rejected: bcrypt
hashes in the servers' files (they guard against guessing short passwords; these have 192 random
bits, and hashing costs 0.1 s of CPU at each connection of a reconnecting fleet).
"""

import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

PASSWORD_BYTES = 24
FILE_VERSION = 1


class PasswordsUnreadable(ValueError):
    """The kept passwords can't be used; the message says how to go on."""


def keep(path: Path, users: Iterable[str], *, rotate: bool = False) -> Mapping[str, str]:
    """A password for each user: those in the file, and new ones for the rest; the file follows.

    `rotate` makes all of them new: every process must then get its new credentials.
    """
    known = {} if rotate or not path.exists() else _read(path)
    kept = {
        user: known.get(user) or secrets.token_urlsafe(PASSWORD_BYTES) for user in sorted(users)
    }
    text = json.dumps({"v": FILE_VERSION, "passwords": kept}, indent=1) + "\n"
    write_private(path, text)
    return kept


def _read(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["v"] != FILE_VERSION:
            raise ValueError(f"version {content['v']}, this program reads {FILE_VERSION}")
        return {str(user): str(password) for user, password in content["passwords"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PasswordsUnreadable(
            f"{path}: not a passwords file of the mesh ({error}); restore it, "
            "or remove it to make new passwords for every process"
        ) from error


def write_private(path: Path, text: str) -> None:
    """Put `text` at `path` with mode 0600; a reader sees the old file or the new, never a part."""
    make_private(path.parent, tighten=False)
    # mkstemp opens with 0600: the text is at no moment readable by others.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_private(folder: Path, *, tighten: bool = True) -> None:
    """Make the folder and those above it that are missing, with mode 0700.

    `tighten`: take group and others out of one that was there. Not for folders that somebody else
    may have made for more than this.
    """
    if folder.is_dir():
        mode = stat.S_IMODE(folder.stat().st_mode)
        if tighten and mode & (stat.S_IRWXG | stat.S_IRWXO):
            folder.chmod(stat.S_IRWXU)
        return
    make_private(folder.parent, tighten=False)
    folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
