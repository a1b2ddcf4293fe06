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

With `tls` also:

    DIR/ca.pem, ca.key                          the authority (`infra.certificates`)
    DIR/<region>/ca.pem                         the same: who is trusted
    DIR/<region>/nats.pem, nats.key             of its server; nats-1.pem, … where it has three
    DIR/<region>/router.pem, router.key         of its endpoint, where clients trust the authority

A server's configuration names these files without a folder: it is started where they are.
Credentials have the authority as MESH_BUS_CA.

A region's directory holds its own secrets only (and its links'), and one that all routers of the
mesh share, for the hashes of prompts that cross regions: give each machine no more than it needs.
Files have mode 0600 and these directories 0700, those of an earlier rendering too. DIR has it if it
is made here; one that was there keeps its own, since it may hold other things.
The first three variables are those that the `nats` command reads too. Same topology, same
passwords: same bytes, so a diff of two renderings shows what changed.

Passwords are random, never chosen. Rendering again keeps every password, so that adding a replica
disturbs no other process; a user who was removed gets a new one when added again. A server's file
has their bcrypt hashes, and in plain only those with which it logs in itself, over links to other
regions.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infra.bus import BUS_CA
from infra.certificates import CA, Authority, keep_authority, keep_certificate
from infra.credentials_file import CREDENTIALS
from infra.nats.region_config import (
    NO_OLD_LOGINS,
    PREFIX_KEY,
    ROUTER,
    LeafAddresses,
    OldLogins,
    Site,
    User,
    agent_user,
    certificate_files,
    region_users,
    server_hosts,
    settings,
    to_text,
    users,
)
from infra.private_files import make_private, write_private
from infra.topology import Topology
from schemas.ids import RegionId

PASSWORDS = "passwords.json"
CONFIG = "nats{}.conf"  # with the server's suffix
STATE = "jetstream"
ROUTER_CERTIFICATE = ("router.pem", "router.key")
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
    keep_old: bool = False,
    drop_old: bool = False,
    tls: bool = False,
    new_certificates: bool = False,
) -> Written:
    """Write every region's files; those of replicas, batch runners and servers that are gone are
    removed.

    `state_directory`: JetStream's files are kept in <state_directory>/<region>, by default below
    the region's own directory. `rotate`: with new passwords; with `keep_old` the old
    logins are taken too, until `drop_old`. `new_certificates`: though those that
    are there are good. Raises PasswordsUnreadable, CertificatesUnusable.
    """
    directory = directory.absolute()
    authority = keep_authority(directory, topology.mesh.name) if tls else None
    keys = [PREFIX_KEY, *(user.key for user in users(topology))]
    path = directory / PASSWORDS
    old = _old_logins(path, rotate=rotate, keep_old=keep_old, drop_old=drop_old)
    kept = keep_passwords(path, keys, rotate=rotate, old=old)
    written = {}
    for name in topology.regions:
        here = directory / name
        for folder in (here, here / CREDENTIALS):
            make_private(folder)
        state = state_directory.absolute() / name if state_directory else here / STATE
        site = Site(kept, state, leaf_addresses or {}, tls, old)
        if authority is not None:
            _write_certificates(authority, topology, name, here, site, renew=new_certificates)
        configs = tuple(here / CONFIG.format(each.suffix) for each in topology.region(name).servers)
        for number, config in enumerate(configs):
            write_private(config, to_text(settings(topology, name, site, number)))
        for suffix in ("", "-1", "-2", "-3"):
            if (gone := here / CONFIG.format(suffix)) not in configs:
                for file in (gone, *(here / one for one in certificate_files(suffix))):
                    file.unlink(missing_ok=True)
        ca = "" if authority is None else f"{BUS_CA}={authority.base64}\n"
        written[name] = RegionFiles(configs, _write_credentials(topology, name, here, site, ca))
    return written


def _write_certificates(
    authority: Authority, topology: Topology, name: RegionId, here: Path, site: Site, *, renew: bool
) -> None:
    write_private(here / CA, authority.pem)
    region = topology.region(name)
    for number, server in enumerate(region.servers):
        cert, key = (here / one for one in certificate_files(server.suffix))
        hosts = server_hosts(topology, name, number, site.leaf_addresses)
        keep_certificate(authority, cert, key, hosts, renew=renew)
    endpoint = region.endpoint and urlsplit(region.endpoint).hostname
    hosts = (region.http.host, endpoint) if endpoint else (region.http.host,)
    cert, key = (here / one for one in ROUTER_CERTIFICATE)
    keep_certificate(authority, cert, key, hosts, renew=renew)


def _write_credentials(
    topology: Topology, name: RegionId, here: Path, site: Site, ca: str
) -> dict[str, Path]:
    files = {}
    for user in _clients(topology, name):
        path = here / CREDENTIALS / f"{user.name}.env"
        text = _environment(topology, name, user, site) + ca
        if user.name == ROUTER:
            text += f"MESH_PREFIX_KEY={site.passwords[PREFIX_KEY]}\n"
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


def _environment(topology: Topology, name: RegionId, user: User, site: Site) -> str:
    return (
        f"NATS_URL={topology.region(name).bus_url}\n"
        f"NATS_USER={site.login(user)}\n"
        f"NATS_PASSWORD={site.passwords[user.key]}\n"
        f"MESH_REGION={name}\n"
    )


def _old_logins(path: Path, *, rotate: bool, keep_old: bool, drop_old: bool) -> OldLogins:
    """What is taken besides the passwords that `keep_passwords` gives."""
    content = _read(path) if path.exists() else {}
    old = OldLogins(content.get("generation", 0), content.get("before", {}))
    if rotate and keep_old:
        return OldLogins(old.generation + 1, content.get("passwords", {}))
    return OldLogins(old.generation) if rotate or drop_old else old


def keep_passwords(
    path: Path, users: Iterable[str], *, rotate: bool = False, old: OldLogins = NO_OLD_LOGINS
) -> Mapping[str, str]:
    """A password for each user: those in the file, and new ones for the rest; the file follows.

    `rotate` makes all of them new: every process must then get its new credentials. `old` is kept
    beside them.
    """
    known = {} if rotate or not path.exists() else _read(path)["passwords"]
    kept = {
        user: known.get(user) or secrets.token_urlsafe(PASSWORD_BYTES) for user in sorted(users)
    }
    content: dict[str, object] = {"v": FILE_VERSION, "passwords": kept}
    if old.generation:
        content |= {"generation": old.generation, "before": old.passwords}
    text = json.dumps(content, indent=1) + "\n"
    write_private(path, text)
    return kept


def _read(path: Path) -> dict[str, Any]:
    """Its `passwords`, and `generation` and `before` where it has them."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["v"] != FILE_VERSION:
            raise ValueError(f"version {content['v']}, this program reads {FILE_VERSION}")
        return {
            "passwords": _texts(content["passwords"]),
            "before": _texts(content.get("before", {})),
            "generation": int(content.get("generation", 0)),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PasswordsUnreadable(
            f"{path}: not a passwords file of the mesh ({error}); restore it, "
            "or remove it to make new passwords for every process"
        ) from error


def _texts(found: Mapping[str, object]) -> dict[str, str]:
    return {str(user): str(password) for user, password in found.items()}
