"""One `mesh.toml`: which regions there are, where they listen, and what lies between them.

Regions are joined pairwise: every pair has exactly one link, so there is no hub whose loss parts
the others, and one round-trip time holds between any two. Of a pair, the region whose name comes
first in the alphabet accepts the leaf link and the other solicits it: a rule instead of a setting,
so two operators can't both wait for the other.

All mistakes are reported at once, each with its file, its key and what to do; nothing is repaired
silently. An API key's SHA-256 is in the file instead of the key: a reader of the file can't send
requests in the tenant's name. That holds for keys that were made at random; a slow password hash
would cost every request a hundred times its placement, and protects only short passwords.

Rejected: YAML (its `no` is a boolean) and environment variables per field (a mesh has dozens of
addresses; they belong in one reviewed file).
"""

import hashlib
import itertools
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from infra.address import Address, parse_address
from infra.batch_table import BatchTable, Price, RunnerNames, batch_problems, jetstream_disk_mib
from infra.workers import WORKERS_MAX, crowd_problems, page_problems, pages
from schemas.ids import (
    NAME_PATTERN,
    REGION_ROUTERS_MAX,
    RegionId,
    RouterId,
    ValidRegionId,
    ValidReplicaId,
    ValidRouterId,
)
from schemas.problems import KeyPath, did_you_mean, problem_lines
from schemas.residency import LABELS_MAX, Ground, Label, Labels, checked_labels, ground
from schemas.settings import (
    WHOLE,
    Advice,
    LinkTable,
    ProactiveTable,
    RoutingScope,
    RoutingTable,
    Table,
)

DEFAULT_FILE = Path(__file__).with_name("mesh.toml")
REGIONS_MAX = 32  # a full mesh: n·(n-1)/2 links, each region's server holds n-1
REPLICAS_MAX = 4096  # per region; each is a user of the region's nats-server
ORIGIN_PATTERN = r"^(\*|null|[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+)$"  # as browsers write it
ORIGINS_MAX = 64
BASE_URL_PATTERN = r"^https?://[^\s/?#]+(/[^\s?#]*)?/v1$"
TENANTS_MAX = 4096
KEYS_MAX = 64  # of one tenant
SHA256_PATTERN = r"^[0-9a-f]{64}$"


class TopologyError(ValueError):
    """A mesh.toml that can't be used; the text names file, key and what to do, a line each."""


