"""One `mesh.toml`: which regions there are, where they listen, and what lies between them.

Regions are joined pairwise: every pair has exactly one link, so there is no hub whose loss parts
the others, and one round-trip time holds between any two. Of a pair, the region whose name comes
first in the alphabet accepts the leaf link and the other solicits it: a rule instead of a setting,
so two operators can't both wait for the other.

All mistakes are reported at once, each with its file, line, key and what to do; nothing is repaired
silently.
"""

import itertools
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    StrictBool,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from infra.address import SERVERS, Address, parse_address, parse_addresses
from infra.auth_table import AuthTable, JwtTable
from infra.batch_table import BatchTable, Price, RunnerNames, jetstream_disk_mib
from infra.tenant_table import TENANTS_MAX, Caller, LabelList, TenantTable, listed_callers
from infra.toml_positions import TomlPositions, key_path, key_text
from infra.topology_checks import across_tables, not_toml, right_items, right_part
from infra.workers import WORKERS_MAX, pages
from schemas.ids import (
    NAME_PATTERN,
    REGION_ROUTERS_MAX,
    RegionId,
    RouterId,
    ValidModelId,
    ValidRegionId,
    ValidReplicaId,
    ValidRouterId,
)
from schemas.limits import LimitsTable
from schemas.listed_routes import ListedRoutes
from schemas.model_table import MODELS_MAX, ModelTable, model_problems
from schemas.problems import KeyPath, problems
from schemas.residency import Ground, ground
from schemas.settings import WHOLE, Advice, LinkTable, Option, RoutingScope, RoutingTable, Table

DEFAULT_FILE = Path(__file__).with_name("mesh.toml")
REGIONS_MAX = 32  # a full mesh: n·(n-1)/2 links, each region's server holds n-1
REPLICAS_MAX = 4096  # per region; each is a user of the region's nats-server
HOST_PORT_PATTERN = r"^.+:[0-9]{1,5}$"
ORIGIN_PATTERN = r"^(\*|null|[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+)$"  # as browsers write it
ORIGINS_MAX = 64
BASE_URL_PATTERN = r"^https?://[^\s/?#]+(/[^\s?#]*)?/v1$"


class TopologyError(ValueError):
    """A mesh.toml that can't be used; the text names file, key and what to do, a line each."""


HostPort = Annotated[
    Address,
    BeforeValidator(parse_address),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": HOST_PORT_PATTERN,
            "description": "host:port as others dial it.",
        }
    ),
]
_ADDRESS_JSON = {"type": "string", "pattern": HOST_PORT_PATTERN}
HostPorts = Annotated[
    tuple[Address, ...],
    BeforeValidator(parse_addresses),
    WithJsonSchema(
        {
            "anyOf": [
                _ADDRESS_JSON,
                {
                    "type": "array",
                    "items": _ADDRESS_JSON,
                    "minItems": SERVERS,
                    "maxItems": SERVERS,
                },
            ],
            "description": "host:port as others dial it, or a list with that of each nats-server.",
        }
    ),
]
MeshName = Annotated[str, Field(pattern=NAME_PATTERN)]
EndpointUrl = Annotated[
    str,
    Field(pattern=BASE_URL_PATTERN),
    Advice('write the URL that clients use, like "https://us.example.com/v1"'),
]
Degrees = Annotated[
    tuple[
        Annotated[float, Field(strict=True, ge=-90, le=90)],
        Annotated[float, Field(strict=True, ge=-180, le=180)],
    ],
    Advice("write latitude and longitude in degrees, like [38.9, -77.5]"),
]
ReplicaNames = Annotated[
    tuple[ValidReplicaId, ...],
    Field(max_length=REPLICAS_MAX),
    Advice(f"write a number from 0 to {REPLICAS_MAX}, or a list of names"),
]
RouterNames = Annotated[
    tuple[ValidRouterId, ...],
    Field(min_length=1, max_length=REGION_ROUTERS_MAX),
    Advice('write a list of one name or more, like ["r1"]'),
]
ProfileFile = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    Advice('write the file that mesh-agent profile wrote, like "us.profile.json"'),
]
Origins = Annotated[
    tuple[
        Annotated[
            str,
            Field(pattern=ORIGIN_PATTERN),
            Advice('write an origin without a path, like "https://app.example.com", or "*"'),
        ],
        ...,
    ],
    Field(max_length=ORIGINS_MAX),
    Advice('write a list of origins, like ["https://app.example.com"], or ["*"]'),
]
Mebibytes = Annotated[int, Field(strict=True, ge=1, le=1 << 20), WHOLE]


