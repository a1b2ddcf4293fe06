"""`mesh router`: one region's router, from mesh.toml and the environment."""

import asyncio
import itertools
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click
import uvloop

from infra import reloads, tracing
from infra.address import Address
from infra.bus import BusUnreachable
from infra.credentials_file import credentials_option
from infra.process import collect_seldom, end_all, raise_limit
from infra.service_manager import ServiceManager, StatusReporter
from infra.topology import DEFAULT_FILE
from infra.workers import worker_names, worker_page
from mesh.adapters.access_log import AccessLogFormat
from mesh.adapters.ended_requests import KEPT, KEPT_MAX
from mesh.adapters.recorder import BYTES_MAX, RecordingRefused, RecordTo
from mesh.adapters.tail_rule import SlowLimits
from mesh.cli.choices import (
    NATS_OPTIONS,
    ROUTING_OPTIONS,
    bus_servers_option,
    log_level_option,
    workers_option,
)
from mesh.cli.console import CONSOLE_OPTIONS, console_config, serving
from mesh.cli.console import NAMES as CONSOLE_NAMES
from mesh.cli.modelled import checked_option, with_options
from mesh.cli.router_config import RouterOptions, read_config
from mesh.console.config import ConsoleConfig
from mesh.core.model.settings import RouterSettings
from mesh.http.server import connections_max
from mesh.runtime.config import RouterConfig
from mesh.runtime.mesh_file import load_mesh
from mesh.runtime.name_claim import NameTaken
from mesh.runtime.reload import ConfigRefused, LiveConfig
from mesh.runtime.router import PortTaken, Router, run
from mesh.supervisor.forked_workers import STOP_SIGNALS, WorkerControl, reserve_port, run_workers
from schemas.ids import RouterId
from schemas.settings import RoutingTable

log = logging.getLogger(__name__)

EXIT_FAILED, EXIT_BAD_USE = 1, 2  # its unit starts it again after the first alone
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


@click.command()
@credentials_option()
@click.option(
    "--region",
    envvar="MESH_REGION",
    required=True,
    help="The region to serve, as named in mesh.toml.  [env MESH_REGION]",
)
@click.option("--router", default="r1", help="This router's name in the region.")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    default=DEFAULT_FILE,
    show_default=False,
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
@with_options(CONSOLE_OPTIONS)
@with_options(NATS_OPTIONS)
@bus_servers_option(
    "nats-servers that the region has, each with a copy of its streams.",
    show_default="as mesh.toml says",
)
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
    "--sse-keep-alive-s",
    type=click.FloatRange(0, 300),
    default=10.0,
    help="After so many seconds without a byte, a client that waits for a stream is sent what "
    "readers pass over: a comment, or a ping of /v1/messages. The status line leaves with the "
    "first one. 0: never.",
)
@click.option(
    "--drain-s",
    type=click.FloatRange(0),
    default=30.0,
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
    help="The recording ends at this size; the router continues.",
)
@click.option(
    "--access-log",
    type=click.Choice([style.value for style in AccessLogFormat]),
    default=AccessLogFormat.LOGFMT.value,
    help="How to write one line on standard output for each request that has ended.",
)
@click.option(
    "--requests-kept",
    type=click.IntRange(1, KEPT_MAX),
    default=KEPT,
    help="Requests that have ended and that `mesh explain` finds.",
)
@click.option(
    "--trace-slow-ttft-s",
    envvar="MESH_TRACE_SLOW_TTFT_S",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    help="With tracing on, a stream whose first byte took longer is traced though it is not "
    "sampled, in seconds. So is a request that failed.  [env MESH_TRACE_SLOW_TTFT_S]",
)
@click.option(
    "--trace-slow-s",
    envvar="MESH_TRACE_SLOW_S",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    help="The same for a whole request, in seconds.  [env MESH_TRACE_SLOW_S]",
)
@log_level_option("DEBUG logs every placement.")
def command(**given: Any) -> None:
    """Run one region's router.

    After SIGTERM or Ctrl-C it accepts no request, finishes the open ones and ends; after a second
    one it ends at once. Traces go to OTEL_EXPORTER_OTLP_ENDPOINT if that is set.
    """
    logging.basicConfig(level=given.pop("log_level"), format=LOG_FORMAT)
    consoles = {name: given.pop(name) for name in CONSOLE_NAMES}
    routing = {name: given.pop(name) for name in ("policy", "pushing")}
    limits = {name: given.pop(name) for name in ("hold_max", "hold_s_max", "request_s_max")}
    record, record_bytes_max = given.pop("record"), given.pop("record_bytes_max")
    others = {
        "sse_keep_alive_s": given.pop("sse_keep_alive_s"),
        "drain_s": given.pop("drain_s"),
        "record": RecordTo(path=record, bytes_max=record_bytes_max) if record else None,
        "access_log": AccessLogFormat(given.pop("access_log")),
        "requests_kept": given.pop("requests_kept"),
        "slow": SlowLimits(given.pop("trace_slow_ttft_s"), given.pop("trace_slow_s")),
        "connections_max": connections_max(raise_limit()),
    }
    options = RouterOptions(
        console=consoles["console"],
        routing=RoutingTable(**routing),
        limits={name: limit for name, limit in limits.items() if limit is not None},
        others=others,
        **given,
    )
    config = _first_read(options)
    console = console_config(config, load_mesh(options.file), consoles)
    sys.exit(_run(config, lambda: read_config(options), console))


