"""Which running mesh a command asks: the options --config and --credentials, and what they name."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from nats.aio.client import Client

from infra import bus, topology
from infra.topology import Topology, TopologyError
from mesh.adapters.region_records import RecordsUnavailable
from mesh.cli.unusable import Unusable
from mesh.demo.state_directory import DEFAULT_STATE, RunningMesh, is_of_a_demo, read_running_mesh
from mesh.doctor.logins import Logins, NoCredentials, read_logins
from mesh.runtime.mesh_file import load_mesh
from schemas import subjects
from schemas.ids import RegionId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KnownMesh:
    """A mesh.toml, where its credentials are, and the `mesh up` that runs it, if one does."""

    file: Path
    topology: Topology
    credentials: Path
    running: RunningMesh | None

    def logins(self) -> Mapping[RegionId, Logins]:
        """Those of which there are credentials. Raises Unusable if there are none."""
        try:
            return read_logins(self.topology, self.credentials)
        except NoCredentials as error:
            raise Unusable(str(error)) from error


def mesh_options(credentials_help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add both options to a command, as its arguments `config` and `credentials`."""
    config = click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        show_default="that of the `mesh up` with these credentials, or the demo's",
        help="The mesh.toml of the mesh.",
    )
    credentials = click.option(
        "--credentials",
        type=click.Path(path_type=Path, file_okay=False),
        default=DEFAULT_STATE / "config",
        help=credentials_help,
    )
    return lambda command: config(credentials(command))


def find_mesh(config: Path | None, credentials: Path) -> KnownMesh:
    """Read the mesh.toml. Raises Unusable."""
    running = read_running_mesh(credentials)
    if config is None and running is None and is_of_a_demo(credentials):
        where = credentials.parent
        raise Unusable(
            f"the `mesh up` of {where} is not up, or not yet: start it, wait for it, or give its"
            " mesh.toml as --config"
        )
    file = config or (topology.DEFAULT_FILE if running is None else running.config)
    try:
        mesh = load_mesh(file)
        fitted = mesh if running is None else running.fitted(mesh)
    except TopologyError as error:
        raise Unusable(str(error)) from error
    return KnownMesh(file, fitted, credentials, running)


def in_regions(
    mesh: KnownMesh,
    user: str,
    regions: Iterable[RegionId],
    work: Callable[[Client, RegionId], Coroutine[Any, Any, T]],
) -> tuple[dict[RegionId, T], dict[RegionId, str]]:
    """Do the work as that user of each region, all at once: what came of it, and why not. Raises
    Unusable where there are no credentials at all."""
    logins, done, unreached = mesh.logins(), dict[RegionId, T](), dict[RegionId, str]()

    async def one(region: RegionId) -> None:
        login = getattr(logins.get(region), user, None)
        if login is None:
            unreached[region] = (
                f"no {region}/credentials/{user}.env below {mesh.credentials}: copy that file "
                "there from where `mesh infra nats` rendered it"
            )
            return
        try:
            client = await bus.connect(login, name=f"mesh {user}", inbox_prefix=subjects.INBOX_ROOT)
            try:
                done[region] = await work(client, region)
            finally:
                await bus.close(client)
        except (bus.BusUnreachable, RecordsUnavailable) as error:
            unreached[region] = str(error)

    async def all_at_once() -> None:
        await asyncio.gather(*map(one, regions))

    asyncio.run(all_at_once())
    order = [*mesh.topology.regions]
    found = {region: done[region] for region in order if region in done}
    return found, {region: unreached[region] for region in order if region in unreached}
