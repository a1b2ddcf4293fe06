"""Our mesh: nats-servers with rendered permissions, routers, and an agent beside each engine."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from infra import topology
from infra.credentials_file import read_environment
from infra.nats import bundle, server
from schemas.ids import RegionId
from tests.programs.bench.systems.system import Place, System, until_it_answers
from tests.support.mesh_up import NO_SPEED_PROBE, write_config
from tests.upgrade.fleet import install_last

# As many streams as the bench ever has; by default an agent holds 256.
OUTSTANDING_MAX = 1024
ROOT = Path(__file__).parents[4]


async def mesh(
    place: Place,
    *,
    name: str = "mesh",
    tree: Path = ROOT,
    environment: Mapping[str, str] = MappingProxyType({}),
    router_options: Sequence[str] = (),
) -> System:
    """One region: router, nats-server, agents. `tree`: the checkout that runs."""
    return await Mesh(place, name, ("us",), tree, environment, router_options).start()


async def forwarded(place: Place, *, name: str = "forwarded", tree: Path = ROOT) -> System:
    """Two regions: the one that is asked has no replica, so everything goes to the other."""
    return await Mesh(place, name, ("us", "eu"), tree).start()


async def last_release(place: Place, *, name: str) -> System:
    """As `mesh`, of the kept wheel, with this checkout's libraries."""
    folder = place.directory / "release"
    await asyncio.to_thread(install_last, folder)
    return await mesh(place, name=name, tree=folder)


class Mesh:
    """Starts one; clients ask the first region, engines are in the last."""

    def __init__(
        self, place: Place, name: str, regions: tuple[str, ...], tree: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
        router_options: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._place, self._name, self._regions, self._tree = place, name, regions, tree
        self._environment, self._router_options = environment, router_options
        self._directory = place.directory / name.replace(" ", "-")
        self._pids: dict[str, list[int]] = {"router": [], "bus": [], "agents": []}

    async def start(self) -> System:
        self._directory.mkdir(parents=True)
        replicas = len(self._place.engines)
        self._config = write_config(  # release 0.1 has no console
            self._directory, regions=self._regions, replicas=replicas, rtt_ms={}, console=False
        )
        self._topology = topology.load(self._config)
        binary = server.find()
        self._files = bundle.write(self._topology, self._directory / "nats")
        await asyncio.gather(*(self._bus(binary, region) for region in self._regions))
        routers = [self._router(region) for region in self._regions]
        agents = [self._agent(number, url) for number, url in enumerate(self._place.engines)]
        await asyncio.gather(*routers, *agents)
        first = RegionId(self._regions[0])
        version = ".".join(map(str, server.version(binary)))
        system = System(
            name=self._name,
            urls=(f"http://{self._topology.region(first).http}",),
            settings=f"{len(self._regions)} region(s), policy as by default, "
            f"--max-outstanding {OUTSTANDING_MAX}, nats-server {version}",
            router=(self._pids["router"][0],),
            path={part: tuple(pids) for part, pids in self._pids.items()},
        )
        return await until_it_answers(self._place, system)

    async def _bus(self, binary: Path, region: str) -> None:
        [nats] = self._topology.region(RegionId(region)).nats
        command = (str(binary), "-c", str(self._files[RegionId(region)].config))

        async def listens() -> bool:
            _, writer = await asyncio.open_connection(nats.host, nats.port)
            writer.close()
            return True

        await self._start("bus", f"nats-{region}", command, "router", region, listens)

    async def _router(self, region: str) -> None:
        options = ("router", "--region", region, "--config", str(self._config))
        options += tuple(self._router_options)
        url = f"http://{self._topology.region(RegionId(region)).http}/health"
        ready = self._place.processes.answers(url)
        command = _python("mesh.cli.main", *options)
        await self._start("router", f"router-{region}", command, "router", region, ready)

    async def _agent(self, number: int, engine: str) -> None:
        region = self._regions[-1]
        replica = f"{region}-{number}"
        options = ("--region", region, "--replica", replica, "--engine-url", engine)
        most = ("--max-outstanding", str(OUTSTANDING_MAX))
        command = _python("agents.cli", "run", *options, *most)
        await self._start("agents", replica, command, f"agent-{replica}", region, None)

    async def _start(self, part, name, command, user, region, ready) -> None:
        credentials = self._files[RegionId(region)].credentials[user]
        pid = await self._place.processes.start(
            f"{self._directory.name}-{name}",
            command,
            ready=ready,
            environment={**read_environment(credentials), **NO_SPEED_PROBE, **self._environment},
            directory=self._tree,
        )
        if part == "router" and region == self._regions[0]:
            self._pids[part].insert(0, pid)
        else:
            self._pids[part].append(pid)


def _python(module: str, *arguments: str) -> Sequence[str]:
    return (sys.executable, "-m", module, *arguments)