HostPort = Annotated[
    Address,
    BeforeValidator(parse_address),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^.+:[0-9]{1,5}$",
            "description": "host:port as others dial it.",
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
LabelName = Annotated[Label, Field(pattern=NAME_PATTERN)]
LABEL_LIST = Advice('write a list of labels, like ["eu"]')
LabelList = Annotated[
    tuple[LabelName, ...],
    Field(max_length=LABELS_MAX),
    AfterValidator(checked_labels),
    LABEL_LIST,
]
KeySha256 = Annotated[
    str,
    Field(pattern=SHA256_PATTERN),
    Advice("write the key's SHA-256 in 64 lower-case hex digits, never the key"),
]
Mebibytes = Annotated[int, Field(strict=True, ge=1, le=1 << 20), WHOLE]


class MeshTable(Table):
    """`[mesh]`: what the whole is called."""

    name: MeshName


class NatsLimits(Table):
    """`[nats]`: limits of every region's nats-server."""

    # Long prompts and images pass NATS' default of 1 MiB; larger bodies travel in parts.
    max_payload_mib: Annotated[int, Field(strict=True, ge=1, le=64), WHOLE] = 8
    # What a slow reader may leave unread before the server cuts it off: 8 full messages.
    max_pending_mib: Annotated[int, Field(strict=True, ge=8, le=4096), WHOLE] = 64
    jetstream_memory_mib: Mebibytes = 256
    jetstream_disk_mib: Mebibytes | None = None  # 1024, and what [batch] may take

    @model_validator(mode="after")
    def _room_for_one_message(self) -> Self:
        if self.max_pending_mib < self.max_payload_mib:
            raise ValueError("max_pending_mib must be at least max_payload_mib")
        return self


class RegionTable(Table):
    """`[regions.<name>]`: one failure and latency domain."""

    http: HostPort  # the OpenAI endpoint of the region's router
    nats: HostPort  # client port of its nats-server
    leaf: HostPort  # where its nats-server accepts links from other regions
    endpoint: EndpointUrl | None = None  # base URL for clients, listed in /v1/regions
    location: Degrees | None = None  # [latitude, longitude], for clients that send their own
    monitor: HostPort | None = None  # the nats-server's own HTTP monitoring; off when absent
    replicas: ReplicaNames  # names, or a number N for <region>-0 … <region>-(N-1)
    routers: RouterNames = (RouterId("r1"),)
    # Processes of each router.
    workers: Annotated[int, Field(strict=True, ge=1, le=WORKERS_MAX), WHOLE] = 1
    metrics: HostPort | None = None  # page of a router's first worker; the others' ports follow
    cors_origins: Origins = ()  # pages that may call from a browser; "*" for all
    profile: ProfileFile | None = None  # of its engines: how its agents take offline work
    batch_runners: RunnerNames = ()  # processes that do batch jobs; without any it takes none
    gpu_hour_price: Price | None = None  # in any currency; dearer regions get less offline work
    routing: RoutingTable = RoutingTable()  # what differs here from the mesh's
    residency: LabelList = ()  # labels that it carries
    confined_to: LabelList = ()  # its clients' requests stay where one of these is carried

    def addresses(self) -> Iterator[tuple[str, Address]]:
        """Each address the region listens on, with the key it was written under."""
        for key in ("http", "nats", "leaf", "monitor"):
            address = getattr(self, key)
            if address is not None:
                yield key, address
        for page in pages(self.metrics, self.workers):
            yield "metrics", page


class TenantTable(Table):
    """`[tenants.<name>]`: its prompts share prefixes with no other tenant's, and are computed
    only where one of the labels is carried, whatever their requests hold."""

    key_sha256: Annotated[tuple[KeySha256, ...], Field(min_length=1, max_length=KEYS_MAX)]
    residency: Annotated[  # none: anywhere
        tuple[LabelName, ...],
        Field(min_length=1, max_length=LABELS_MAX),
        AfterValidator(checked_labels),
        LABEL_LIST,
    ] = ()


class KeyHolder(NamedTuple):
    """The tenant of one API key."""

    tenant: str
    residency: Labels


def key_hash(key: str) -> str:
    """What mesh.toml holds for an API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


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
    nats: NatsLimits = NatsLimits()
    batch: BatchTable = BatchTable()
    _source: str = PrivateAttr("")

    def error(self, key: str, problem: str) -> TopologyError:
        """What to raise for a value that is found to be wrong only later."""
        return TopologyError(f"{self._source}: {key}: {problem}")

    def region(self, name: str) -> RegionTable:
        """The region of that name. Raises TopologyError that lists those there are."""
        if name not in self.regions:
            raise TopologyError(f'no region "{name}": there are {", ".join(self.regions)}')
        return self.regions[RegionId(name)]

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
    def keys(self) -> dict[str, KeyHolder]:
        """Each tenant's API keys, by the key's SHA-256."""
        return {
            key: KeyHolder(name, tenant.residency)
            for name, tenant in self.tenants.items()
            for key in tenant.key_sha256
        }

    def _ground(self, known: Collection[RegionId]) -> Ground:
        """The labels of all regions, of those that are not `known` none."""
        carried = {name: table.residency * (name in known) for name, table in self.regions.items()}
        return ground(carried, {name: table.confined_to for name, table in self.regions.items()})

    def _keeps_to_itself(self, region: RegionId) -> bool:
        return self.routing_of(region).topology is RoutingScope.REGION_LOCAL

    def link(self, a: str, b: str) -> LinkTable:
        """The link between two regions, whichever is named first. Raises KeyError if none."""
        for link in self.links:
            if set(link.between) == {a, b}:
                return link
        raise KeyError((a, b))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = [
            *_shared_addresses(self.regions),
            *_repeated_names(self.regions),
            *_wrong_workers(self.regions),
            *_wrong_batch(self.regions, self.nats, self.batch),
            *_wrong_links(self.regions, self.links),
            *_wrong_residency(self.regions, self.tenants),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load(path: Path) -> Topology:
    """Read a mesh.toml. Raises TopologyError: print its text and stop."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise TopologyError(
            f"{path}: can't be read ({reason}); give the path of a mesh.toml, "
            f"for example a copy of {DEFAULT_FILE}"
        ) from error
    return parse(text, str(path))