class MeshTable(Table):
    """`[mesh]`: what the whole is called."""

    name: Annotated[MeshName, Option("What the whole is called.")]


class NatsLimits(Table):
    """`[nats]`: limits of every region's nats-server."""

    max_payload_mib: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=64), WHOLE],
        Option("Of one message; larger bodies travel in parts. NATS' own 1 is little for prompts."),
    ] = 8
    max_pending_mib: Annotated[
        Annotated[int, Field(strict=True, ge=8, le=4096), WHOLE],
        Option("What a slow reader may leave unread before the server closes its connection."),
    ] = 64
    jetstream_memory_mib: Annotated[Mebibytes, Option("Of streams in memory.")] = 256
    jetstream_disk_mib: Annotated[
        Mebibytes | None,
        Option("Of streams on disk.", default="1024, and what `[batch]` may take"),
    ] = None

    @model_validator(mode="after")
    def _room_for_one_message(self) -> Self:
        if self.max_pending_mib < self.max_payload_mib:
            raise ValueError("max_pending_mib must be at least max_payload_mib")
        return self


PemFile = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    Advice('write a PEM file, like "/etc/mesh/tls/us.pem"; a relative path is from this file'),
]


class TlsTable(Table):
    """`tls` of a region: its routers serve https."""

    cert: Annotated[PemFile, Option("The certificate and those between it and its authority.")]
    key: Annotated[PemFile, Option("Its key, without a pass phrase.")]
    client_ca: Annotated[
        PemFile | None,
        Option("Whose certificates clients need.", default="clients need none"),
    ] = None


SERVER_KEYS = ("nats", "leaf", "cluster", "monitor")  # where a region's nats-servers listen


def server_suffixes(servers: int) -> tuple[str, ...]:
    """What tells the names of a region's nats-servers apart; nothing where it is the only one."""
    return ("",) if servers == 1 else tuple(f"-{number}" for number in range(1, servers + 1))


class BusServer(NamedTuple):
    """One nats-server of a region: where it listens."""

    suffix: str  # of its name, files and program: `server_suffixes`
    nats: Address
    leaf: Address
    cluster: Address | None = None  # for the region's other nats-servers, where there are some
    monitor: Address | None = None


class RegionTable(Table):
    """`[regions.<name>]`: one failure and latency domain."""

    http: Annotated[HostPort, Option("host:port of its routers' OpenAI endpoint.")]
    nats: Annotated[
        HostPorts,
        Option("host:port of its nats-server, for clients; or a list of three, of a cluster."),
    ]
    leaf: Annotated[
        HostPorts, Option("host:port where its nats-server accepts other regions; of each.")
    ]
    cluster: Annotated[
        HostPorts, Option("host:port where each of three nats-servers accepts the others.")
    ] = ()
    tls: Annotated[
        TlsTable | None,
        Option("Files to serve https with, of each router.", default="none: http"),
    ] = None
    endpoint: Annotated[
        EndpointUrl | None, Option("Base URL for clients, listed in `/v1/regions`.")
    ] = None
    location: Annotated[
        Degrees | None, Option("Latitude and longitude, for clients that send their own.")
    ] = None
    monitor: Annotated[
        HostPorts, Option("host:port of its nats-server's own HTTP pages; of each.", default="none")
    ] = ()
    replicas: Annotated[
        ReplicaNames, Option("Names, or a number N for <region>-0 … <region>-(N-1).")
    ]
    routers: Annotated[RouterNames, Option("Names of its routers.")] = (RouterId("r1"),)
    workers: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=WORKERS_MAX), WHOLE],
        Option("Processes of each router; one uses one core."),
    ] = 1
    metrics: Annotated[
        HostPort | None,
        Option("host:port of the metrics of a router's first worker; the others' ports follow."),
    ] = None
    console: Annotated[
        HostPort | None,
        Option("host:port of its operators' console, for the operators' network.", default="none"),
    ] = None
    routes: Annotated[
        ListedRoutes, Option("Paths of its engines that clients may call beside those known.")
    ] = ()
    cors_origins: Annotated[
        Origins, Option('Pages that may call from a browser; `"*"` for all.')
    ] = ()
    profile: Annotated[
        ProfileFile | None, Option("Of its engines: how its agents take offline work.")
    ] = None
    batch_runners: Annotated[
        RunnerNames, Option("Processes that do batch jobs; without any it takes none.")
    ] = ()
    gpu_hour_price: Annotated[
        Price | None, Option("In any currency; dearer regions get less offline work.")
    ] = None
    routing: Annotated[RoutingTable, Option("What differs here from the mesh's.")] = RoutingTable()
    residency: Annotated[LabelList, Option("Labels that it carries.")] = ()
    confined_to: Annotated[
        LabelList, Option("Its clients' requests stay where one of these is carried.")
    ] = ()
    label_required: Annotated[
        StrictBool,
        Option("Its clients' requests without a label, of a header, path or key, are refused."),
    ] = False

    def addresses(self) -> Iterator[tuple[str, Address]]:
        """Each address the region listens on, with the key it was written under."""
        for key in ("http", "console"):
            if (address := getattr(self, key)) is not None:
                yield key, address
        for key in SERVER_KEYS:
            for address in getattr(self, key) or ():  # none: a mistake, told elsewhere
                yield key, address
        for page in pages(self.metrics, self.workers):
            yield "metrics", page

    @property
    def servers(self) -> tuple[BusServer, ...]:
        """Its nats-servers, in the order of the file."""
        none = (None,) * len(self.nats)
        cluster, monitor = self.cluster or none, self.monitor or none
        suffixes = server_suffixes(len(self.nats))
        return tuple(map(BusServer, suffixes, self.nats, self.leaf, cluster, monitor))

    @property
    def scheme(self) -> str:
        """Of its routers' URLs."""
        return "http" if self.tls is None else "https"

    @property
    def bus_url(self) -> str:
        """Where its processes connect, as `infra.bus` and the `nats` command take it."""
        return ",".join(f"nats://{address}" for address in self.nats)


