"""The rendered credentials that this machine has: some regions', of some users."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.bus import BusAddress
from infra.nats.bundle import CREDENTIALS
from infra.nats.region_config import operator_user, router_user, setup_user, system_user
from infra.topology import Topology
from schemas.ids import RegionId


class NoCredentials(ValueError):
    """Nothing to log in with; the message says where it was looked for."""


@dataclass(frozen=True, slots=True)
class Logins:
    """Who the doctor can be in one region; None where no credentials are there."""

    operator: BusAddress | None = None
    router: BusAddress | None = None
    system: BusAddress | None = None
    setup: BusAddress | None = None  # who makes streams: the doctor does not

    @property
    def url(self) -> str:
        """Where the region's nats-server is."""
        return next(one.url for one in self._known if one is not None)

    @property
    def _known(self) -> tuple[BusAddress | None, ...]:
        return self.operator, self.router, self.system, self.setup


def read_logins(topology: Topology, directory: Path) -> Mapping[RegionId, Logins]:
    """Those below a directory that `mesh infra nats` wrote. Raises NoCredentials if there are none.

    A machine has one region's files, or an administrator's all regions'.
    """
    found = {}
    for region in topology.regions:
        folder = directory / region / CREDENTIALS
        makers = (operator_user, router_user, system_user, setup_user)
        users = [make(region) for make in makers]
        logins = Logins(*(_read(folder / f"{user.name}.env") for user in users))
        if logins != Logins():
            found[region] = logins
    if not found:
        raise NoCredentials(
            f"no credentials of {', '.join(topology.regions)} below {directory}; give as "
            "--credentials the directory that `mesh infra nats --out` wrote, or a part of it; "
            "a plain `mesh up` keeps them in .mesh/config"
        )
    return found


def _read(file: Path) -> BusAddress | None:
    if not file.exists():
        return None
    lines = (line.split("=", 1) for line in file.read_text(encoding="utf-8").splitlines())
    said = {pair[0]: pair[1] for pair in lines if len(pair) == 2}
    try:
        return BusAddress(said["NATS_URL"], said["NATS_USER"], said["NATS_PASSWORD"])
    except KeyError as error:
        raise NoCredentials(f"{file}: no {error}; render it again") from error
