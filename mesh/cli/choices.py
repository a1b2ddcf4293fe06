"""Options that several commands have: mesh.toml, credentials, logs, workers, and routing."""

from pathlib import Path

import click

from infra.bus import BUS_CA, BusAddress
from infra.credentials_file import read_environment
from infra.topology import DEFAULT_FILE
from infra.workers import WORKERS_MAX
from mesh.cli.modelled import Decorator, checked_option
from mesh.cli.unusable import Unusable
from mesh.core.policies import POLICIES, find_maker
from schemas.settings import RoutingTable

POLICIES_HELP = (
    f"One of {', '.join(POLICIES)}; options follow a colon, as in cache-aware:0.3/64/1.5."
)


def known_policy(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The name as it was given; a usage error lists the known ones."""
    if value is not None:
        try:
            find_maker(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return value


# Each without a default: what is not given is left to mesh.toml.
ROUTING_OPTIONS = (
    checked_option(RoutingTable, "policy", help=POLICIES_HELP, callback=known_policy),
    checked_option(RoutingTable, "pushing"),
)

BUS_CA_OPTION = click.option(
    "--bus-ca",
    envvar=BUS_CA,
    metavar="BASE64",
    help="Who may vouch for the nats-server, as rendered with --tls: with it the connection is "
    f"encrypted.  [env {BUS_CA}]",
)
NATS_OPTIONS = (
    click.option("--nats-url", envvar="NATS_URL", help="The region's nats-server.  [env NATS_URL]"),
    click.option("--nats-user", envvar="NATS_USER", help="The user there.  [env NATS_USER]"),
    click.option(
        "--nats-password", envvar="NATS_PASSWORD", help="Its password; best in env NATS_PASSWORD."
    ),
    BUS_CA_OPTION,
)


def batch_login(url: str, credentials: Path) -> BusAddress:
    """The store of files and batch jobs, with the login in `--batch-credentials`. Raises
    Unusable."""
    try:
        return BusAddress.of_credentials(read_environment(credentials), url)
    except (OSError, ValueError) as error:
        raise Unusable(f"--batch-credentials: {credentials}: {error}") from error
    except KeyError as error:
        text = f"--batch-credentials: {credentials}: no {error.args[0]}; give batch.env"
        raise Unusable(text) from error


def config_option(help: str) -> Decorator:
    """`--config`, the file of the mesh; the packaged one of the demo if it is not given."""
    path = click.Path(path_type=Path, dir_okay=False)
    return click.option("--config", type=path, default=DEFAULT_FILE, show_default=False, help=help)


def workers_option(help: str, show_default: str | None = None) -> Decorator:
    """`--workers`, the processes of each router."""
    count = click.IntRange(1, WORKERS_MAX)
    return click.option("--workers", type=count, show_default=show_default, help=help)


def bus_servers_option(help: str, show_default: str | None = None) -> Decorator:
    """`--bus-servers`, the nats-servers of a region."""
    return click.option(
        "--bus-servers",
        type=click.Choice(["1", "3"]),
        callback=lambda ctx, param, value: value and int(value),
        show_default=show_default,
        help=help,
    )


def log_level_option(help: str) -> Decorator:
    """`--log-level`, of routers."""
    levels = click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"])
    return click.option("--log-level", default="WARNING", type=levels, help=help)