class Topology(Table):
    """A whole mesh.toml. Make one with `load` or `parse`, whose errors are for people."""

    mesh: MeshTable
    regions: Annotated[
        dict[ValidRegionId, RegionTable], Field(min_length=1, max_length=REGIONS_MAX)
    ]
    links: tuple[LinkTable, ...] = ()
    routing: RoutingTable = RoutingTable()
    tenants: Annotated[dict[MeshName, TenantTable], Field(max_length=TENANTS_MAX)] = Field(
        default_factory=dict
    )
    models: Annotated[dict[ValidModelId, ModelTable], Field(max_length=MODELS_MAX)] = Field(
        default_factory=dict
    )
    auth: AuthTable = AuthTable()
    nats: NatsLimits = NatsLimits()
    batch: BatchTable = BatchTable()
    _source: str = PrivateAttr("")
    _text: str = PrivateAttr("")

    def error(self, key: str, problem: str) -> TopologyError:
        """What to raise for a value that is found to be wrong only later."""
        return _error(self._text, self._source, [(key_path(key), f"{key}: {problem}")])

    def region(self, name: str) -> RegionTable:
        """The region of that name. Raises TopologyError that lists those there are."""
        if name not in self.regions:
            raise TopologyError(f'no region "{name}": there are {", ".join(self.regions)}')
        return self.regions[RegionId(name)]

    def addresses(self) -> list[Address]:
        """All that its regions listen on."""
        return [where for each in self.regions.values() for _, where in each.addresses()]

    def peers(self, region: str) -> tuple[RegionId, ...]:
        """Every other region, by name."""
        return tuple(sorted(name for name in self.regions if name != region))

    def jetstream_disk_mib(self, region: RegionId) -> int:
        """What the JetStream of that region's nats-server may take on disk."""
        configured, runners = self.nats.jetstream_disk_mib, self.regions[region].batch_runners
        return jetstream_disk_mib(configured, self.batch, has_runners=bool(runners))

    def routing_of(self, region: RegionId) -> RoutingTable:
        """The operator's choices for that region's routers."""
        return self.regions[region].routing.over(self.routing)

    def asked_by(self, region: RegionId) -> tuple[RegionId, ...]:
        """The peers that its routers may forward to: none if either end keeps to itself."""
        if self._keeps_to_itself(region):
            return ()
        return tuple(peer for peer in self.peers(region) if not self._keeps_to_itself(peer))

    @property
    def ground(self) -> Ground:
        """Which region carries which labels, and who is confined."""
        return self._ground(self.regions)

    def ground_for(self, region: RegionId) -> Ground:
        """The same for that region's routers: regions that they can't forward to have no labels."""
        return self._ground((region, *self.asked_by(region)))

    @property
    def keys(self) -> dict[str, Caller]:
        """Who has each API key, by the key's SHA-256."""
        return listed_callers(self.tenants)

    def _ground(self, known: Collection[RegionId]) -> Ground:
        """The labels of all regions, of those that are not `known` none."""
        carried = {name: table.residency * (name in known) for name, table in self.regions.items()}
        confined = {name: table.confined_to for name, table in self.regions.items()}
        required = [name for name, table in self.regions.items() if table.label_required]
        return ground(carried, confined, required)

    def _keeps_to_itself(self, region: RegionId) -> bool:
        return self.routing_of(region).topology is RoutingScope.REGION_LOCAL

    def link(self, a: str, b: str) -> LinkTable:
        """The link between two regions, whichever is named first. Raises KeyError if none."""
        for link in self.links:
            if set(link.between) == {a, b}:
                return link
        raise KeyError((a, b))


