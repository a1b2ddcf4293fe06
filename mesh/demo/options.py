"""The options of `mesh up`, the topology that follows, and whether its ports are free."""

import errno
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import SystemRandom

from pydantic import SecretStr

from agents.config import offline_profile
from agents.core.offline_profile import ProfileInvalid
from infra.address import Address
from infra.topology import RegionTable, Topology, TopologyError
from infra.workers import crowd_problems
from schemas.ids import ModelId, RegionId, ReplicaId

REPLICAS_HERE_MAX = 96  # 8 times the packaged mesh
# Below the ports that kernels assign to outgoing connections, which could take one before we do.
FREE_PORTS = range(10_000, 20_000)
FREE_TRIES_MAX = 1000


class GivenEngineKind(StrEnum):
    """Whose HTTP API and metrics an engine has."""

    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class GivenEngine:
    """A server that runs already and is to serve as a replica's engine."""

    region: str
    url: str
    metrics_url: str | None = None
    batch_max: int | None = None  # None: its agent finds out
    models: tuple[ModelId, ...] = ()  # none: those that it lists
    key: SecretStr | None = None  # its API key
    load_s: float | None = None  # patience before a first answer; None: its agent's default

    @property
    def metrics_page(self) -> str:
        return self.metrics_url or f"{self.url}/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The command line of `mesh up`, checked."""

    config: Path
    state: Path
    replicas: int | None = None  # per region; None: as the configuration says
    bus_servers: int | None = None  # likewise
    tls: bool = False  # routers serve https, and the bus is encrypted
    time_scale: float = 1.0
    profile: str | None = None  # of simulated engines; None: their own default
    engines: tuple[GivenEngine, ...] = ()
    engine_kind: GivenEngineKind | None = None  # of all of them; None: as each shows
    # Of every router; None: as the configuration says, or the router's own default.
    policy: str | None = None
    pushing: str | None = None
    log_level: str = "WARNING"  # of routers
    workers: int | None = None  # processes of each router; None: as the configuration says
    ready_file: Path | None = None


def fitted(topology: Topology, options: DemoOptions) -> Topology:
    """The topology with the replicas, workers and nats-servers that the options ask for.

    Given engines replace all simulated ones, also in regions without any: real and simulated
    engines serve different models. Raises TopologyError for an engine of an unknown region, for a
    mesh without a replica or with too many, and for more workers than a region may have.
    """
    for engine in options.engines:
        if engine.region not in topology.regions:
            raise TopologyError(
                f'--engine {engine.region}={engine.url}: no region "{engine.region}": '
                f"there are {', '.join(topology.regions)}"
            )
    given = Counter(engine.region for engine in options.engines)
    regions = {
        name: _resized(name, region, given[name] if given else options.replicas, options.workers)
        for name, region in topology.regions.items()
    }
    if options.bus_servers is not None:
        free = FreeAddresses(topology.addresses())
        for name, region in regions.items():
            regions[name] = _with_servers(region, options.bus_servers, free)
    replicas = sum(len(region.replicas) for region in regions.values())
    if not replicas:
        raise TopologyError(
            f"{options.config}: no region has a replica, so no request could be answered; "
            "give a region some, or use --replicas"
        )
    if replicas > REPLICAS_HERE_MAX:
        raise TopologyError(
            f"{options.config}: {replicas} replicas, of two processes each, are too many for one "
            f"machine; use --replicas for fewer, at most {REPLICAS_HERE_MAX} in all regions"
        )
    return topology.model_copy(update={"regions": regions})


def _resized(
    name: RegionId, region: RegionTable, replicas: int | None, workers: int | None
) -> RegionTable:
    update: dict[str, object] = {}
    if replicas is not None:
        update["replicas"] = tuple(ReplicaId(f"{name}-{number}") for number in range(replicas))
    if workers is not None:
        update["workers"] = workers
        for key, problem in crowd_problems(
            dict.fromkeys(region.routers, workers), region.batch_runners
        ):
            raise TopologyError(f"--workers {workers}: regions.{name}.{key}: {problem}")
    return region.model_copy(update=update)


def _with_servers(region: RegionTable, servers: int, free: "FreeAddresses") -> RegionTable:
    """The region with so many nats-servers; those that the file has not are on free addresses."""
    host, added = region.nats[0].host, servers - len(region.nats)

    def resized(known: tuple[Address, ...]) -> tuple[Address, ...]:
        return *known[:servers], *(free.first(host) for _ in range(added))

    update = {"nats": resized(region.nats), "leaf": resized(region.leaf)}
    update["monitor"] = resized(region.monitor) if region.monitor else ()
    if servers == 1:
        update["cluster"] = ()
    elif not region.cluster:
        update["cluster"] = tuple(free.first(host) for _ in range(servers))
    return region.model_copy(update=update)


def profile_files(topology: Topology, config: Path) -> dict[RegionId, Path]:
    """The profile of each region that has one; a relative path is from the configuration's folder.

    Raises TopologyError, which names the key, for a file that is none.
    """
    found = {}
    for name, region in topology.regions.items():
        if region.profile is None:
            continue
        found[name] = config.parent / region.profile
        try:
            offline_profile(found[name])
        except ProfileInvalid as error:
            problem = f"{error}; write one with mesh-agent profile"
            raise topology.error(f"regions.{name}.profile", problem) from error
    return found


def port_problems(topology: Topology) -> list[str]:
    """A line for each address that can't be listened on: the key, why, and what to do."""
    return [
        f"regions.{name}.{key}: {problem}"
        for name, region in topology.regions.items()
        for key, address in region.addresses()
        if (problem := _port_problem(address))
    ]


class FreeAddresses:
    """Addresses on which nobody listens. Each is given once, as its user listens to it later."""

    def __init__(self, taken: Iterable[Address] = ()) -> None:
        self._given = set(taken)

    def first(self, host: str, ports: int = 1) -> Address:
        """The first of so many in a row. Raises OSError."""
        for _ in range(FREE_TRIES_MAX):
            first = SystemRandom().randrange(FREE_PORTS.start, FREE_PORTS.stop - ports)
            row = [Address(host, first + number) for number in range(ports)]
            if self._given.isdisjoint(row) and not any(map(_port_problem, row)):
                self._given.update(row)
                return row[0]
        raise OSError(f"no {ports} free ports in a row on {host}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _port_problem(address: Address) -> str | None:
    with socket.socket(_family(address.listen.host), socket.SOCK_STREAM) as attempt:
        # Servers set this too: a port in TIME_WAIT is free.
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(address.listen)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"{address} is taken; end what listens there, or give another port"
            reason = f"{address} can't be listened on ({error.strerror})"
            return f"{reason}; give an address of this machine"
    return None
