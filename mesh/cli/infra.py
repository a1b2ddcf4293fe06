"""The command `mesh infra`: configuration of what runs around the mesh."""

from pathlib import Path

import click

from infra import topology
from infra.nats import bundle, server
from infra.nats.passwords import PasswordsUnreadable
from mesh.cli.unusable import Unusable


@click.group(help="Render configuration for the servers around the mesh.")
def command() -> None:
    """The group; its subcommands do the work."""


@command.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    default=topology.DEFAULT_FILE,
    help="The mesh.toml to render. Without it: the three regions of the demo.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Where to write: a directory per region. Passwords found there are kept.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="JetStream keeps its files in STATE_DIR/<region>. Default: OUT/<region>/jetstream.",
)
@click.option("--rotate", is_flag=True, help="Make every password anew.")
@click.option(
    "--nats-server",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The server that checks the result. Default: the one on PATH, or the packaged one.",
)
def nats(
    config: Path, out: Path, state_dir: Path | None, rotate: bool, nats_server: Path | None
) -> None:
    """Write a nats-server configuration and credentials for every region."""
    try:
        binary = server.find(nats_server)
        mesh = topology.load(config)
        written = bundle.write(mesh, out, state_directory=state_dir, rotate=rotate)
        for files in written.values():
            server.check_config(binary, files.config)
    except (topology.TopologyError, PasswordsUnreadable, server.ServerUnusable) as error:
        raise Unusable(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"can't write below {out}: {error}") from error
    _tell(written)


def _tell(written: bundle.Written) -> None:
    click.echo("checked and written:")
    for name, files in written.items():
        folder = next(iter(files.credentials.values())).parent
        click.echo(f"  {name}: {files.config}")
        click.echo(f"  {name}: {folder}/ ({len(files.credentials)} files of credentials)")
