"""The command `mesh infra`: configuration of the nats-servers, and their streams."""

import asyncio
import sys
from pathlib import Path

import click

from infra import certificates, topology
from infra.bus import BusUnreachable
from infra.nats import bundle, server
from infra.nats.bundle import PasswordsUnreadable
from mesh.adapters.streams import StreamsUnusable, set_up_region
from mesh.cli.choices import config_option
from mesh.cli.mesh_options import find_mesh
from mesh.cli.unusable import Unusable
from mesh.runtime.mesh_file import load_mesh
from schemas.ids import RegionId

UNUSABLE = (
    topology.TopologyError,
    PasswordsUnreadable,
    certificates.CertificatesUnusable,
    server.ServerUnusable,
)


@click.group()
def command() -> None:
    """Write nats-server configurations; make the streams."""


@command.command()
@config_option("The mesh.toml to render. Without it: the three regions of the demo.")
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
@click.option("--rotate", is_flag=True, help="Replace every password.")
@click.option(
    "--keep-old",
    is_flag=True,
    help="With --rotate: the old logins are taken too, until a rendering with --drop-old.",
)
@click.option("--drop-old", is_flag=True, help="Take logins of before --rotate no more.")
@click.option(
    "--tls",
    is_flag=True,
    help="Encrypt all connections of the bus, with certificates of the authority in OUT, which is "
    "made if there is none. Where OUT has one, this holds without being said.",
)
@click.option("--new-certificates", is_flag=True, help="Replace every certificate.")
@click.option(
    "--change-authority",
    is_flag=True,
    help="Take the next of three steps from the authority in OUT to a new one.",
)
@click.option(
    "--nats-server",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The server that checks the result. Default: the one on PATH, or the packaged one.",
)
def nats(
    config: Path,
    out: Path,
    state_dir: Path | None,
    rotate: bool,
    keep_old: bool,
    drop_old: bool,
    tls: bool,
    new_certificates: bool,
    change_authority: bool,
    nats_server: Path | None,
) -> None:
    """Write a nats-server configuration and credentials for every region."""
    try:
        binary = server.find(nats_server)
        mesh = load_mesh(config)
        if change_authority:
            step = certificates.change_authority(out, mesh.mesh.name)
            click.echo(f"change of authority, step {step}")
        written = bundle.write(
            mesh,
            out,
            state_directory=state_dir,
            rotate=rotate,
            keep_old=keep_old,
            drop_old=drop_old,
            new_certificates=new_certificates,
            tls=tls or (out / certificates.CA).exists(),
        )
        for files in written.values():
            for file in files.configs:
                server.check_config(binary, file)
    except UNUSABLE as error:
        raise Unusable(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"can't write below {out}: {error}") from error
    click.echo("checked and written:")
    for name, files in written.items():
        folder = next(iter(files.credentials.values())).parent
        click.echo(f"  {name}: {', '.join(map(str, files.configs))}")
        click.echo(f"  {name}: {folder}/ ({len(files.credentials)} files of credentials)")


@command.command()
@config_option("The mesh.toml of the mesh. Without it: the three regions of the demo.")
@click.option(
    "--credentials",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="The directory that `mesh infra nats --out` wrote, or one with some regions' part of it.",
)
@click.option(
    "--region",
    "regions",
    multiple=True,
    help="This region alone; may be given again. Default: all whose setup credentials are there.",
)
def streams(config: Path, credentials: Path, regions: tuple[str, ...]) -> None:
    """Create every region's streams, or repair them; their nats-servers must run.

    Needed once after the servers were first started, and when `mesh doctor` finds a stream missing
    or altered. Exit code 1: a region's streams could not be created.
    """
    known = find_mesh(config, credentials)
    mesh, logins = known.topology, known.logins()
    found = {name: (login.setup, login) for name, login in logins.items() if login.setup}
    wanted = [RegionId(name) for name in regions] or list(found)
    if missing := [name for name in wanted if name not in found]:
        raise Unusable(f"no setup.env of {', '.join(missing)} below {credentials}")
    if not wanted:
        raise Unusable(f"no setup.env of any region below {credentials}")
    failed = False
    for name in wanted:
        setup, login = found[name]
        try:
            done = asyncio.run(set_up_region(mesh, name, setup, login.batch_setup))
        except (BusUnreachable, StreamsUnusable) as error:
            click.echo(f"{name}: {error}", err=True)
            failed = True
            continue
        for stream, what in done.items():
            click.echo(f"{name}: stream {stream} {'is ' * what.startswith('as')}{what}")
    if failed:
        sys.exit(1)
