"""sglang-router, vllm-router and smg: one lineage, with nearly one command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.programs.bench.installs import installed, version_of
from tests.programs.bench.processes import Processes
from tests.programs.bench.systems.system import Place, System, until_it_answers
from tests.support.ports import free_ports

# A log line for every request would be measured with the routing.
OPTIONS = ("--policy", "cache_aware", "--log-level", "error")


async def sglang_router(place: Place, environments: Path) -> System:
    """SGLang's router. Raises Absent.

    It sets no TCP_NODELAY on the sockets that it accepts and has no option for it: on a kept
    connection a stream's first event waits for the client's delayed acknowledgement, up to 40 ms.
    """
    return await _start(place, environments, "sglang-router", "launch")


async def vllm_router(place: Place, environments: Path) -> System:
    """vLLM's router. Raises Absent.

    For this policy it asks the engine to render and to tokenize every prompt before it sends it;
    the scripted engine has neither page, so it answers 404 twice and adds nothing of its own.
    """
    return await _start(place, environments, "vllm-router")


async def smg(place: Place, environments: Path) -> System:
    """Shepherd Model Gateway. Raises Absent."""
    return await _start(place, environments, "smg", "launch")


@dataclass(frozen=True, slots=True)
class StartedRouter:
    """Its process, which listens at `url`; engines may still be unknown to it."""

    pid: int
    url: str
    settings: str


async def start_router(
    processes: Processes,
    environments: Path,
    name: str,
    verb: Sequence[str],
    engines: Sequence[str],
    port: int,
    *,
    scheme: str = "http",
) -> StartedRouter:
    """Install it if need be, and start it before these engines. Raises Absent."""
    programs = await installed(name, environments)
    url = f"{scheme}://127.0.0.1:{port}"
    where = ("--host", "127.0.0.1", "--port", str(port))
    metrics = ("--prometheus-port", str(free_ports(1)[0]))
    pid = await processes.start(
        name,
        (str(programs / name), *verb, "--worker-urls", *engines, *OPTIONS, *where, *metrics),
        ready=processes.answers(f"{url}/health"),
    )
    version = await version_of(name, programs)
    return StartedRouter(pid, url, f"{version}, {' '.join(OPTIONS)}")


async def _start(place: Place, environments: Path, name: str, *verb: str) -> System:
    [port] = free_ports(1)
    started = await start_router(place.processes, environments, name, verb, place.engines, port)
    router = (started.pid,)
    system = System(name, (started.url,), started.settings, router=router, path={"router": router})
    return await until_it_answers(place, system)
