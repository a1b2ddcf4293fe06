"""`mesh-agent run`: parse, check, wire, and serve until a signal to stop."""

import asyncio
import logging
import signal
import time
from pathlib import Path
from typing import Any

import click
import nats.errors
import uvloop

from agents.adapters.name_guard import ReplicaNameTaken
from agents.config import BOTH, ENGINE_KEY, AgentConfig, offline_profile
from agents.core.offline_profile import OfflineProfile, ProfileInvalid
from agents.engine_options import checked, engine_options, read_engine_key
from agents.runtime.process import Stop, run
from infra import reloads, tracing
from infra.bus import BUS_CA, BusUnreachable
from infra.credentials_file import credentials_option, environment
from infra.process import collect_seldom, raise_limit
from infra.service_manager import ServiceManager
from schemas.kv_transfer import KvRole, TransferKind

log = logging.getLogger(__name__)

NAMES_CAUSE = (BusUnreachable, ReplicaNameTaken)
EXPECTED = (*NAMES_CAUSE, OSError, nats.errors.Error)


@click.command("run")
@credentials_option(also=("NATS_PASSWORD", ENGINE_KEY))
@click.option(
    "--region", envvar="MESH_REGION", required=True, help="Region of this replica. [MESH_REGION]"
)
@click.option("--replica", required=True, help="Name of this replica, unique in its region.")
@engine_options
@click.option("--nats-url", envvar="NATS_URL", required=True, help="The region's bus. [NATS_URL]")
@click.option("--nats-user", envvar="NATS_USER", help="User on the bus. [NATS_USER]")
@click.option(
    "--nats-password-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the password; or set NATS_PASSWORD. Never on the command line.",
)
@click.option(
    "--bus-ca",
    envvar=BUS_CA,
    metavar="BASE64",
    help="Who may vouch for the nats-server, as rendered with --tls: with it the connection is "
    f"encrypted. [{BUS_CA}]",
)
@click.option(
    "--max-outstanding",
    "outstanding_max",
    type=int,
    help="Most requests to hold at once.",
    show_default="256, or --batch-max if that is more; openai: --batch-max, or 8",
)
@click.option(
    "--residency",
    envvar="MESH_RESIDENCY",
    metavar="LABEL,…",
    help="Of its region's residency labels, those that hold here, or none. [MESH_RESIDENCY]",
    show_default="all of them",
)
@click.option(
    "--profile",
    "profile_file",
    envvar="MESH_AGENT_PROFILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What mesh-agent profile wrote: take offline work, within its budget. "
    "[MESH_AGENT_PROFILE]",
    show_default="no offline work",
)
@click.option(
    "--state-dir",
    envvar="STATE_DIRECTORY",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the speed of its engine is kept for its next start. [STATE_DIRECTORY]",
    show_default="it is not kept",
)
@click.option(
    "--speed-probe/--no-speed-probe",
    default=True,
    envvar="MESH_SPEED_PROBE",
    help="Measure the engine's prefill speed by a few prompts of at most 2,048 tokens while it is "
    "idle, where neither --state-dir nor --profile tells it. [MESH_SPEED_PROBE]",
)
@click.option(
    "--offline-priority",
    type=int,
    metavar="N",
    help="Sent to vLLM or SGLang as the priority of offline requests.",
    show_default="none is sent",
)
@click.option(
    "--ask-usage/--no-ask-usage",
    default=None,
    envvar="MESH_ASK_USAGE",
    help="Ask the engine for the token counts of streams whose clients did not; they don't see "
    "it. [MESH_ASK_USAGE]",
    show_default="asked of vLLM and SGLang; llama.cpp sends them anyway",
)
@click.option(
    "--route",
    "routes",
    multiple=True,
    envvar="MESH_ENGINE_ROUTES",
    metavar="PATH",
    help="Another route that clients may call at the engine, like /v1/foo, where its region's "
    "routes list it too; repeat it, or separate by spaces in the environment. "
    "[MESH_ENGINE_ROUTES]",
)
@click.option(
    "--role",
    type=click.Choice([BOTH, *(role.value for role in KvRole)]),
    default=BOTH,
    envvar="MESH_AGENT_ROLE",
    help="prefill or decode: its engine computes one stage of requests, another engine the other. "
    "[MESH_AGENT_ROLE]",
)
@click.option(
    "--kv-transfer",
    type=click.Choice([kind.value for kind in TransferKind]),
    envvar="MESH_KV_TRANSFER",
    help="How KV caches get from a prefill to a decode engine: vLLM's NixlConnector, its "
    "P2pNcclConnector, or SGLang's bootstrap server. [MESH_KV_TRANSFER]",
)
@click.option(
    "--kv-address",
    envvar="MESH_KV_ADDRESS",
    metavar="HOST:PORT",
    help="Where the other engine finds this one's: of p2p its KV connector, of an sglang prefill "
    "engine its bootstrap server. [MESH_KV_ADDRESS]",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    envvar="MESH_ADAPTERS",
    metavar="NAME=PATH[,base=MODEL]",
    help="A LoRA adapter that vLLM or SGLang is made to load when a request asks for it, and where "
    "the engine finds it; repeat it, or separate by spaces in the environment. [MESH_ADAPTERS]",
)
@click.option(
    "--load-adapters",
    type=int,
    envvar="MESH_LOAD_ADAPTERS",
    metavar="N",
    help="Load them, and let the engine have so many at once. [MESH_LOAD_ADAPTERS]",
    show_default="none is loaded",
)
@click.option(
    "--data-parallel-rank",
    type=int,
    envvar="MESH_DATA_PARALLEL_RANK",
    metavar="R",
    help="Serve this data-parallel rank of vLLM or SGLang alone: one agent for each. "
    "[MESH_DATA_PARALLEL_RANK]",
    show_default="the engine chooses",
)
@click.option(
    "--kv-events",
    envvar="MESH_KV_EVENTS",
    metavar="ADDRESS",
    help="Where vLLM or SGLang publishes its KV events, tcp://host:port: routers then know what it "
    "has cached. [MESH_KV_EVENTS]",
    show_default="routers estimate it",
)
@click.option(
    "--kv-events-replay",
    envvar="MESH_KV_EVENTS_REPLAY",
    metavar="ADDRESS",
    help="Where it repeats them after a gap. [MESH_KV_EVENTS_REPLAY]",
    show_default="a gap makes what is cached an estimate",
)
@click.option(
    "--kv-events-topic", default="", help="The topic that it publishes them on; all by default."
)
@click.option(
    "--load-s",
    type=float,
    envvar="MESH_LOAD_S",
    metavar="SECONDS",
    help="Patience before the engine's first answer, for it may have to load its model; of kind "
    "openai also before that of a model that has not answered for a minute. [MESH_LOAD_S]",
    show_default="300 where the engine has no metrics, or says that it loads; else 10",
)
@click.option("--read-interval-ms", type=int, default=50, help="Between scrapes of a busy engine.")
@click.option("--heartbeat-ms", type=int, default=100, help="Between heartbeats.")
@click.option(
    "--drain-timeout", "drain_timeout_s", type=float, default=30.0, help="Seconds to finish in."
)
@click.option(
    "--metrics-host",
    envvar="MESH_AGENT_METRICS_HOST",
    default="127.0.0.1",
    help="Where the own Prometheus page listens. [MESH_AGENT_METRICS_HOST]",
)
@click.option(
    "--metrics-port",
    envvar="MESH_AGENT_METRICS_PORT",
    type=int,
    help="Its port; 0 for no page. [MESH_AGENT_METRICS_PORT]",
    show_default="the first free one from 9700 to 9763",
)
@click.option("--ready-file", help="Written when the replica first takes work.")
def command(
    nats_password_file: Path | None,
    engine_key_file: Path | None,
    profile_file: Path | None,
    **options: Any,
) -> None:
    """Serve the work of one engine from the bus.

    SIGTERM drains: nothing new is taken, what runs is finished. A second one stops at once.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    secrets = {
        "nats_password": _password(nats_password_file),
        "engine_key": read_engine_key(engine_key_file),
    }
    options["profile"] = _profile(profile_file)
    config = checked(AgentConfig, options | secrets, command.params)
    tracing.set_up(
        "mesh-agent",
        f"{config.region}/{config.replica}",
        **{"mesh.region": config.region, "mesh.replica": config.replica},
    )
    collect_seldom()
    raise_limit()
    try:
        uvloop.run(_main(config))
    except Exception as problem:
        if (cause := expected_cause(problem)) is None:
            raise
        log.debug("the agent ended", exc_info=problem)
        if isinstance(cause, ReplicaNameTaken):  # status 2: its unit does not start it again
            raise click.UsageError(str(cause)) from problem
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
    reloads.ignore("an agent reads its options and credentials at its start only")
    await run(config, time.monotonic, time.time_ns() // 1_000_000, stop, ServiceManager())


def _password(file: Path | None) -> str | None:
    if file is not None:
        return file.read_text().strip()
    return environment().get("NATS_PASSWORD")


def _profile(file: Path | None) -> OfflineProfile | None:
    try:
        return offline_profile(file)
    except ProfileInvalid as error:
        raise click.UsageError(f"--profile: {error}") from error
