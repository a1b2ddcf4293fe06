"""`mesh-agent run`: parse, check, wire, and serve until a signal to stop."""

import asyncio
import logging
import signal
import time
from pathlib import Path
from typing import Any, get_args

import click
import nats.errors
import uvloop
from pydantic import SecretStr, ValidationError

from agents.adapters.bus import ReplicaNameTaken
from agents.config import ENGINE_KEY, AgentConfig, EngineKeyInvalid, EngineKindName, engine_key
from agents.runtime.process import Stop, run
from infra import tracing
from infra.bus import BusUnreachable
from infra.credentials_file import credentials_option, environment
from infra.process import collect_seldom, raise_limit
from infra.service_manager import ServiceManager
from schemas.problems import what_it_must_be_instead

log = logging.getLogger(__name__)

NAMES_CAUSE = (BusUnreachable, ReplicaNameTaken)
EXPECTED = (*NAMES_CAUSE, OSError, nats.errors.Error)


@click.command("run", context_settings={"show_default": True})
@credentials_option(also=("NATS_PASSWORD", ENGINE_KEY))
@click.option(
    "--region", envvar="MESH_REGION", required=True, help="Region of this replica. [MESH_REGION]"
)
@click.option("--replica", required=True, help="Name of this replica, unique in its region.")
@click.option(
    "--engine-url",
    envvar="ENGINE_URL",
    required=True,
    help="The engine's API, http://host:port. [ENGINE_URL]",
)
@click.option(
    "--metrics-url",
    envvar="METRICS_URL",
    default="",
    help="Its metrics page. [METRICS_URL]",
    show_default="engine-url + /metrics",
)
@click.option(
    "--engine-kind",
    envvar="ENGINE_KIND",
    type=click.Choice(get_args(EngineKindName)),
    default="vllm",
    help="[ENGINE_KIND]",
)
@click.option("--nats-url", envvar="NATS_URL", required=True, help="The region's bus. [NATS_URL]")
@click.option("--nats-user", envvar="NATS_USER", help="User on the bus. [NATS_USER]")
@click.option(
    "--nats-password-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the password; or set NATS_PASSWORD. Never on the command line.",
)
@click.option(
    "--max-outstanding",
    "outstanding_max",
    type=int,
    help="Most requests to hold at once.",
    show_default="256, or --batch-max if that is more; openai: --batch-max, or 8",
)
@click.option(
    "--batch-max",
    type=int,
    envvar="MESH_BATCH_MAX",
    help="Most requests the engine runs at once (vLLM: --max-num-seqs). [MESH_BATCH_MAX]",
    show_default="what llama.cpp and SGLang show; unknown for others",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    envvar="MESH_ENGINE_MODELS",
    metavar="NAME",
    help="What the engine serves, for one that can't list it; repeat it for more, or separate them "
    "by spaces in the environment. [MESH_ENGINE_MODELS]",
    show_default="what its /v1/models lists",
)
@click.option(
    "--engine-key-file",
    envvar="MESH_ENGINE_KEY_FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the engine's API key; or set MESH_ENGINE_KEY. [MESH_ENGINE_KEY_FILE]",
)
@click.option(
    "--residency",
    envvar="MESH_RESIDENCY",
    metavar="LABEL,…",
    help="Of its region's residency labels, those that hold here, or none. [MESH_RESIDENCY]",
    show_default="all of them",
)
@click.option("--read-interval-ms", type=int, default=50, help="Between scrapes of a busy engine.")
@click.option("--heartbeat-ms", type=int, default=100, help="Between heartbeats.")
@click.option(
    "--drain-timeout", "drain_timeout_s", type=float, default=30.0, help="Seconds to finish in."
)
@click.option("--metrics-host", default="127.0.0.1", help="Where the own metrics page listens.")
@click.option("--metrics-port", type=int, default=0, help="Own Prometheus page; 0 for none.")
@click.option("--ready-file", help="Written when the replica first takes work.")
def command(nats_password_file: Path | None, engine_key_file: Path | None, **options: Any) -> None:
    """Serve the work of one engine from the bus.

    SIGTERM drains: nothing new is taken, what runs is finished. A second one stops at once.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    secrets = {
        "nats_password": _password(nats_password_file),
        "engine_key": _engine_key(engine_key_file),
    }
    config = _checked(options | secrets)
    tracing.set_up("mesh-agent", **{"mesh.region": config.region, "mesh.replica": config.replica})
    collect_seldom()
    raise_limit()
    try:
        uvloop.run(_main(config))
    except Exception as problem:
        if (cause := expected_cause(problem)) is None:
            raise
        log.debug("the agent ended", exc_info=problem)
        raise click.ClickException(str(cause)) from problem
    finally:
        tracing.shut_down()


def expected_cause(problem: Exception) -> Exception | None:
    """The error to show to the operator: of the bus, the name or the system. None for a fault of
    ours. Errors beside it in a group are its consequences."""
    if not isinstance(problem, ExceptionGroup):
        return problem if isinstance(problem, EXPECTED) else None
    for kinds in (NAMES_CAUSE, EXPECTED):
        found: BaseException | None = problem.subgroup(kinds)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if isinstance(found, Exception):
            return found
    return None


async def _main(config: AgentConfig) -> None:
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.request)
    await run(config, time.monotonic, time.time_ns() // 1_000_000, stop, ServiceManager())


def _password(file: Path | None) -> str | None:
    if file is not None:
        return file.read_text().strip()
    return environment().get("NATS_PASSWORD")


def _engine_key(file: Path | None) -> SecretStr | None:
    try:
        return engine_key(file, environment())
    except EngineKeyInvalid as error:
        raise click.UsageError(str(error)) from error


def _checked(options: dict[str, Any]) -> AgentConfig:
    try:
        return AgentConfig(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        flags = {str(parameter.name): parameter.opts[0] for parameter in command.params}
        field = str(first["loc"][0]) if first["loc"] else ""
        message = what_it_must_be_instead(first)
        raise click.UsageError(f"{flags.get(field, field)}: {message}".lstrip(": ")) from error
