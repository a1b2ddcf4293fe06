"""`mesh router`: one region's router, from mesh.toml and the environment."""

import asyncio
import logging
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypedDict

import click
import uvloop

from infra import tracing
from infra.address import Address, parse_address
from infra.bus import BusAddress, BusUnreachable
from infra.descriptors import raise_limit
from infra.garbage import look_seldom
from infra.topology import DEFAULT_FILE, Topology, TopologyError, load
from infra.workers import WORKERS_MAX, crowd_problems, page_problems, worker_names, worker_page
from mesh.adapters.connections import connections_max
from mesh.adapters.recorder import BYTES_MAX, RecordingRefused, RecordTo
from mesh.cli.choices import (
    HOLD_ORDER_HELP,
    HOLD_ORDERS,
    POLICIES_HELP,
    PUSHING_HELP,
    known_policy,
    known_pushing,
)
from mesh.core.region.pushing import Pushing
from mesh.core.settings import RouterSettings
from mesh.core.waiting.hold_order import HoldOrder
from mesh.runtime.config import RouterConfig
from mesh.runtime.router import NameTaken, PortTaken, run
from mesh.runtime.routing import Given, entries, router_settings
from mesh.runtime.workers import STOPS, Orders, Workers, reserve
from schemas.ids import RegionId, RouterId

log = logging.getLogger(__name__)

EXIT_BAD_USE = 2
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
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
@click.option(
    "--workers",
    type=click.IntRange(1, WORKERS_MAX),
    show_default="as mesh.toml says, or 1",
    help="Processes that share the endpoint, each a router of the region: r1-0, r1-1 and so on. "
    "One uses one core.",
)
@click.option(
    "--metrics",
    help="HOST:PORT of a page with /metrics, /health, /ready and /v1/regions besides; worker n has "
    "it on port + n. Needed with several workers.",
)
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
    "hold_s_max",
    type=click.FloatRange(0, min_open=True),
    default=RouterSettings().hold_s_max,
    show_default=True,
    help="Longest a request is held, in seconds.",
)
@click.option(
    "--timeout-s",
    "request_s_max",
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
    "FILE.old. Of several workers each has its own: FILE r.jsonl is r.r1-0.jsonl and so on.",
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
    workers: int | None,
    metrics: str | None,
    nats_url: str | None,
    nats_user: str | None,
    nats_password: str | None,
    prefix_key: str | None,
    policy: str | None,
    pushing: Pushing | None,
    hold_order: str | None,
    drain_s: float,
    record: Path | None,
    record_bytes_max: int,
    log_level: str,
    **limits: float,
) -> None:
    """Run one region's router.

    SIGTERM or Ctrl-C: takes nothing new, finishes what is under way, then leaves; a second one
    leaves at once. Traces go to OTEL_EXPORTER_OTLP_ENDPOINT if that is set.
    """
    logging.basicConfig(level=log_level, format=LOG_FORMAT)
    topology = _topology(config_file)
    if region not in topology.regions:
        _refuse(f"no region {region!r} in {config_file}; there are {', '.join(topology.regions)}")
    own = topology.regions[RegionId(region)]
    if router not in own.routers:
        _refuse(f"no router {router!r} in [regions.{region}]; there are {', '.join(own.routers)}")
    address = (own.http if http is None else _address("--http", http)).listen
    page = own.metrics if metrics is None else _address("--metrics", metrics)
    given = Given(policy, pushing, None if hold_order is None else HoldOrder(hold_order))
    config = RouterConfig(
        region=RegionId(region),
        router=RouterId(router),
        peers=topology.asked_by(RegionId(region)),
        http_host=address.host,
        http_port=address.port,
        metrics=page and page.listen,
        connections_max=connections_max(raise_limit()),
        cors_origins=own.cors_origins,
        by_option=_given(http=http, metrics=metrics),
        bus=BusAddress(nats_url or f"nats://{own.nats}", nats_user, nats_password),
        settings=_settings(topology, RegionId(region), given, bool(prefix_key), **limits),
        hash_key=prefix_key or topology.mesh.name,
        drain_s=drain_s,
        entries=entries(topology),
        record=RecordTo(path=record, bytes_max=record_bytes_max) if record else None,
        keys=topology.keys,
        **_of_this_start(),
    )
    workers = own.workers if workers is None else workers
    many = dict.fromkeys(own.routers, own.workers) | {config.router: workers}
    for key, problem in (*crowd_problems(many), *page_problems(workers, config.metrics)):
        _refuse(f"{'routers in mesh.toml' if key == 'routers' else '--' + key}: {problem}")
    sys.exit(_run(config, workers))


