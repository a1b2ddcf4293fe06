"""The files of a rendered mesh: a directory per region, one credentials file per process.

    DIR/passwords.json                          all passwords, kept from one rendering to the next
    DIR/<region>/nats.conf                      the region's server; nats-1.conf, nats-2.conf, …
                                                where it has three
    DIR/<region>/credentials/router.env         NATS_URL, NATS_USER, NATS_PASSWORD, MESH_REGION,
                                                MESH_PREFIX_KEY
    DIR/<region>/credentials/observer.env
    DIR/<region>/credentials/operator.env
    DIR/<region>/credentials/admin.env
    DIR/<region>/credentials/setup.env
    DIR/<region>/credentials/system.env
    DIR/<region>/credentials/agent-<replica>.env
    DIR/<region>/credentials/batch.env          of regions with batch runners: for routers and
    DIR/<region>/credentials/batch-setup.env    runners; for who makes the streams; for who watches
    DIR/<region>/credentials/batch-observer.env

A region's directory holds its own secrets only (and its links'), and one that all routers of the
mesh share, for the hashes of prompts that cross regions: give each machine no more than it needs.
Files have mode 0600 and these directories 0700, those of an earlier rendering too. DIR has it if it
is made here; one that was there keeps its own, since it may hold other things.
The first three variables are those that the `nats` command reads too. Same topology, same
passwords: same bytes, so a diff of two renderings shows what changed.

Passwords are random, never chosen. Rendering again keeps every password, so that adding a replica
disturbs no other process; a user who was removed gets a new one when added again. A server's file
has their bcrypt hashes, and in plain only those with which it logs in itself, over links to other
regions. Rejected: nkeys (nats-py needs libsodium for them, the `nats` command a file of its own,
and servers' logs and reports name a key instead of a user).
"""

import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.nats.region_config import (
    PREFIX_KEY,
    ROUTER,
    LeafAddresses,
    Site,
    User,
    agent_user,
    region_users,
    settings,
    to_text,
    users,
)
from infra.topology import Topology
from schemas.ids import RegionId

PASSWORDS = "passwords.json"
CONFIG = "nats{}.conf"  # with the server's suffix
CREDENTIALS = "credentials"
STATE = "jetstream"
PASSWORD_BYTES = 24
OF_SOME = ("agent-*", "batch", "batch-*")  # users that a later rendering may not have
FILE_VERSION = 1  # of passwords.json


class PasswordsUnreadable(ValueError):
    """The kept passwords can't be used; the message says how to go on."""


@dataclass(frozen=True, slots=True)
class RegionFiles:
    """What was written for one region."""

    configs: tuple[Path, ...]  # of each of its servers
    credentials: Mapping[str, Path]  # by user name: router, observer, …, agent-<replica>

    @property
    def config(self) -> Path:
        """Of the only server."""
        [config] = self.configs
        return config


Written = Mapping[RegionId, RegionFiles]


def write(
    topology: Topology,
    directory: Path,
    *,
    state_directory: Path | None = None,
    leaf_addresses: LeafAddresses | None = None,
    rotate: bool = False,
) -> Written:
    """Write every region's files; those of replicas, batch runners and servers that are gone are
    removed.

    `state_directory`: JetStream's files are kept in <state_directory>/<region>, by default below
    the region's own directory. Raises PasswordsUnreadable.
    """
    directory = directory.absolute()
    keys = [PREFIX_KEY, *(user.key for user in users(topology))]
    kept = keep_passwords(directory / PASSWORDS, keys, rotate=rotate)
    written = {}
    for name in topology.regions:
        here = directory / name
        for folder in (here, here / CREDENTIALS):
            make_private(folder)
        state = state_directory.absolute() / name if state_directory else here / STATE
        site = Site(kept, state, leaf_addresses or {})
        configs = tuple(here / CONFIG.format(each.suffix) for each in topology.region(name).servers)
        for number, config in enumerate(configs):
            write_private(config, to_text(settings(topology, name, site, number)))
        for suffix in ("", "-1", "-2", "-3"):
            if (old := here / CONFIG.format(suffix)) not in configs:
                old.unlink(missing_ok=True)
        written[name] = RegionFiles(configs, _write_credentials(topology, name, here, kept))
    return written


def _write_credentials(
    topology: Topology, name: RegionId, here: Path, kept: Mapping[str, str]
) -> dict[str, Path]:
    files = {}
    for user in _clients(topology, name):
        path = here / CREDENTIALS / f"{user.name}.env"
        text = _environment(topology, name, user, kept[user.key])
        if user.name == ROUTER:
            text += f"MESH_PREFIX_KEY={kept[PREFIX_KEY]}\n"
        write_private(path, text)
        files[user.name] = path
    for pattern in OF_SOME:
        for path in (here / CREDENTIALS).glob(f"{pattern}.env"):
            if path.stem not in files:
                path.unlink()
    return files


def _clients(topology: Topology, name: RegionId) -> Iterator[User]:
    yield from region_users(topology, name)
    yield from (agent_user(name, replica) for replica in topology.region(name).replicas)


def _environment(topology: Topology, name: RegionId, user: User, password: str) -> str:
    return (
        f"NATS_URL={topology.region(name).bus_url}\n"
        f"NATS_USER={user.name}\n"
        f"NATS_PASSWORD={password}\n"
        f"MESH_REGION={name}\n"
    )


def keep_passwords(path: Path, users: Iterable[str], *, rotate: bool = False) -> Mapping[str, str]:
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

    `tighten`: take group and others out of one that was there. Not for folders that may
    serve more than this.
    """
    if folder.is_dir():
        mode = stat.S_IMODE(folder.stat().st_mode)
        if tighten and mode & (stat.S_IRWXG | stat.S_IRWXO):
            folder.chmod(stat.S_IRWXU)
        return
    make_private(folder.parent, tighten=False)
    folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
