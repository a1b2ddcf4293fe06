"""`mesh router`: one region's router, from mesh.toml and the environment."""

import asyncio
import itertools
import logging
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click
import uvloop
from pydantic import ValidationError

from infra import tracing
from infra.address import Address, parse_address
from infra.bus import BusAddress, BusUnreachable
from infra.credentials_file import credentials_option
from infra.process import collect_seldom, end_all, raise_limit
from infra.service_manager import ServiceManager, StatusReporter
from infra.topology import DEFAULT_FILE, RegionTable, Topology, TopologyError
from infra.workers import crowd_problems, page_problems, worker_names, worker_page
from mesh.adapters.access_log import AccessLogFormat
from mesh.adapters.ended_requests import KEPT, KEPT_MAX
from mesh.adapters.http_server import connections_max
from mesh.adapters.recorder import BYTES_MAX, RecordingRefused, RecordTo
from mesh.adapters.spans import SlowLimits
from mesh.cli.choices import (
    NATS_OPTIONS,
    ROUTING_OPTIONS,
    batch_login,
    log_level_option,
    workers_option,
)
from mesh.cli.modelled import checked_option, with_options
from mesh.core.model.settings import RouterSettings
from mesh.runtime.config import BatchAccess, RouterConfig, region_entries, router_settings
from mesh.runtime.mesh_file import load_mesh
from mesh.runtime.name_claim import NameTaken
from mesh.runtime.router import PortTaken, Router, run
from mesh.supervisor.forked_workers import STOP_SIGNALS, WorkerControl, reserve_port, run_workers
from schemas.ids import RegionId, RouterId
from schemas.problems import problem_of
from schemas.settings import HoldOrder, RoutingTable

log = logging.getLogger(__name__)

EXIT_BAD_USE = 2
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
NO_PREFIX_KEY = (
    "without --prefix-key, hashes of prompts could be guessed, so no prefixes are sent to peers: "
    "give all routers of the mesh the same secret, in env MESH_PREFIX_KEY"
)


