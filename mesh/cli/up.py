"""`mesh up`: every region on this machine, until Ctrl-C."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import click
import uvloop
from rich.console import Console

from agents.engine_key import ENGINE_KEY, EngineKeyInvalid, engine_key
from agents.sim.profiles import PROFILES
from infra.descriptors import raise_limit
from infra.nats.passwords import PasswordsUnreadable
from infra.nats.server import ServerUnusable
from infra.topology import DEFAULT_FILE, TopologyError
from infra.workers import WORKERS_MAX
from mesh.cli.choices import (
    HOLD_ORDER_HELP,
    HOLD_ORDERS,
    POLICIES_HELP,
    PUSHING_HELP,
    known_policy,
    known_pushing,
)
from mesh.cli.given_engine import FORM, given_engines
from mesh.cli.unusable import Unusable
from mesh.core.region.pushing import Pushing
from mesh.demo.child import GaveUp
from mesh.demo.options import REPLICAS_HERE_MAX, EngineKind, GivenEngine, Options
from mesh.demo.session import PortsUnusable, run
from mesh.demo.state_directory import DEFAULT_STATE, StateInUse

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@click.command()
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    default=DEFAULT_FILE,
    help="The mesh.toml to run; without it us, eu and ap on 127.0.0.1:8101 to 8103.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, REPLICAS_HERE_MAX),
    help="Simulated replicas per region, instead of those in the configuration.",
)
@click.option(
    "--time-scale",
    type=click.FloatRange(0, 1000, min_open=True),
    show_default="1",
    help="How many times faster than their hardware the simulated engines run.",
)
@click.option(
    "--profile",
    type=click.Choice(list(PROFILES)),
    help="Which hardware and model the simulated engines imitate; an A100 if not given.",
)
@click.option(
    "--engine",
    "engines",
    callback=given_engines,
    multiple=True,
    metavar=FORM,
    help="A server that runs already, as the engine of one replica; repeat it for more. With "
    "any given, none is simulated: a region without one has a router and no replica. Give "
    "batch-max for vLLM, which doesn't show its --max-num-seqs, and model for a server that can't "
    "list its models.",
)
@click.option(
    "--engine-key-file",
    envvar="MESH_ENGINE_KEY_FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the API key of the given engines; or set MESH_ENGINE_KEY.",
)
@click.option(
    "--engine-kind",
    type=click.Choice([kind.value for kind in EngineKind]),
    default=EngineKind.VLLM.value,
    show_default=True,
    help="Whose metrics the given engines have; openai: none.",
)
@click.option(
    "--policy",
    callback=known_policy,
    metavar="NAME[:OPTIONS]",
    help=f"How every router places requests, whatever the configuration says. {POLICIES_HELP}",
)
@click.option(
    "--workers",
    type=click.IntRange(1, WORKERS_MAX),
    help="Processes of every router, instead of those in the configuration.",
)
@click.option("--pushing", callback=known_pushing, metavar="RULE", help=PUSHING_HELP)
@click.option("--hold-order", type=click.Choice(HOLD_ORDERS), help=HOLD_ORDER_HELP)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="WARNING",
    show_default=True,
    help="What routers write to their logs; INFO has every placement.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write endpoints, credentials and process ids here (JSON) once every region is ready.",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_STATE,
    show_default=True,
    help="Where configuration, secrets and logs are kept; one mesh at a time.",
)
def command(
    config: Path,
    replicas: int | None,
    time_scale: float | None,
    profile: str | None,
    engines: tuple[GivenEngine, ...],
    engine_key_file: Path | None,
    engine_kind: str,
    policy: str | None,
    workers: int | None,
    pushing: Pushing | None,
    hold_order: str | None,
    log_level: str,
    ready_file: Path | None,
    state: Path,
) -> None:
    """Run every region on this machine, until Ctrl-C.

    Each region gets a nats-server, a router with an OpenAI endpoint, and replicas with simulated
    engines; the links between regions have the round trips that the configuration says.
    """
    simulated = {"--replicas": replicas, "--profile": profile, "--time-scale": time_scale}
    idle = [option for option, value in simulated.items() if value is not None]
    if engines and idle:
        speak = "speaks" if len(idle) == 1 else "speak"
        said = f"note: {', '.join(idle)} {speak} of simulated engines; there are none"
        click.echo(said, err=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = Options(
        config=config.absolute(),
        state=state,
        replicas=replicas,
        time_scale=1.0 if time_scale is None else time_scale,
        profile=profile,
        engines=_with_key(engines, engine_key_file),
        engine_kind=EngineKind(engine_kind),
        policy=policy,
        pushing=None if pushing is None else str(pushing),
        hold_order=hold_order,
        log_level=log_level,
        workers=workers,
        ready_file=ready_file,
    )
    raise_limit()  # also that of all that it starts
    try:
        uvloop.run(run(options, Console()))
    except (TopologyError, ServerUnusable, PasswordsUnreadable, StateInUse, PortsUnusable) as error:
        raise Unusable(str(error)) from error
    except GaveUp as error:
        raise click.ClickException(f"{error}, so nothing runs; its log is above") from error


def _with_key(engines: tuple[GivenEngine, ...], file: Path | None) -> tuple[GivenEngine, ...]:
    """The engines with the key that all of them want, if one is given.

    It leaves the environment, which every process of the mesh inherits: agents alone get it.
    """
    try:
        key = engine_key(file, os.environ)
    except EngineKeyInvalid as error:
        raise click.UsageError(str(error)) from error
    os.environ.pop(ENGINE_KEY, None)
    return tuple(replace(engine, key=key) for engine in engines)
