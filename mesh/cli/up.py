"""`mesh up`: every region on this machine, until Ctrl-C."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.console import Console

from agents.config import (
    BATCH_MAX_MOST,
    ENGINE_KEY,
    LOAD_S_MAX,
    EngineKeyInvalid,
    checked_engine_url,
    checked_metrics_url,
    checked_models,
    engine_key,
)
from agents.sim.profiles import PROFILES
from infra.bus import BUS_CA
from infra.nats.bundle import PasswordsUnreadable
from infra.nats.server import ServerUnusable
from infra.process import raise_limit
from infra.topology import TopologyError
from mesh.cli.choices import (
    ROUTING_OPTIONS,
    bus_servers_option,
    config_option,
    log_level_option,
    workers_option,
)
from mesh.cli.modelled import with_options
from mesh.cli.unusable import Unusable
from mesh.demo.options import REPLICAS_HERE_MAX, DemoOptions, GivenEngine, GivenEngineKind
from mesh.demo.session import PortsUnusable, run
from mesh.demo.state_directory import DEFAULT_STATE, StateInUse
from mesh.supervisor.supervisor import ProgramFailed

ENGINE_FORM = "REGION=URL[,METRICS_URL][,batch-max=N][,load-s=S][,model=NAME]…"
METRICS, BATCH_MAX, LOAD_S, MODEL = "metrics", "batch-max", "load-s", "model"
ENGINE_PARTS = (METRICS, BATCH_MAX, LOAD_S, MODEL)


def given_engine(text: str) -> GivenEngine:
    """Read one `--engine`. Raises BadParameter that says what to write."""
    region, _, rest = text.partition("=")
    url, *more = rest.split(",")
    parts: dict[str, list[str]] = {name: [] for name in ENGINE_PARTS}
    for number, item in enumerate(more):
        name, equals, value = item.partition("=")
        if equals and name in ENGINE_PARTS:
            parts[name].append(value)
        elif number == 0 and (not equals or "://" in name):
            parts[METRICS].append(item)
        else:
            raise click.BadParameter(f"{text!r}: {item!r} is not one of {', '.join(ENGINE_PARTS)}")
    if any(len(parts[name]) > 1 for name in (METRICS, BATCH_MAX, LOAD_S)):
        once = f"{METRICS}, {BATCH_MAX} and {LOAD_S}"
        raise click.BadParameter(f"{text!r}: {once} may be given once each")
    for given in (url, *parts[METRICS]):
        if not given:
            raise click.BadParameter(f"{text!r}: write {ENGINE_FORM}")
        if "://" not in given:
            raise click.BadParameter(f"{text!r}: http:// is missing before {given}")
    try:
        return GivenEngine(
            region,
            url=checked_engine_url(url),
            metrics_url=next(map(checked_metrics_url, parts[METRICS]), None),
            batch_max=_whole(BATCH_MAX, parts, BATCH_MAX_MOST, "number"),
            models=checked_models(parts[MODEL]),
            load_s=_whole(LOAD_S, parts, int(LOAD_S_MAX), "number of seconds"),
        )
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}") from error


def _whole(name: str, parts: Mapping[str, Sequence[str]], most: int, what: str) -> int | None:
    for text in parts[name]:
        plain = text.isascii() and text.isdigit() and len(text) <= len(str(most))
        if not plain or not 1 <= int(text) <= most:
            raise ValueError(f"{name} must be a {what} from 1 to {most}")
        return int(text)
    return None


def _given_engines(
    ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> tuple[GivenEngine, ...]:
    return tuple(map(given_engine, values))


# Variables of rendered files of credentials, which a shell may have of another mesh. A process has
# its own as a file, and would heed these before it.
OWN_SECRETS = (
    *("NATS_URL", "NATS_USER", "NATS_PASSWORD", BUS_CA, "MESH_REGION", "MESH_PREFIX_KEY"),
    *("MESH_BATCH_CREDENTIALS", "MESH_ENGINE_KEY_FILE"),
)


@click.command()
@config_option("The mesh.toml to run; without it us, eu and ap on 127.0.0.1:8101 to 8103.")
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
    callback=_given_engines,
    multiple=True,
    metavar=ENGINE_FORM,
    help="A running server, to be the engine of one replica; repeat it for more. With any given, "
    "none is simulated: a region without one has a router and no replica. Give batch-max for vLLM, "
    "which doesn't publish its --max-num-seqs, model for a server that can't list its models, and "
    "load-s for one that loads them when they are asked for, in more than 300 s.",
)
@click.option(
    "--engine-key-file",
    envvar="MESH_ENGINE_KEY_FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the API key of the given engines; or set MESH_ENGINE_KEY.",
)
@click.option(
    "--engine-kind",
    type=click.Choice([kind.value for kind in GivenEngineKind]),
    show_default="what each shows at the start; vllm where it does not answer yet",
    help="The kind of the given engines, for their metrics; openai has none.",
)
@bus_servers_option(
    "nats-servers of every region, instead of those in the configuration; 3 are a cluster."
)
@click.option(
    "--tls",
    is_flag=True,
    help="Encrypt everything: routers serve https, and the bus has TLS, with certificates of an "
    "authority that is made for it.",
)
@workers_option("Processes of every router, instead of those in the configuration.")
@with_options(ROUTING_OPTIONS)
@log_level_option("What routers write to their logs; INFO has every placement.")
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write endpoints, credentials and process ids here (JSON) once every region is ready.",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_STATE,
    help="Where configuration, secrets and logs are kept; one mesh at a time.",
)
def command(
    config: Path,
    replicas: int | None,
    time_scale: float | None,
    profile: str | None,
    engines: tuple[GivenEngine, ...],
    engine_key_file: Path | None,
    engine_kind: str | None,
    **others: Any,
) -> None:
    """Run every region on this machine, until Ctrl-C.

    Each region gets a nats-server, a router with an OpenAI endpoint, and replicas with simulated
    engines; the links between regions have the round trips that the configuration says.
    """
    simulated = {"--replicas": replicas, "--profile": profile, "--time-scale": time_scale}
    unused = [option for option, value in simulated.items() if value is not None]
    if engines and unused:
        message = f"note: simulated engines only, without effect here: {', '.join(unused)}"
        click.echo(message, err=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = DemoOptions(
        config=config.absolute(),
        replicas=replicas,
        time_scale=1.0 if time_scale is None else time_scale,
        profile=profile,
        engines=_with_key(engines, engine_key_file),
        engine_kind=None if engine_kind is None else GivenEngineKind(engine_kind),
        **others,
    )
    for name in OWN_SECRETS:
        os.environ.pop(name, None)
    raise_limit()  # also that of all that it starts
    try:
        uvloop.run(run(options, Console()))
    except (TopologyError, ServerUnusable, PasswordsUnreadable, StateInUse, PortsUnusable) as error:
        raise Unusable(str(error)) from error
    except ProgramFailed as error:
        raise click.ClickException(f"{error}, so nothing runs; its log is above") from error


def _with_key(engines: tuple[GivenEngine, ...], file: Path | None) -> tuple[GivenEngine, ...]:
    """The engines with the API key of all, if one is given.

    It leaves the environment, which every process of the mesh inherits: only agents get it.
    """
    try:
        key = engine_key(file, os.environ)
    except EngineKeyInvalid as error:
        raise click.UsageError(str(error)) from error
    os.environ.pop(ENGINE_KEY, None)
    return tuple(replace(engine, key=key) for engine in engines)