@click.command()
@credentials_option()
@click.option(
    "--region",
    envvar="MESH_REGION",
    required=True,
    help="The region to serve, as named in mesh.toml.  [env MESH_REGION]",
)
@click.option("--router", default="r1", show_default=True, help="This router's name in the region.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    default=DEFAULT_FILE,
    help="mesh.toml; the packaged three-region one if absent.",
)
@click.option("--http", help="HOST:PORT of the OpenAI endpoint, instead of the one in mesh.toml.")
@workers_option(
    "Processes that share the endpoint, each a router of the region: r1-0, r1-1 and so on. One "
    "uses one core.",
    show_default="as mesh.toml says, or 1",
)
@click.option(
    "--metrics",
    help="HOST:PORT of one more endpoint for /metrics, /health, /ready and /v1/regions; worker n's "
    "is on port + n. Needed with several workers.",
)
@with_options(NATS_OPTIONS)
@click.option(
    "--prefix-key",
    envvar="MESH_PREFIX_KEY",
    help="Secret of all routers of the mesh, for the hashes of prompts that cross regions. Best by "
    "env MESH_PREFIX_KEY. Without it, no prefixes are sent to peers.",
)
@click.option(
    "--batch-credentials",
    envvar="MESH_BATCH_CREDENTIALS",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="batch.env as rendered, for /v1/files and /v1/batches in a region with batch runners.  "
    "[env MESH_BATCH_CREDENTIALS]",
)
@with_options(
    (
        *ROUTING_OPTIONS,
        checked_option(RouterSettings, "hold_max"),
        checked_option(RouterSettings, "hold_s_max", "--hold-s"),
        checked_option(RouterSettings, "request_s_max", "--timeout-s"),
    )
)
@click.option(
    "--drain-s",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="For open requests after a request to stop, in seconds.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Record events and decisions in FILE (mode 0600), to be replayed: ids, times, loads and "
    "hashes of prompts, no text of prompts or answers. An existing FILE becomes FILE.old. Each of "
    "several workers has its own: FILE r.jsonl becomes r.r1-0.jsonl and so on.",
)
@click.option(
    "--record-bytes-max",
    type=click.IntRange(64 * 1024),
    default=BYTES_MAX,
    show_default=True,
    help="The recording ends at this size; the router continues.",
)
@click.option(
    "--access-log",
    type=click.Choice(list(AccessLogFormat)),
    default=AccessLogFormat.LOGFMT,
    show_default=True,
    help="How to write one line on standard output for each request that has ended.",
)
@click.option(
    "--requests-kept",
    type=click.IntRange(1, KEPT_MAX),
    default=KEPT,
    show_default=True,
    help="Requests that have ended and that `mesh explain` finds.",
)
@click.option(
    "--trace-slow-ttft-s",
    envvar="MESH_TRACE_SLOW_TTFT_S",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="With tracing on, a stream whose first byte took longer is traced though it is not "
    "sampled, in seconds. So is a request that failed.  [env MESH_TRACE_SLOW_TTFT_S]",
)
@click.option(
    "--trace-slow-s",
    envvar="MESH_TRACE_SLOW_S",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="The same for a whole request, in seconds.  [env MESH_TRACE_SLOW_S]",
)
@log_level_option("DEBUG logs every placement.")
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
    batch_credentials: Path | None,
    policy: str | None,
    pushing: str | None,
    hold_order: HoldOrder | None,
    drain_s: float,
    record: Path | None,
    record_bytes_max: int,
    access_log: str,
    requests_kept: int,
    log_level: str,
    trace_slow_ttft_s: float,
    trace_slow_s: float,
    **limits: float | None,
) -> None:
    """Run one region's router.

    After SIGTERM or Ctrl-C it accepts no request, finishes the open ones and ends; after a second
    one it ends at once. Traces go to OTEL_EXPORTER_OTLP_ENDPOINT if that is set.
    """
    logging.basicConfig(level=log_level, format=LOG_FORMAT)
    topology = _topology(config_file)
    own = _own_table(topology, config_file, region, router)
    address = (own.http if http is None else _address("--http", http)).listen
    given = RoutingTable(policy=policy, pushing=pushing, hold_order=hold_order)
    config = RouterConfig(
        region=RegionId(region),
        router=RouterId(router),
        peers=topology.asked_by(RegionId(region)),
        http_host=address.host,
        http_port=address.port,
        metrics=_page(own, metrics),
        connections_max=connections_max(raise_limit()),
        cors_origins=own.cors_origins,
        by_option=frozenset(name for name, text in (("http", http), ("metrics", metrics)) if text),
        bus=BusAddress(nats_url or f"nats://{own.nats}", nats_user, nats_password),
        settings=_settings(topology, RegionId(region), given, bool(prefix_key), limits),
        hash_key=prefix_key or topology.mesh.name,
        drain_s=drain_s,
        entries=region_entries(topology),
        record=RecordTo(path=record, bytes_max=record_bytes_max) if record else None,
        access_log=AccessLogFormat(access_log),
        requests_kept=requests_kept,
        slow=SlowLimits(trace_slow_ttft_s, trace_slow_s),
        keys=topology.keys,
        batch=_batch_access(topology, RegionId(region), batch_credentials, nats_url),
        epoch=0,
        seed=0,
    )
    sys.exit(_run(config, _checked_workers(own, config, workers)))


def _own_table(topology: Topology, file: Path, region: str, router: str) -> RegionTable:
    """The region's table, which names that router."""
    if region not in topology.regions:
        _refuse(f"no region {region!r} in {file}; there are {', '.join(topology.regions)}")
    own = topology.regions[RegionId(region)]
    if router not in own.routers:
        _refuse(f"no router {router!r} in [regions.{region}]; there are {', '.join(own.routers)}")
    return own


def _page(own: RegionTable, given: str | None) -> Address | None:
    """Where `/metrics` and its like are served too."""
    page = own.metrics if given is None else _address("--metrics", given)
    return page and page.listen


def _checked_workers(own: RegionTable, config: RouterConfig, given: int | None) -> int:
    """How many processes; no more than the region, its peers and the ports have room for."""
    workers = own.workers if given is None else given
    many = dict.fromkeys(own.routers, own.workers) | {config.router: workers}
    problems = (
        *crowd_problems(many, own.batch_runners),
        *page_problems(workers, config.metrics),
    )
    for key, problem in problems:
        _refuse(f"{'routers in mesh.toml' if key == 'routers' else '--' + key}: {problem}")
    return workers


def _run(config: RouterConfig, workers: int) -> int:
    """Serve in this process or in several; the status to exit with."""
    manager = ServiceManager()
    if workers == 1:
        return _serve(config, manager)
    names = worker_names(config.router, workers)
    endpoint = Address(config.http_host, config.http_port)
    try:
        reserved = reserve_port(endpoint)
    except OSError as error:
        _refuse(str(PortTaken.at(endpoint, "http", config, error)))
    with reserved:
        return run_workers(
            names, lambda n, parent: _serve(_of_worker(config, names, n), parent), manager
        )


