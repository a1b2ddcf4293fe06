"""The users of regions' nats-servers that we have credentials of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from infra.bus import BusAddress
from infra.credentials_file import CREDENTIALS
from infra.topology import Topology
from schemas.ids import RegionId


class NoCredentials(ValueError):
    """There are no credentials; the message names the directory."""


@dataclass(frozen=True, slots=True)
class Logins:
    """The users of one region that we have credentials of; None: not."""

    operator: BusAddress | None = None
    router: BusAddress | None = None
    system: BusAddress | None = None
    setup: BusAddress | None = None  # makes streams; not used by the doctor
    batch_setup: BusAddress | None = None  # the same for batch jobs
    batch_observer: BusAddress | None = None
    observer: BusAddress | None = None
    admin: BusAddress | None = None  # drains replicas; not used by the doctor

    @property
    def url(self) -> str:
        own = (self.operator, self.router, self.system, self.setup)
        users = (*own, self.batch_setup, self.batch_observer, self.observer, self.admin)
        return ",".join(next(user.servers for user in users if user is not None))

    def among(self, urls: Sequence[str]) -> "Logins":
        """The same at these of the region's nats-servers."""
        users = {each.name: getattr(self, each.name) for each in fields(self)}
        url = ",".join(urls)
        return Logins(**{name: user and replace(user, url=url) for name, user in users.items()})


FILES = tuple(f"{each.name.replace('_', '-')}.env" for each in fields(Logins))


def read_logins(topology: Topology, directory: Path) -> Mapping[RegionId, Logins]:
    """Those below a directory that `mesh infra nats` wrote. Raises NoCredentials if there are none.

    A machine has one region's files, an administrator those of all.
    """
    found = {}
    for region in topology.regions:
        folder = directory / region / CREDENTIALS
        logins = Logins(*(_read_credentials(folder / name) for name in FILES))
        if logins != Logins():
            found[region] = logins
    if not found:
        raise NoCredentials(
            f"no credentials of {', '.join(topology.regions)} below {directory}; give as "
            "--credentials the directory that `mesh infra nats --out` wrote, or a part of it; "
            "a plain `mesh up` keeps them in .mesh/config"
        )
    return found


def _read_credentials(file: Path) -> BusAddress | None:
    if not file.exists():
        return None
    lines = (line.split("=", 1) for line in file.read_text(encoding="utf-8").splitlines())
    values = {pair[0]: pair[1] for pair in lines if len(pair) == 2}
    try:
        return BusAddress.of_credentials(values)
    except KeyError as error:
        raise NoCredentials(f"{file}: no {error}; render it again") from error
