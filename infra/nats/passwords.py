"""Passwords of the bus: made at random, never chosen, kept in one file that only its owner reads.

Rendering again keeps every password, so that adding a replica disturbs no other process. Whoever
is no longer in the mesh loses his: removed and added again, a replica starts with a new one.
Rejected: bcrypt hashes in the servers' files (they guard against guessing short passwords; these
have 192 random bits, and hashing costs 0.1 s of CPU at each connection of a reconnecting fleet).
"""

import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from infra.nats.private_file import write_private

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
