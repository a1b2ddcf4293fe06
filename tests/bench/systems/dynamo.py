"""NVIDIA Dynamo: its frontend in KV mode over its own mockers.

Its frontend speaks to workers of Dynamo's alone, so these are its mockers and not the scripted
engines: its CPU can stand beside the others', its times to first token can't. The frontend
tokenizes prompts and answers, which no other system here does.
"""

import asyncio
from pathlib import Path

from tests.bench.installs import installed, tiny_model, version_of
from tests.bench.systems.system import Place, System, until_it_answers
from tests.bench.tiny_model import CONTEXT_TOKENS
from tests.support.ports import free_ports

NAME, MODEL = "dynamo", "tiny"
MOCKERS = 2
BLOCK_TOKENS, BLOCKS = 16, 65_536
# As much at once as any cell asks, and so fast that the frontend is what is measured.
MOCKER = (
    *("--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK_TOKENS)),
    *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "512"),
    *("--max-num-batched-tokens", "8192", "--speedup-ratio", "10"),
)
FRONTEND = ("--router-mode", "kv", "--kv-cache-block-size", str(BLOCK_TOKENS))


async def dynamo(place: Place, environments: Path) -> System:
    """Raises Absent."""
    programs = await installed(NAME, environments)
    folder = await tiny_model(programs, place.directory / NAME / "model")
    python = str(programs / "python")
    [http] = free_ports(1)
    # They fit the 16 bits with a sign in which Dynamo keeps one of them: PORTS end below.
    ports = free_ports(MOCKERS)
    shared = {
        "DYN_FILE_KV": str(place.directory / NAME / "discovery"),
        "DYN_SYSTEM_STARTING_HEALTH_STATUS": "ready",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
    }
    files = ("--discovery-backend", "file")
    model = ("--model-path", str(folder), "--model-name", MODEL)
    await asyncio.gather(
        *(
            place.processes.start(
                f"mocker-{port}",
                (python, "-m", "dynamo.mocker", *model, *files, *MOCKER),
                ready=place.processes.answers(f"http://127.0.0.1:{port}/health"),
                environment=shared | {"DYN_SYSTEM_PORT": str(port)},
            )
            for port in ports
        )
    )
    url = f"http://127.0.0.1:{http}"
    where = ("--http-host", "127.0.0.1", "--http-port", str(http))
    pid = await place.processes.start(
        "dynamo-frontend",
        (python, "-m", "dynamo.frontend", *where, *files, *FRONTEND),
        ready=place.processes.answers(f"{url}/v1/models"),
        environment=shared,
    )
    version = await version_of("ai-dynamo", programs)
    system = System(
        name=NAME,
        urls=(url,),
        settings=f"{version}, {' '.join(FRONTEND)}, {MOCKERS} mockers of its own as engines",
        router=(pid,),
        path={"router": (pid,)},
        model=MODEL,
        prompt_tokens_max=CONTEXT_TOKENS // 2,
        has_own_engines=True,
    )
    return await until_it_answers(place, system)