def _first_read(options: RouterOptions) -> RouterConfig:
    try:
        config = read_config(options)
    except ConfigRefused as error:
        _refuse(str(error))
    for warning in options.warnings(config):
        log.warning(warning)
    return config


def _run(
    config: RouterConfig, read: Callable[[], RouterConfig], console: ConsoleConfig | None
) -> int:
    """Serve in this process or in several; the status to exit with."""
    reloads.block()
    manager, live = ServiceManager(), LiveConfig(config, read)
    if config.workers == 1:
        return _serve(live, console, manager)
    names = worker_names(config.router, config.workers)
    endpoint = Address(config.http_host, config.http_port)
    try:
        reserved = reserve_port(endpoint)
    except OSError as error:
        _refuse(str(PortTaken.at(endpoint, "http", config, error)), EXIT_FAILED)
    with reserved:
        return run_workers(
            names,
            lambda number, parent: _serve(
                _of_worker(live.config, read, names, number), None if number else console, parent
            ),
            manager,
            lambda: live.read_again(in_thread=False),
        )


def _of_worker(
    config: RouterConfig, read: Callable[[], RouterConfig], names: Sequence[RouterId], number: int
) -> LiveConfig:
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
    page = worker_page(config.metrics, number)
    own = replace(config, router=name, shares_port=True, metrics=page, record=record)
    return LiveConfig(own, read)


def _started_now(config: RouterConfig) -> RouterConfig:
    """The configuration with the number and the random seed of this start."""
    epoch = time.time_ns() // 1_000_000
    return replace(config, epoch=epoch, seed=random.SystemRandom().getrandbits(64))


def _serve(live: LiveConfig, console: ConsoleConfig | None, reporter: StatusReporter) -> int:
    """Be one router until a request to stop. `reporter`: systemd, or the parent of a worker."""
    live.config = config = _started_now(live.config)
    tracing.set_up(
        "mesh-router",
        f"{config.region}/{config.router}",
        **{"mesh.region": config.region, "mesh.router": config.router},
    )
    collect_seldom()
    try:
        uvloop.run(_serve_until_stopped(live, console, reporter))
    except (NameTaken, RecordingRefused) as error:
        _refuse(str(error))
    except (BusUnreachable, PortTaken) as error:  # it may pass by itself
        _refuse(str(error), EXIT_FAILED)
    finally:
        tracing.shut_down()
    return 0


async def _serve_until_stopped(
    live: LiveConfig, console: ConsoleConfig | None, reporter: StatusReporter
) -> None:
    config, stop = live.config, asyncio.Event()
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
        page = f", its metrics http://{config.metrics}/metrics" if config.metrics else ""
        click.echo(f"router {config.region}/{config.router} serves {config.url}/v1{page}")
        reporter.report_ready()
        reporting.append(asyncio.create_task(reporter.keep_reporting(router.status)))
        again = reloads.Reloads(lambda: _reload(live, router), reporter)
        reporting.append(asyncio.create_task(again.run()))

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, lambda: on_stop(next(signals)))
    if isinstance(reporter, WorkerControl):
        reporter.on_stop(on_stop)
    try:
        async with serving(live, console):
            await run(config, stop, on_ready)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        await end_all(reporting)


async def _reload(live: LiveConfig, router: Router) -> None:
    if await live.read_again(names_waiting=not live.config.shares_port):
        router.reconfigure(live.config)


def _refuse(message: str, status: int = EXIT_BAD_USE) -> NoReturn:
    click.echo(f"mesh router: {message}", err=True)
    sys.exit(status)
