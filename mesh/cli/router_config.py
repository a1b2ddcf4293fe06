"""The configuration of `mesh router`: its options over a mesh.toml, which can be read again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra.address import Address, parse_address
from infra.bus import BusAddress
from infra.topology import RegionTable, Topology, TopologyError
from infra.workers import crowd_problems, page_problems
from mesh.cli.choices import batch_login
from mesh.cli.unusable import Unusable
from mesh.core.model.settings import RouterSettings
from mesh.http.tls import ServerTls, TlsUnusable, read_tls
from mesh.runtime.config import BatchAccess, RouterConfig, region_entries, router_settings
from mesh.runtime.mesh_file import load_mesh
from mesh.runtime.reload import ConfigRefused
from schemas.ids import RegionId, RouterId
from schemas.problems import problem_of
from schemas.settings import RoutingTable

NO_PREFIX_KEY = (
    "without --prefix-key, hashes of prompts could be guessed, so no prefixes are sent to peers: "
    "give all routers of the mesh the same secret, in env MESH_PREFIX_KEY"
)
NO_BATCH = "without --batch-credentials, /v1/files and /v1/batches are not served"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """What was given to one `mesh router`. `others`: fields of its configuration as they are."""

    file: Path
    region: str
    router: str
    http: str | None
    workers: int | None
    metrics: str | None
    console: str | None
    bus_servers: int | None
    nats_url: str | None
    nats_user: str | None
    nats_password: str | None
    bus_ca: str | None
    prefix_key: str | None
    batch_credentials: Path | None
    routing: RoutingTable
    limits: Mapping[str, float]
    others: Mapping[str, Any]

    def warnings(self, config: RouterConfig) -> Iterator[str]:
        """What it goes without, as it was started."""
        if config.peers and not self.prefix_key:
            yield NO_PREFIX_KEY
        if config.batch is None and _own_table(load_mesh(self.file), self).batch_runners:
            yield NO_BATCH


def read_config(options: RouterOptions) -> RouterConfig:
    """Read the file and check it whole, with the options. Raises ConfigRefused."""
    try:
        topology = load_mesh(options.file)
        own = _own_table(topology, options)
        address = (own.http if options.http is None else _address("http", options.http)).listen
        page = own.metrics if options.metrics is None else _address("metrics", options.metrics)
        given = ("http", "metrics", "console")
        region = RegionId(options.region)
        config = RouterConfig(
            region=region,
            router=RouterId(options.router),
            peers=topology.asked_by(region),
            http_host=address.host,
            http_port=address.port,
            metrics=page and page.listen,
            console=None if options.console else own.console,
            workers=own.workers if options.workers is None else options.workers,
            tls=_tls(own, options.file),
            cors_origins=own.cors_origins,
            routes=own.routes,
            by_option=frozenset(name for name in given if getattr(options, name)),
            bus=BusAddress(
                options.nats_url or own.bus_url,
                options.nats_user,
                options.nats_password,
                options.bus_ca,
            ),
            bus_servers=options.bus_servers or len(own.servers),
            settings=_settings(topology, options),
            hash_key=options.prefix_key or topology.mesh.name,
            entries=region_entries(topology),
            keys=topology.keys,
            tenants=topology.tenants,
            auth=topology.auth,
            batch=_batch_access(topology, own, options),
            epoch=0,
            seed=0,
            **options.others,
        )
    except (TopologyError, TlsUnusable, Unusable) as error:
        raise ConfigRefused(str(error)) from error
    _check_workers(own, config)
    return config


def _own_table(topology: Topology, options: RouterOptions) -> RegionTable:
    """The region's table, which names that router."""
    region, router = options.region, options.router
    if region not in topology.regions:
        there = ", ".join(topology.regions)
        raise ConfigRefused(f"no region {region!r} in {options.file}; there are {there}")
    own = topology.regions[RegionId(region)]
    if router not in own.routers:
        there = ", ".join(own.routers)
        raise ConfigRefused(f"no router {router!r} in [regions.{region}]; there are {there}")
    return own


def _tls(own: RegionTable, file: Path) -> ServerTls | None:
    if own.tls is None:
        return None
    ca = own.tls.client_ca
    folder = file.parent
    return read_tls(
        folder / own.tls.cert, folder / own.tls.key, None if ca is None else folder / ca
    )


def _check_workers(own: RegionTable, config: RouterConfig) -> None:
    """No more than the region, its peers and the ports have room for."""
    many = dict.fromkeys(own.routers, own.workers) | {config.router: config.workers}
    problems = (
        *crowd_problems(many, own.batch_runners),
        *page_problems(config.workers, config.metrics),
    )
    for key, problem in problems:
        named = "routers in mesh.toml" if key == "routers" else f"--{key}"
        raise ConfigRefused(f"{named}: {problem}")


def _settings(topology: Topology, options: RouterOptions) -> RouterSettings:
    others: dict[str, Any] = dict(options.limits)
    region, has_key = RegionId(options.region), bool(options.prefix_key)
    if not topology.asked_by(region) or not has_key:
        others["trie_bytes_per_s"] = 0  # no peer to send prefixes to, or no key for their hashes
    if not has_key:
        others["siblings_bytes_per_s"] = 0
    try:
        return router_settings(topology, region, options.routing, **others)
    except ValidationError as error:
        raise ConfigRefused(problem_of(error)) from error


def _batch_access(
    topology: Topology, own: RegionTable, options: RouterOptions
) -> BatchAccess | None:
    """Where files and batches are kept; None in a region that keeps none."""
    if not own.batch_runners or options.batch_credentials is None:
        return None
    url = options.nats_url or own.bus_url
    return BatchAccess(batch_login(url, options.batch_credentials), topology.batch)


def _address(option: str, text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise ConfigRefused(f"--{option}: {error}") from error
