"""The options of a router's console."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from infra.address import Address, parse_address
from infra.bus import BusAddress
from infra.credentials_file import read_environment
from infra.topology import Topology
from mesh.cli.unusable import Unusable
from mesh.console.config import ConsoleConfig, KeyUnusable, read_admin_key
from mesh.console.server import Console
from mesh.doctor.logins import Logins
from mesh.http.tls import ServerTls
from mesh.runtime.config import RouterConfig
from mesh.runtime.reload import LiveConfig
from mesh.runtime.router import PortTaken
from schemas.ids import RegionId

log = logging.getLogger(__name__)

FORM = "[REGION=]FILE"

CONSOLE_OPTIONS = (
    click.option(
        "--console",
        help="HOST:PORT of the operators' console, a page that shows regions, replicas and "
        "requests; for the operators' network only. With several workers the first one serves it.",
        show_default="as mesh.toml says, or none",
    ),
    click.option(
        "--console-credentials",
        envvar="MESH_CONSOLE_CREDENTIALS",
        multiple=True,
        metavar=FORM,
        help="observer.env as rendered, of the router's region or of that one; repeat it for more "
        "regions. The console needs one at least.  [env MESH_CONSOLE_CREDENTIALS]",
    ),
    click.option(
        "--console-admin-credentials",
        envvar="MESH_CONSOLE_ADMIN_CREDENTIALS",
        multiple=True,
        metavar=FORM,
        help="admin.env likewise, so that replicas there can be drained from the console.  "
        "[env MESH_CONSOLE_ADMIN_CREDENTIALS]",
    ),
    click.option(
        "--console-admin-key-file",
        envvar="MESH_CONSOLE_ADMIN_KEY_FILE",
        type=click.Path(path_type=Path),
        help="File with the key that the console asks for before it changes anything; without one "
        "it is read-only.  [env MESH_CONSOLE_ADMIN_KEY_FILE]",
    ),
)
NAMES = ("console", "console_credentials", "console_admin_credentials", "console_admin_key_file")


def console_config(
    config: RouterConfig, topology: Topology, given: Mapping[str, Any]
) -> ConsoleConfig | None:
    """The console that these options ask for; None for none. Raises Unusable."""
    own, option = topology.regions[config.region], given["console"]
    address = _address(option) if option else own.console
    if address is None:
        return None
    observers, admins = (
        _logins(option, topology, config, given[option.replace("-", "_")])
        for option in ("console-credentials", "console-admin-credentials")
    )
    if not observers:
        if option:
            raise Unusable("--console needs --console-credentials: observer.env of the region")
        log.warning("without --console-credentials, the console is not served")
        return None
    key_file = given["console_admin_key_file"]
    if bool(admins) != bool(key_file):
        raise Unusable(
            "give --console-admin-credentials and --console-admin-key-file together, or neither "
            "for a console that only shows"
        )
    try:
        key = None if key_file is None else read_admin_key(key_file)
    except KeyUnusable as error:
        raise Unusable(f"--console-admin-key-file: {error}") from error
    names = observers.keys() | admins.keys()
    return ConsoleConfig(
        address=address,
        topology=topology,
        region=config.region,
        router=config.router,
        settings=lambda: config.settings,
        logins={
            name: Logins(observer=observers.get(name), admin=admins.get(name)) for name in names
        },
        admin_key=key,
    )


@asynccontextmanager
async def serving(live: LiveConfig, console: ConsoleConfig | None) -> AsyncIterator[None]:
    """The console, if there is one, until the end of the block. Raises PortTaken."""
    if console is None:
        yield
        return
    config = live.config

    def certificate() -> ServerTls:
        assert live.config.tls is not None, "it neither comes nor goes without a restart"
        return live.config.tls

    tls = None if config.tls is None else certificate
    served = Console(replace(console, settings=lambda: live.config.settings, tls=tls))
    try:
        await served.open()
    except OSError as error:
        raise PortTaken.at(console.address, "console", config, error) from error
    try:
        scheme = "https" if tls else "http"
        click.echo(f"console of {config.region}/{config.router}: {scheme}://{console.address}/")
        yield
    finally:
        await served.close()


def _address(text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise Unusable(f"--console: {error}") from error


def _logins(
    option: str, topology: Topology, config: RouterConfig, texts: Sequence[str]
) -> dict[RegionId, BusAddress]:
    """The logins in these files, by region. Its own server is where this router's bus is."""
    found = {}
    for text in texts:
        name, _, file = text.rpartition("=")
        region = RegionId(name or config.region)
        if region not in topology.regions:
            known = ", ".join(topology.regions)
            raise Unusable(f"--{option}: no region {name!r}; there are {known}")
        try:
            values = read_environment(Path(file))
            url = config.bus.url if region == config.region else values["NATS_URL"]
            found[region] = BusAddress.of_credentials(values, url)
        except KeyError as error:
            raise Unusable(f"--{option}: {file}: no {error.args[0]}; render it again") from error
        except (OSError, ValueError) as error:
            raise Unusable(f"--{option}: {file}: {error}") from error
    return found
