"""`mesh router`: one region's router, from mesh.toml and the environment."""

import asyncio
import logging
import random
import signal
import sys
import time
from pathlib import Path

import click
import uvloop

from infra import tracing
from infra.address import Address, parse_address
from infra.bus import BusAddress, BusUnreachable
from infra.garbage import look_seldom
from infra.topology import DEFAULT_FILE, Topology, TopologyError, load
from mesh.adapters.recorder import BYTES_MAX, RecordingRefused, RecordTo
from mesh.cli.choices import (
    HOLD_ORDER_HELP,
    HOLD_ORDERS,
    POLICIES_HELP,
    PUSHING_HELP,
    known_policy,
    known_pushing,
)
from mesh.core.hold_order import HoldOrder
from mesh.core.pushing import Pushing
from mesh.core.settings import RouterSettings
from mesh.runtime.config import RouterConfig
from mesh.runtime.router import NameTaken, PortTaken, run
from mesh.runtime.routing import Given, entries, router_settings
from schemas.ids import RegionId, RouterId

log = logging.getLogger(__name__)

EXIT_BAD_USE = 2
NO_PREFIX_KEY = (
    "without --prefix-key, hashes of prompts could be guessed, so peers are told of no prefixes: "
    "give all routers of the mesh one secret, in env MESH_PREFIX_KEY"
)


@click.command()
@click.option("--region", required=True, help="The region to serve, as named in mesh.toml.")
@click.option("--router", default="r1", show_default=True, help="This router's name in the region.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    default=DEFAULT_FILE,
    help="mesh.toml; the packaged three-region one if absent.",
)
@click.option("--http", help="HOST:PORT of the OpenAI endpoint, instead of the one in mesh.toml.")
@click.option("--nats-url", envvar="NATS_URL", help="The region's nats-server.  [env NATS_URL]")
@click.option("--nats-user", envvar="NATS_USER", help="[env NATS_USER]")
@click.option("--nats-password", envvar="NATS_PASSWORD", help="Best by env NATS_PASSWORD.")
@click.option(
    "--prefix-key",
    envvar="MESH_PREFIX_KEY",
    help="Secret of all routers of the mesh, for the hashes of prompts that cross regions. Best by "
    "env MESH_PREFIX_KEY. Without it, peers are told of no prefixes.",
)
@click.option(
    "--policy",
    callback=known_policy,
    metavar="NAME[:OPTIONS]",
    show_default=f"as mesh.toml says, or {RouterSettings().policy}",
    help=POLICIES_HELP,
)
@click.option("--pushing", callback=known_pushing, metavar="RULE", help=PUSHING_HELP)
@click.option("--hold-order", type=click.Choice(HOLD_ORDERS), help=HOLD_ORDER_HELP)
@click.option(
    "--hold-max",
    type=click.IntRange(1),
    default=RouterSettings().hold_max,
    show_default=True,
    help="Most requests held while every replica is full.",
)
@click.option(
    "--hold-s",
    type=click.FloatRange(0, min_open=True),
    default=RouterSettings().hold_s_max,
    show_default=True,
    help="Longest a request is held, in seconds.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0, min_open=True),
    default=RouterSettings().request_s_max,
    show_default=True,
    help="Deadline of requests that name none, in seconds.",
)
@click.option(
    "--drain-s",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="For requests under way when asked to stop.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write what happens and what is decided to FILE (mode 0600), to be replayed: ids, times, "
    "loads and hashes of prompts, no text of prompts or answers. A FILE that exists becomes "
    "FILE.old.",
)
@click.option(
    "--record-bytes-max",
    type=click.IntRange(64 * 1024),
    default=BYTES_MAX,
    show_default=True,
    help="The recording ends there; the router goes on.",
)
@click.option(
    "--log-level",
    default="WARNING",
    show_default=True,
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]),
    help="INFO logs every placement.",
)
def command(
    region: str,
    router: str,
    config_file: Path,
    http: str | None,
    nats_url: str | None,
    nats_user: str | None,
    nats_password: str | None,
    prefix_key: str | None,
    policy: str | None,
    pushing: Pushing | None,
    hold_order: str | None,
    hold_max: int,
    hold_s: float,
    timeout_s: float,
    drain_s: float,
    record: Path | None,
    record_bytes_max: int,
    log_level: str,
) -> None:
    """Run one region's router.

    SIGTERM or Ctrl-C: takes nothing new, finishes what is under way, then leaves; a second one
    leaves at once. Traces go to OTEL_EXPORTER_OTLP_ENDPOINT if that is set.
    """
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    topology = _topology(config_file)
    if region not in topology.regions:
        _refuse(f"no region {region!r} in {config_file}; there are {', '.join(topology.regions)}")
    own = topology.regions[RegionId(region)]
    if router not in own.routers:
        _refuse(f"no router {router!r} in [regions.{region}]; there are {', '.join(own.routers)}")
    address = (_address(http) if http is not None else own.http).listen
    given = Given(policy, pushing, None if hold_order is None else HoldOrder(hold_order))
    limits = {"hold_max": hold_max, "hold_s_max": hold_s, "request_s_max": timeout_s}
    settings = _settings(topology, RegionId(region), given, bool(prefix_key), **limits)
    config = RouterConfig(
        region=RegionId(region),
        router=RouterId(router),
        peers=topology.asked_by(RegionId(region)),
        http_host=address.host,
        http_port=address.port,
        bus=BusAddress(nats_url or f"nats://{own.nats}", nats_user, nats_password),
        settings=settings,
        hash_key=prefix_key or topology.mesh.name,
        epoch=time.time_ns() // 1_000_000,
        seed=random.SystemRandom().getrandbits(64),
        drain_s=drain_s,
        entries=entries(topology),
        record=RecordTo(path=record, bytes_max=record_bytes_max) if record else None,
        keys=topology.keys,
    )
    tracing.set_up("mesh-router", **{"mesh.region": region, "mesh.router": router})
    look_seldom()
    try:
        uvloop.run(_until_signal(config))
    except (BusUnreachable, NameTaken, PortTaken, RecordingRefused) as error:
        _refuse(str(error))
    finally:
        tracing.shut_down()


async def _until_signal(config: RouterConfig) -> None:
    stop = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await run(config, stop, lambda: _say_ready(config))
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


def _say_ready(config: RouterConfig) -> None:
    where = Address(config.http_host, config.http_port)
    click.echo(f"router {config.region}/{config.router} serves http://{where}/v1")


def _topology(config_file: Path) -> Topology:
    try:
        return load(config_file)
    except TopologyError as error:
        _refuse(str(error))
        raise


def _settings(
    topology: Topology, region: RegionId, given: Given, has_key: bool, **others: float
) -> RouterSettings:
    peers = topology.asked_by(region)
    if peers and not has_key:
        log.warning(NO_PREFIX_KEY)
    if not peers or not has_key:
        others["trie_bytes_per_s"] = 0  # nobody to tell of prefixes, or nothing to hide them with
    if not has_key:
        others["siblings_bytes_per_s"] = 0
    try:
        return router_settings(topology, region, given, **others)
    except ValueError as error:
        _refuse(str(error))
        raise


def _address(text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        _refuse(f"--http: {error}")
        raise


def _refuse(message: str) -> None:
    click.echo(f"mesh router: {message}", err=True)
    sys.exit(EXIT_BAD_USE)
