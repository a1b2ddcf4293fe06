"""`mesh batch-runner`: one of a region's batch runners, from mesh.toml and the environment."""

import asyncio
import itertools
import logging
import random
import signal
import time
from pathlib import Path

import click
import uvloop

from infra import reloads
from infra.address import Address, parse_address
from infra.bus import BusAddress, BusUnreachable
from infra.credentials_file import credentials_option
from infra.process import collect_seldom, end_all, raise_limit
from infra.service_manager import ServiceManager, StatusReporter
from infra.topology import RegionTable, TopologyError
from mesh.cli.choices import NATS_OPTIONS, batch_login, config_option, log_level_option
from mesh.cli.modelled import with_options
from mesh.cli.unusable import Unusable
from mesh.core.offline.settings import OfflineSettings
from mesh.runtime.batch_runner import BatchRunner, RunnerConfig, run
from mesh.runtime.config import model_rules
from mesh.runtime.mesh_file import load_mesh
from mesh.runtime.name_claim import NameTaken
from schemas.ids import RegionId, RouterId

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
DRAIN_S = 20.0


@click.command()
@credentials_option()
@click.option(
    "--region",
    envvar="MESH_REGION",
    required=True,
    help="The region whose batch jobs it does, as named in mesh.toml.  [env MESH_REGION]",
)
@click.option("--name", default="batch-0", help="One of the region's batch_runners.")
@config_option("mesh.toml; the packaged three-region one if absent.")
@with_options(NATS_OPTIONS)
@click.option(
    "--prefix-key",
    envvar="MESH_PREFIX_KEY",
    help="Secret of all routers of the mesh, for the hashes of prompts. Best by env "
    "MESH_PREFIX_KEY.",
)
@click.option(
    "--batch-credentials",
    envvar="MESH_BATCH_CREDENTIALS",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="batch.env as rendered: the login to the region's files and jobs.  "
    "[env MESH_BATCH_CREDENTIALS]",
)
@click.option("--metrics", help="HOST:PORT of an endpoint for /metrics, /health and /ready.")
@click.option(
    "--drain-s",
    type=click.FloatRange(0),
    default=DRAIN_S,
    help="For lines that replicas have, after a request to stop, in seconds.",
)
@log_level_option("INFO logs attempts that failed.")
def command(
    region: str,
    name: str,
    config: Path,
    nats_url: str | None,
    nats_user: str | None,
    nats_password: str | None,
    bus_ca: str | None,
    prefix_key: str | None,
    batch_credentials: Path | None,
    metrics: str | None,
    drain_s: float,
    log_level: str,
) -> None:
    """Run one of a region's batch runners.

    It checks new batch jobs, gives their lines to replicas that have room beside their online
    requests, here and in other regions, and writes the output files. After SIGTERM or Ctrl-C it
    puts back what no replica has and ends; after a second one it ends at once.
    """
    logging.basicConfig(level=log_level, format=LOG_FORMAT)
    raise_limit()
    try:
        topology = load_mesh(config)
        own = topology.region(region)
    except TopologyError as error:
        raise Unusable(str(error)) from error
    if name not in own.batch_runners:
        known = ", ".join(own.batch_runners) or "none"
        raise Unusable(f"no batch runner {name!r} in [regions.{region}]; there are {known}")
    home = RegionId(region)
    if not prefix_key:
        log.warning("without --prefix-key, peers can't tell which of their prompts begin alike")
    runner = RunnerConfig(
        region=home,
        router=RouterId(name),
        peers=topology.asked_by(home),
        bus=BusAddress(nats_url or own.bus_url, nats_user, nats_password, bus_ca),
        store=_store_address(own, batch_credentials, nats_url),
        limits=topology.batch,
        settings=OfflineSettings(
            drain_s_max=drain_s, price=own.gpu_hour_price, ground=topology.ground_for(home)
        ),
        hash_key=prefix_key or topology.mesh.name,
        epoch=time.time_ns() // 1_000_000,
        seed=random.SystemRandom().getrandbits(64),
        metrics=None if metrics is None else _page(metrics),
        models=model_rules(topology),
        tenants=topology.tenants,
    )
    collect_seldom()
    try:
        uvloop.run(_serve_until_stopped(runner, ServiceManager()))
    except NameTaken as error:
        raise Unusable(str(error)) from error
    except BusUnreachable as error:  # it may pass by itself: status 1, and its unit tries again
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"--metrics {metrics}: {error.strerror or error}") from error


def _store_address(own: RegionTable, credentials: Path | None, nats_url: str | None) -> BusAddress:
    url = nats_url or own.bus_url
    if credentials is None:
        return BusAddress(url)
    return batch_login(url, credentials)


def _page(text: str) -> Address:
    try:
        return parse_address(text).listen
    except ValueError as error:
        raise Unusable(f"--metrics: {error}") from error


async def _serve_until_stopped(config: RunnerConfig, reporter: StatusReporter) -> None:
    stop = asyncio.Event()
    reporting: list[asyncio.Task[None]] = []
    task = asyncio.current_task()
    assert task is not None
    signals = itertools.count(1)

    def on_stop() -> None:
        if next(signals) > 1:
            task.cancel()
        stop.set()
        reporter.report_stopping()

    def on_ready(runner: BatchRunner) -> None:
        page = f", its metrics http://{config.metrics}/metrics" if config.metrics else ""
        click.echo(f"batch runner {config.region}/{config.router} is ready{page}")
        reporter.report_ready()
        reporting.append(asyncio.create_task(reporter.keep_reporting(runner.status)))

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_stop)
    reloads.ignore("a batch runner reads mesh.toml at its start only; restart it")
    try:
        await run(config, stop, on_ready)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        await end_all(reporting)