def _run(config: RouterConfig, workers: int) -> int:
    """Serve in this process or in several, and return the status to end with."""
    if workers == 1:
        return _serve(config)
    names = worker_names(config.router, workers)
    door = Address(config.http_host, config.http_port)
    try:
        reserved = reserve(door)
    except OSError as error:
        _refuse(str(PortTaken.at(door, "http", config, error)))
    with reserved:
        return Workers(names, lambda n, orders: _serve(_worker(config, names, n), orders)).run()


def _worker(config: RouterConfig, names: Sequence[RouterId], number: int) -> RouterConfig:
    """What the worker of that number runs by, from when it starts."""
    name, record = names[number], config.record
    logging.basicConfig(
        format=LOG_FORMAT.replace("%(levelname)s", f"{name} %(levelname)s"),
        level=logging.root.level,
        force=True,
    )
    if record is not None:
        path = record.path.with_name(f"{record.path.stem}.{name}{record.path.suffix}")
        record = replace(record, path=path)
    assert config.metrics is not None, "workers have a page each"
    return replace(
        config,
        router=name,
        shares_port=True,
        metrics=worker_page(config.metrics, number),
        record=record,
        **_of_this_start(),
    )


def _given(**options: str | None) -> frozenset[str]:
    return frozenset(name for name, text in options.items() if text is not None)


class _Start(TypedDict):
    epoch: int
    seed: int


def _of_this_start() -> _Start:
    epoch = time.time_ns() // 1_000_000
    return {"epoch": epoch, "seed": random.SystemRandom().getrandbits(64)}


def _serve(config: RouterConfig, orders: Orders | None = None) -> int:
    """Be one router until told to stop."""
    tracing.set_up("mesh-router", **{"mesh.region": config.region, "mesh.router": config.router})
    look_seldom()
    try:
        uvloop.run(_until_told(config, orders))
    except (BusUnreachable, NameTaken, PortTaken, RecordingRefused) as error:
        _refuse(str(error))
    finally:
        tracing.shut_down()
    return 0


async def _until_told(config: RouterConfig, orders: Orders | None) -> None:
    stop = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    signals = 0

    def on_stop(times: int) -> None:
        if times > 1:
            task.cancel()
        stop.set()

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        on_stop(signals)

    def on_ready() -> None:
        _say_ready(config)
        if orders is not None:
            orders.say_ready()

    loop = asyncio.get_running_loop()
    for number in STOPS:
        loop.add_signal_handler(number, on_signal)
    if orders is not None:
        orders.listen(on_stop)
    try:
        await run(config, stop, on_ready)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


def _say_ready(config: RouterConfig) -> None:
    where = Address(config.http_host, config.http_port)
    page = f", its metrics http://{config.metrics}/metrics" if config.metrics else ""
    click.echo(f"router {config.region}/{config.router} serves http://{where}/v1{page}")


def _topology(config_file: Path) -> Topology:
    try:
        return load(config_file)
    except TopologyError as error:
        _refuse(str(error))


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


def _address(option: str, text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        _refuse(f"{option}: {error}")


def _refuse(message: str) -> NoReturn:
    click.echo(f"mesh router: {message}", err=True)
    sys.exit(EXIT_BAD_USE)