def _of_worker(config: RouterConfig, names: Sequence[RouterId], number: int) -> RouterConfig:
    """The configuration of the worker of that number, which is about to start."""
    name, record = names[number], config.record
    logging.basicConfig(
        format=LOG_FORMAT.replace("%(levelname)s", f"{name} %(levelname)s"),
        level=logging.root.level,
        force=True,
    )
    if record is not None:
        path = record.path.with_name(f"{record.path.stem}.{name}{record.path.suffix}")
        record = replace(record, path=path)
    assert config.metrics is not None, "each worker has a page"
    return replace(
        config,
        router=name,
        shares_port=True,
        metrics=worker_page(config.metrics, number),
        record=record,
    )


def _started_now(config: RouterConfig) -> RouterConfig:
    """The configuration with the number and the random seed of this start."""
    epoch = time.time_ns() // 1_000_000
    return replace(config, epoch=epoch, seed=random.SystemRandom().getrandbits(64))


def _serve(config: RouterConfig, reporter: StatusReporter) -> int:
    """Be one router until a request to stop. `reporter`: systemd, or the parent of a worker."""
    config = _started_now(config)
    tracing.set_up(
        "mesh-router",
        f"{config.region}/{config.router}",
        **{"mesh.region": config.region, "mesh.router": config.router},
    )
    collect_seldom()
    try:
        uvloop.run(_serve_until_stopped(config, reporter))
    except (BusUnreachable, NameTaken, PortTaken, RecordingRefused) as error:
        _refuse(str(error))
    finally:
        tracing.shut_down()
    return 0


async def _serve_until_stopped(config: RouterConfig, reporter: StatusReporter) -> None:
    stop = asyncio.Event()
    reporting: list[asyncio.Task[None]] = []
    task = asyncio.current_task()
    assert task is not None
    signals = itertools.count(1)

    def on_stop(times: int) -> None:
        if times > 1:
            task.cancel()
        stop.set()
        reporter.report_stopping()

    def on_ready(router: Router) -> None:
        endpoint = Address(config.http_host, config.http_port)
        page = f", its metrics http://{config.metrics}/metrics" if config.metrics else ""
        click.echo(f"router {config.region}/{config.router} serves http://{endpoint}/v1{page}")
        reporter.report_ready()
        reporting.append(asyncio.create_task(reporter.keep_reporting(router.status)))

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, lambda: on_stop(next(signals)))
    if isinstance(reporter, WorkerControl):
        reporter.on_stop(on_stop)
    try:
        await run(config, stop, on_ready)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        await end_all(reporting)


def _topology(config_file: Path) -> Topology:
    try:
        return load_mesh(config_file)
    except TopologyError as error:
        _refuse(str(error))


def _settings(
    topology: Topology,
    region: RegionId,
    given: RoutingTable,
    has_key: bool,
    limits: Mapping[str, float | None],
) -> RouterSettings:
    others = {name: limit for name, limit in limits.items() if limit is not None}
    peers = topology.asked_by(region)
    if peers and not has_key:
        log.warning(NO_PREFIX_KEY)
    if not peers or not has_key:
        others["trie_bytes_per_s"] = 0  # no peer to send prefixes to, or no key for their hashes
    if not has_key:
        others["siblings_bytes_per_s"] = 0
    try:
        return router_settings(topology, region, given, **others)
    except ValidationError as error:
        _refuse(problem_of(error))
    except TopologyError as error:
        _refuse(str(error))


def _batch_access(
    topology: Topology, region: RegionId, credentials: Path | None, nats_url: str | None
) -> BatchAccess | None:
    """Where files and batches are kept; None in a region that keeps none."""
    own = topology.regions[region]
    if not own.batch_runners:
        return None
    if credentials is None:
        log.warning("without --batch-credentials, /v1/files and /v1/batches are not served")
        return None
    address = batch_login(nats_url or f"nats://{own.nats}", credentials)
    return BatchAccess(address, topology.batch)


def _address(option: str, text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        _refuse(f"{option}: {error}")


def _refuse(message: str) -> NoReturn:
    click.echo(f"mesh router: {message}", err=True)
    sys.exit(EXIT_BAD_USE)
