"""Which running mesh a command asks: the options --config and --credentials, and what they name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from infra import topology
from infra.topology import Topology, TopologyError
from mesh.cli.unusable import Unusable
from mesh.demo.state_directory import DEFAULT_STATE, RunningMesh, read_running_mesh
from mesh.doctor.connectivity import Logins, NoCredentials, read_logins
from mesh.runtime.mesh_file import load_mesh
from schemas.ids import RegionId


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
        show_default=True,
        help=credentials_help,
    )
    return lambda command: config(credentials(command))


def find_mesh(config: Path | None, credentials: Path) -> KnownMesh:
    """Read the mesh.toml. Raises Unusable."""
    running = read_running_mesh(credentials)
    file = config or (topology.DEFAULT_FILE if running is None else running.config)
    try:
        mesh = load_mesh(file)
        fitted = mesh if running is None else running.fitted(mesh)
    except TopologyError as error:
        raise Unusable(str(error)) from error
    return KnownMesh(file, fitted, credentials, running)
