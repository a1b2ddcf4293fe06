"""sglang-router and vllm-router: one lineage, with nearly one command line."""

from pathlib import Path

from tests.programs.bench.installs import installed, version_of
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


async def _start(place: Place, environments: Path, name: str, *verb: str) -> System:
    programs = await installed(name, environments)
    port, metrics = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    where = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics))
    pid = await place.processes.start(
        name,
        (str(programs / name), *verb, "--worker-urls", *place.engines, *OPTIONS, *where),
        ready=place.processes.answers(f"{url}/health"),
    )
    version = await version_of(name, programs)
    settings = f"{version}, {' '.join(OPTIONS)}"
    system = System(name, (url,), settings, router=(pid,), path={"router": (pid,)})
    return await until_it_answers(place, system)