# A check that the model has not: yields `key: what to do`; wrong values have their defaults.
Check = Callable[[Topology], Iterator[str]]


def load(path: Path, checks: Iterable[Check] = ()) -> Topology:
    """Read a mesh.toml. Raises TopologyError: print its text and stop."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise TopologyError(
            f"{path}: can't be read ({reason}); give the path of a mesh.toml, "
            f"for example a copy of {DEFAULT_FILE}"
        ) from error
    return parse(text, str(path), checks)


def parse(text: str, source: str, checks: Iterable[Check] = ()) -> Topology:
    """The topology in a mesh.toml's text; `source` is what errors call it.

    Raises TopologyError with all mistakes, in the order of the text.
    """
    try:
        tables = _with_replica_names(tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        raise TopologyError(f"{source}{not_toml(error, text)}") from error
    mistakes: list[tuple[KeyPath, str]] = []
    try:
        topology = Topology.model_validate(tables)
    except ValidationError as error:
        mistakes = problems(error, _known_keys)
        topology = _what_is_right(tables)
    across = across_tables(topology, [names for names, _ in mistakes])
    for line in itertools.chain(across, *(check(topology) for check in checks)):
        mistakes.append((key_path(line), line))
    for name, key, problem in model_problems(topology.models):
        names = "models", name, key
        mistakes.append((names, f"{key_text(*names)}: {problem}"))
    if mistakes:
        raise _error(text, source, mistakes)
    topology._source, topology._text = source, text
    return topology


def _error(text: str, source: str, mistakes: Iterable[tuple[KeyPath, str]]) -> TopologyError:
    """An error of a line for each, with its place in the text where it has one."""
    positions = TomlPositions(text)
    found = [(positions.of(tuple(map(str, names))), line) for names, line in mistakes]
    found.sort(key=lambda each: each[0] or (len(text), 0))
    lines = (
        f"{source}{f':{place.line}:{place.column}' if place else ''}: {line}"
        for place, line in found
    )
    return TopologyError("\n".join(lines))


def _what_is_right(tables: Mapping[str, Any]) -> Topology:
    """The part of a wrong file that can be examined further: see `right_part`."""
    links = tables.get("links")
    known = (links if isinstance(links, list) else ())[: REGIONS_MAX**2]
    return Topology.model_construct(
        regions=right_items(tables.get("regions"), ValidRegionId, RegionTable, REGIONS_MAX),
        links=tuple(right_part(LinkTable, link) for link in known),
        tenants=right_items(tables.get("tenants"), MeshName, TenantTable, TENANTS_MAX),
        models=right_items(tables.get("models"), ValidModelId, ModelTable, MODELS_MAX),
        routing=right_part(RoutingTable, tables.get("routing")),
        auth=right_part(AuthTable, tables.get("auth")),
        nats=right_part(NatsLimits, tables.get("nats")),
        batch=right_part(BatchTable, tables.get("batch")),
    )


def _with_replica_names(tables: dict[str, Any]) -> dict[str, Any]:
    """`replicas = 4` in region us means us-0 … us-3."""
    regions = tables.get("regions")
    if not isinstance(regions, dict):
        return tables
    return tables | {"regions": {name: _named(name, table) for name, table in regions.items()}}


def _named(region: str, table: object) -> object:
    count = table.get("replicas") if isinstance(table, dict) else None
    if not isinstance(table, dict) or type(count) is not int or not 0 <= count <= REPLICAS_MAX:
        return table
    return table | {"replicas": [f"{region}-{number}" for number in range(count)]}


_TABLES: dict[str, type[Table]] = {
    "mesh": MeshTable,
    "nats": NatsLimits,
    "batch": BatchTable,
    "regions": RegionTable,
    "links": LinkTable,
    "tenants": TenantTable,
    "auth": AuthTable,
    "models": ModelTable,
}


def _known_keys(loc: KeyPath) -> Collection[str]:
    if "routing" in loc[:-1]:
        return RoutingTable.model_fields
    if loc[0] == "tenants" and len(loc) > 3:
        return LimitsTable.model_fields
    if "tls" in loc[:-1]:
        return TlsTable.model_fields
    if loc[:2] == ("auth", "jwt") and len(loc) > 2:
        return JwtTable.model_fields
    table = _TABLES[str(loc[0])] if len(loc) > 1 else Topology
    return table.model_fields
