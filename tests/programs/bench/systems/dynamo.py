"""NVIDIA Dynamo: its frontend in KV mode over its own mockers, and the mesh over the same ones.

Its frontend works with Dynamo's workers alone, so these are its mockers and not the scripted
engines: its CPU can be compared with the others', its times to first token can't. The frontend
tokenizes prompts and answers, which no other system here does.

For `mesh-dynamo` each of as many such mockers has a frontend of its own, with nothing to choose,
which makes an OpenAI engine of it: agents are beside those. Thus times of both can be compared,
though a request of the mesh's passes one process more; and CPU as each row names it, since those
frontends' work (HTTP, tokens) is in Dynamo's router and in none of the mesh's processes.
"""

import asyncio
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tests.programs.bench.installs import installed, tiny_model, version_of
from tests.programs.bench.systems.mesh import mesh
from tests.programs.bench.systems.system import Place, System, until_it_answers
from tests.programs.bench.tiny_model import CONTEXT_TOKENS
from tests.support.ports import free_ports

NAME, OVER_SAME, MODEL = "dynamo", "mesh-dynamo", "tiny"
MOCKERS = 2
BLOCK_TOKENS, BLOCKS = 16, 65_536
# As much at once as any cell asks, and so fast that the frontend is what is measured.
MOCKER = (
    *("--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK_TOKENS)),
    *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "512"),
    *("--max-num-batched-tokens", "8192", "--speedup-ratio", "10"),
)
FRONTEND = ("--router-mode", "kv", "--kv-cache-block-size", str(BLOCK_TOKENS))
LONE_FRONTEND = ("--router-mode", "round-robin")
PROMPT_TOKENS_MAX = CONTEXT_TOKENS // 2


async def dynamo(place: Place, environments: Path) -> System:
    """Raises Absent."""
    programs = await installed(NAME, environments)
    group = await dynamo_group(place, programs, NAME)
    await asyncio.gather(*(group.mocker(port) for port in free_ports(MOCKERS)))
    pid, url = await group.frontend(*FRONTEND)
    version = await version_of("ai-dynamo", programs)
    system = System(
        name=NAME,
        urls=(url,),
        settings=f"{version}, {' '.join(FRONTEND)}, {MOCKERS} mockers of its own as engines",
        router=(pid,),
        path={"router": (pid,)},
        model=MODEL,
        prompt_tokens_max=PROMPT_TOKENS_MAX,
        has_own_engines=True,
    )
    return await until_it_answers(place, system)


async def mesh_dynamo(place: Place, environments: Path) -> System:
    """Our mesh over such mockers, each behind a frontend of its own. Raises Absent."""
    programs = await installed(NAME, environments)
    groups = [await dynamo_group(place, programs, f"{OVER_SAME}-{n}") for n in range(MOCKERS)]
    await asyncio.gather(*map(Group.mocker, groups, free_ports(MOCKERS)))
    frontends = await asyncio.gather(*(group.frontend(*LONE_FRONTEND) for group in groups))
    engines = [url for _, url in frontends]
    over = dataclasses.replace(place, engines=engines)
    await asyncio.gather(  # agents ask engines for their models when they start
        *(until_it_answers(place, System(OVER_SAME, (url,), "")) for url in engines)
    )
    system = await mesh(over, name=OVER_SAME)
    version = await version_of("ai-dynamo", programs)
    return dataclasses.replace(
        system,
        settings=f"{system.settings}; engines: {MOCKERS} times a mocker of {version} behind a "
        f"frontend, {' '.join(LONE_FRONTEND)}",
        beside={"frontends": tuple(pid for pid, _ in frontends)},
        prompt_tokens_max=PROMPT_TOKENS_MAX,
        has_own_engines=True,
    )


@dataclass(frozen=True, slots=True)
class Group:
    """Processes of Dynamo's that find each other, and no others, by files in one folder."""

    place: Place
    name: str
    python: str
    model: Path

    async def mocker(self, port: int, options: tuple[str, ...] = MOCKER) -> int:
        """Its process id. `port`: of its health page and metrics; it fits 16 bits with a sign, as
        Dynamo keeps one of them."""
        model = ("--model-path", str(self.model), "--model-name", MODEL)
        return await self._start(
            f"mocker-{port}",
            ("dynamo.mocker", *model, *options),
            f"http://127.0.0.1:{port}/health",
            {"DYN_SYSTEM_PORT": str(port)},
        )

    async def frontend(self, *options: str, port: int | None = None) -> tuple[int, str]:
        """Its process id and address."""
        port = port or free_ports(1)[0]
        url = f"http://127.0.0.1:{port}"
        where = ("--http-host", "127.0.0.1", "--http-port", str(port))
        command = ("dynamo.frontend", *where, *options)
        return await self._start(f"frontend-{port}", command, f"{url}/v1/models", {}), url

    async def _start(
        self, name: str, module: tuple[str, ...], page: str, environment: dict[str, str]
    ) -> int:
        shared = {
            "DYN_FILE_KV": str(self.place.directory / self.name / "discovery"),
            "DYN_SYSTEM_STARTING_HEALTH_STATUS": "ready",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_LOG": "error",
            "HF_HUB_OFFLINE": "1",
        }
        return await self.place.processes.start(
            f"{self.name}-{name}",
            (self.python, "-m", *module, "--discovery-backend", "file"),
            ready=self.place.processes.answers(page),
            environment=shared | environment,
        )


async def dynamo_group(place: Place, programs: Path, name: str) -> Group:
    """One without processes yet."""
    model = await tiny_model(programs, place.directory / name / "model")
    return Group(place, name, str(programs / "python"), model)