def parse(text: str, source: str) -> Topology:
    """The topology in a mesh.toml's text; `source` is what errors call it."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TopologyError(f"{source}: not TOML: {error}; correct the file there") from error
    try:
        topology = Topology.model_validate(_with_replica_names(tables))
    except ValidationError as error:
        lines = problem_lines(error, _known_keys)
        raise TopologyError("\n".join(f"{source}: {line}" for line in lines)) from error
    topology._source = source
    return topology


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


def _shared_addresses(regions: Mapping[RegionId, RegionTable]) -> Iterator[str]:
    taken: dict[Address, str] = {}
    for name, region in regions.items():
        for key, address in region.addresses():
            here = f"regions.{name}.{key}"
            if address in taken:
                yield f"{here}: {address} is also {taken[address]}; give each its own port"
            taken.setdefault(address, here)


def _repeated_names(regions: Mapping[RegionId, RegionTable]) -> Iterator[str]:
    for name, region in regions.items():
        for key in ("replicas", "routers", "batch_runners"):
            names = getattr(region, key)
            for repeated in sorted({each for each in names if names.count(each) > 1}):
                yield f'regions.{name}.{key}: "{repeated}" is there twice; remove one'


def _wrong_workers(regions: Mapping[RegionId, RegionTable]) -> Iterator[str]:
    for name, region in regions.items():
        found = (
            crowd_problems(dict.fromkeys(region.routers, region.workers), region.batch_runners),
            page_problems(region.workers, region.metrics),
        )
        for key, problem in itertools.chain(*found):
            yield f"regions.{name}.{key}: {problem}"


def _wrong_batch(
    regions: Mapping[RegionId, RegionTable], nats: NatsLimits, batch: BatchTable
) -> Iterator[str]:
    names = {name: (region.batch_runners, region.routers) for name, region in regions.items()}
    return batch_problems(names, nats.jetstream_disk_mib, batch)


def _wrong_links(
    regions: Mapping[RegionId, RegionTable], links: tuple[LinkTable, ...]
) -> Iterator[str]:
    seen: dict[frozenset[RegionId], int] = {}
    for number, link in enumerate(links):
        here, pair = f"links.{number}", frozenset(link.between)
        for name in sorted(pair - set(regions)):
            yield f'{here}.between: no region "{name}"{did_you_mean(name, regions)}'
        if len(pair) == 1:
            yield f'{here}.between: links "{link.acceptor}" with itself; name two regions'
        if pair in seen:
            yield f"{here}: the same pair as links.{seen[pair]}; remove one"
        seen.setdefault(pair, number)
    for a, b in itertools.combinations(sorted(regions), 2):
        if frozenset((a, b)) not in seen:
            yield (
                f'links: "{a}" and "{b}" are not linked; add [[links]] with '
                f'between = ["{a}", "{b}"] and its rtt_ms (every pair needs one)'
            )


def _wrong_residency(
    regions: Mapping[RegionId, RegionTable], tenants: Mapping[str, TenantTable]
) -> Iterator[str]:
    known = sorted({label for region in regions.values() for label in region.residency})
    for name, region in regions.items():
        for label in sorted(set(region.confined_to) - set(region.residency)):
            yield (
                f'regions.{name}.confined_to: the region itself does not carry "{label}"; '
                "add it to its residency"
            )
    seen: dict[str, str] = {}
    for tenant, table in tenants.items():
        for label in sorted(set(table.residency) - set(known)):
            hint = did_you_mean(label, known)
            yield f'tenants.{tenant}.residency: no region carries "{label}"{hint}'
        for digest in table.key_sha256:
            if digest in seen:
                yield f"tenants.{tenant}.key_sha256: a key of tenants.{seen[digest]}; remove one"
            seen.setdefault(digest, tenant)


_TABLES: dict[str, type[Table]] = {
    "mesh": MeshTable,
    "nats": NatsLimits,
    "batch": BatchTable,
    "regions": RegionTable,
    "links": LinkTable,
    "tenants": TenantTable,
}


def _known_keys(loc: KeyPath) -> Collection[str]:
    if "proactive" in loc[:-1]:
        return ProactiveTable.model_fields
    if "routing" in loc[:-1]:
        return RoutingTable.model_fields
    table = _TABLES[str(loc[0])] if len(loc) > 1 else Topology
    return table.model_fields
