"""The files of a rendered mesh: a directory per region, one credentials file per process.

    DIR/passwords.json                          all passwords, kept from one rendering to the next
    DIR/<region>/nats.conf                      the region's server
    DIR/<region>/credentials/router.env         NATS_URL, NATS_USER, NATS_PASSWORD, MESH_REGION,
                                                MESH_PREFIX_KEY
    DIR/<region>/credentials/observer.env
    DIR/<region>/credentials/operator.env
    DIR/<region>/credentials/setup.env
    DIR/<region>/credentials/system.env
    DIR/<region>/credentials/agent-<replica>.env

A region's directory holds its own secrets only (and its links'), and one that all routers of the
mesh share, for the hashes of prompts that cross regions: give each machine no more than it needs.
Files have mode 0600 and these directories 0700, those of an earlier rendering too. DIR has it if it
is made here; one that was there keeps its own, since it may hold other things.
The first three variables are those that the `nats` command reads too. Same topology, same
passwords: same bytes, so a diff of two renderings shows what changed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.nats.region_config import (
    PREFIX_KEY,
    LeafAddresses,
    Site,
    User,
    agent_user,
    region_users,
    router_user,
    settings,
    to_text,
    users,
)
from infra.nats.secret_files import keep, make_private, write_private
from infra.topology import Topology
from schemas.ids import RegionId

PASSWORDS = "passwords.json"
CONFIG = "nats.conf"
CREDENTIALS = "credentials"
STATE = "jetstream"


@dataclass(frozen=True, slots=True)
class RegionFiles:
    """What was written for one region."""

    config: Path
    credentials: Mapping[str, Path]  # by user name: router, observer, …, agent-<replica>


Written = Mapping[RegionId, RegionFiles]


def write(
    topology: Topology,
    directory: Path,
    *,
    state_directory: Path | None = None,
    leaf_addresses: LeafAddresses | None = None,
    rotate: bool = False,
) -> Written:
    """Write every region's files; those of replicas that are gone are removed.

    `state_directory`: JetStream's files are kept in <state_directory>/<region>, by default below
    the region's own directory. Raises PasswordsUnreadable.
    """
    directory = directory.absolute()
    keys = [PREFIX_KEY, *(user.key for user in users(topology))]
    kept = keep(directory / PASSWORDS, keys, rotate=rotate)
    written = {}
    for name in topology.regions:
        here = directory / name
        for folder in (here, here / CREDENTIALS):
            make_private(folder)
        state = state_directory.absolute() / name if state_directory else here / STATE
        site = Site(kept, state, leaf_addresses or {})
        write_private(here / CONFIG, to_text(settings(topology, name, site)))
        written[name] = RegionFiles(here / CONFIG, _write_credentials(topology, name, here, kept))
    return written


def _write_credentials(
    topology: Topology, name: RegionId, here: Path, kept: Mapping[str, str]
) -> dict[str, Path]:
    files = {}
    for user in _clients(topology, name):
        path = here / CREDENTIALS / f"{user.name}.env"
        text = _environment(topology, name, user, kept[user.key])
        if user == router_user(name):
            text += f"MESH_PREFIX_KEY={kept[PREFIX_KEY]}\n"
        write_private(path, text)
        files[user.name] = path
    for path in (here / CREDENTIALS).glob("agent-*.env"):
        if path.stem not in files:
            path.unlink()
    return files


def _clients(topology: Topology, name: RegionId) -> Iterator[User]:
    yield from region_users(name)
    yield from (agent_user(name, replica) for replica in topology.region(name).replicas)


def _environment(topology: Topology, name: RegionId, user: User, password: str) -> str:
    return (
        f"NATS_URL=nats://{topology.region(name).nats}\n"
        f"NATS_USER={user.name}\n"
        f"NATS_PASSWORD={password}\n"
        f"MESH_REGION={name}\n"
    )
