"""One `mesh.toml`: which regions there are, where they listen, and what lies between them.

Regions are joined pairwise: every pair has exactly one link, so there is no hub whose loss parts
the others, and one round-trip time holds between any two. Of a pair, the region whose name comes
first in the alphabet accepts the leaf link and the other solicits it: a rule instead of a setting,
so two operators can't both wait for the other.

Every mistake is reported with its file, its key and what to do, and all at once; nothing is
repaired silently. Rejected: YAML (its `no` is a boolean) and environment variables per field
(a mesh has dozens of addresses; they belong in one reviewed file).
"""

import itertools
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from infra import residency
from infra.address import Address, parse_address
from infra.config_problems import Location, problem_lines
from infra.residency import KeyHolder, LabelList, Tenant
from infra.routing import Proactive, Routing, Shape
from infra.table import Table
from infra.workers import WORKERS_MAX, crowd_problems, page_problems, pages
from schemas.ids import REGION_ROUTERS_MAX, RegionId, ReplicaId, RouterId, checked_name
from schemas.near_words import did_you_mean
from schemas.residency import Ground

DEFAULT_FILE = Path(__file__).with_name("mesh.toml")
REGIONS_MAX = 32  # a full mesh: n·(n-1)/2 links, each region's server holds n-1
REPLICAS_MAX = 4096  # per region; each is a user of the region's nats-server
RTT_MS_MAX = 10_000.0
ORIGIN_PATTERN = r"^(\*|null|[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+)$"  # as browsers write it
ORIGINS_MAX = 64
BASE_URL_PATTERN = r"^https?://[^\s/?#]+(/[^\s?#]*)?/v1$"


class TopologyError(ValueError):
    """A mesh.toml that can't be used; the text names file, key and what to do, a line each."""


def _name(kind: str) -> BeforeValidator:
    def check(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"write the {kind}'s name in quotes")
        return checked_name(kind, value)

    return BeforeValidator(check)


def _listed(expected: str, *, at_least: int = 0) -> BeforeValidator:
    def check(value: object) -> object:
        if not isinstance(value, list | tuple) or len(value) < at_least:
            raise ValueError(f"write {expected}")
        return value

    return BeforeValidator(check)


def _pair(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError('write two region names, like ["eu", "us"]')
    return value


def _base_url(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(BASE_URL_PATTERN, value):
        raise ValueError('write the URL that clients use, like "https://us.example.com/v1"')
    return value


def _origin(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(ORIGIN_PATTERN, value):
        raise ValueError('write an origin without a path, like "https://app.example.com", or "*"')
    return value


def _degrees(value: object) -> object:
    numbers = isinstance(value, list | tuple) and all(type(each) in (int, float) for each in value)
    if not numbers or len(value) != 2:  # type: ignore[arg-type]
        raise ValueError("write latitude and longitude in degrees, like [38.9, -77.5]")
    return value


RegionName = Annotated[RegionId, _name("region")]
ReplicaName = Annotated[ReplicaId, _name("replica")]
RouterName = Annotated[RouterId, _name("router")]
TenantName = Annotated[str, _name("tenant")]
HostPort = Annotated[Address, BeforeValidator(parse_address)]
Endpoint = Annotated[
    str,
    BeforeValidator(_base_url),
    WithJsonSchema({"type": "string", "pattern": BASE_URL_PATTERN}),
]
Degrees = Annotated[
    tuple[
        Annotated[float, Field(ge=-90, le=90, allow_inf_nan=False)],
        Annotated[float, Field(ge=-180, le=180, allow_inf_nan=False)],
    ],
    BeforeValidator(_degrees),
]
Replicas = Annotated[
    tuple[ReplicaName, ...],
    Field(max_length=REPLICAS_MAX),
    _listed(f"a number from 0 to {REPLICAS_MAX}, or a list of names"),
]
Routers = Annotated[
    tuple[RouterName, ...],
    Field(max_length=REGION_ROUTERS_MAX),
    _listed('a list of one name or more, like ["r1"]', at_least=1),
]
Origins = Annotated[
    tuple[
        Annotated[
            str,
            BeforeValidator(_origin),
            WithJsonSchema({"type": "string", "pattern": ORIGIN_PATTERN}),
        ],
        ...,
    ],
    Field(max_length=ORIGINS_MAX),
    _listed('a list of origins, like ["https://app.example.com"], or ["*"]'),
]
Mebibytes = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]


class Mesh(Table):
    """`[mesh]`: what the whole is called."""

    name: Annotated[str, _name("mesh")]


class NatsLimits(Table):
    """`[nats]`: limits of every region's nats-server."""

    # Long prompts and images pass NATS' default of 1 MiB; larger bodies travel in parts.
    max_payload_mib: Annotated[int, Field(strict=True, ge=1, le=64)] = 8
    # What a slow reader may leave unread before the server cuts it off: 8 full messages.
    max_pending_mib: Annotated[int, Field(strict=True, ge=8, le=4096)] = 64
    jetstream_memory_mib: Mebibytes = 256
    jetstream_disk_mib: Mebibytes = 1024

    @model_validator(mode="after")
    def _room_for_one_message(self) -> Self:
        if self.max_pending_mib < self.max_payload_mib:
            raise ValueError("max_pending_mib must be at least max_payload_mib")
        return self


class Region(Table):
    """`[regions.<name>]`: one failure and latency domain."""

    http: HostPort  # the OpenAI endpoint of the region's router
    nats: HostPort  # client port of its nats-server
    leaf: HostPort  # where its nats-server accepts links from other regions
    endpoint: Endpoint | None = None  # base URL for clients, told to them in /v1/regions
    location: Degrees | None = None  # [latitude, longitude], for clients that say where they are
    monitor: HostPort | None = None  # the nats-server's own HTTP monitoring; off when absent
    replicas: Replicas  # names, or a number N for <region>-0 … <region>-(N-1)
    routers: Routers = (RouterId("r1"),)
    workers: Annotated[int, Field(strict=True, ge=1, le=WORKERS_MAX)] = 1  # processes of a router
    metrics: HostPort | None = None  # page of a router's first worker; the others' ports follow
    cors_origins: Origins = ()  # pages that may call from a browser; "*" for all
    routing: Routing = Routing()  # what differs here from the mesh's
    residency: LabelList = ()  # labels that its ground carries
    confined_to: LabelList = ()  # nothing that enters here goes where none of these is carried

    def addresses(self) -> Iterator[tuple[str, Address]]:
        """Each address the region listens on, with the key it was written under."""
        for key in ("http", "nats", "leaf", "monitor"):
            address = getattr(self, key)
            if address is not None:
                yield key, address
        for page in pages(self.metrics, self.workers):
            yield "metrics", page


class Link(Table):
    """`[[links]]`: two regions and the round trip between them."""

    between: Annotated[tuple[RegionName, RegionName], BeforeValidator(_pair)]
    rtt_ms: Annotated[float, Field(strict=True, ge=0, le=RTT_MS_MAX)]

    @property
    def acceptor(self) -> RegionId:
        """The region whose nats-server listens for this link."""
        return min(self.between)

    @property
    def solicitor(self) -> RegionId:
        """The region whose nats-server dials, and dials again after a cut."""
        return max(self.between)

    @property
    def rtt_s(self) -> float:
        """Round-trip time in seconds."""
        return self.rtt_ms / 1000


class Topology(Table):
    """A whole mesh.toml. Make one with `load` or `parse`: their errors are meant to be read."""

    mesh: Mesh
    regions: Annotated[dict[RegionName, Region], Field(min_length=1, max_length=REGIONS_MAX)]
    links: tuple[Link, ...] = ()
    routing: Routing = Routing()
    tenants: Annotated[dict[TenantName, Tenant], Field(max_length=residency.TENANTS_MAX)] = Field(
        default_factory=dict
    )
    nats: NatsLimits = NatsLimits()
    _source: str = PrivateAttr("")

    def error(self, key: str, problem: str) -> TopologyError:
        """What to raise for a value that is found to be wrong only later."""
        return TopologyError(f"{self._source}: {key}: {problem}")

    def region(self, name: str) -> Region:
        """The region of that name. Raises TopologyError that lists those there are."""
        if name not in self.regions:
            raise TopologyError(f'no region "{name}": there are {", ".join(self.regions)}')
        return self.regions[RegionId(name)]

    def peers(self, region: str) -> tuple[RegionId, ...]:
        """Every other region, by name."""
        return tuple(sorted(name for name in self.regions if name != region))

    def routing_of(self, region: RegionId) -> Routing:
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
        return residency.ground_of(self.regions, self.regions)

    def ground_for(self, region: RegionId) -> Ground:
        """The same as that region's routers see it: who isn't asked carries nothing for them."""
        return residency.ground_of(self.regions, (region, *self.asked_by(region)))

    @property
    def keys(self) -> dict[str, KeyHolder]:
        """Each tenant's API keys, by the key's SHA-256."""
        return {
            key: KeyHolder(name, tenant.residency)
            for name, tenant in self.tenants.items()
            for key in tenant.key_sha256
        }

    def _keeps_to_itself(self, region: RegionId) -> bool:
        return self.routing_of(region).topology is Shape.REGION_LOCAL

    def link(self, a: str, b: str) -> Link:
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
            *_wrong_links(self.regions, self.links),
            *residency.problems(self.regions, self.tenants),
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
    """`replicas = 4` in region us stands for us-0 … us-3."""
    regions = tables.get("regions")
    if not isinstance(regions, dict):
        return tables
    return tables | {"regions": {name: _named(name, table) for name, table in regions.items()}}


def _named(region: str, table: object) -> object:
    count = table.get("replicas") if isinstance(table, dict) else None
    if not isinstance(table, dict) or type(count) is not int or not 0 <= count <= REPLICAS_MAX:
        return table
    return table | {"replicas": [f"{region}-{number}" for number in range(count)]}


def _shared_addresses(regions: Mapping[RegionId, Region]) -> Iterator[str]:
    taken: dict[Address, str] = {}
    for name, region in regions.items():
        for key, address in region.addresses():
            here = f"regions.{name}.{key}"
            if address in taken:
                yield f"{here}: {address} is also {taken[address]}; give each its own port"
            taken.setdefault(address, here)


def _repeated_names(regions: Mapping[RegionId, Region]) -> Iterator[str]:
    for name, region in regions.items():
        for key, names in (("replicas", region.replicas), ("routers", region.routers)):
            for repeated in sorted({each for each in names if names.count(each) > 1}):
                yield f'regions.{name}.{key}: "{repeated}" stands there twice; remove one'


def _wrong_workers(regions: Mapping[RegionId, Region]) -> Iterator[str]:
    for name, region in regions.items():
        found = (
            crowd_problems(dict.fromkeys(region.routers, region.workers)),
            page_problems(region.workers, region.metrics),
        )
        for key, problem in itertools.chain(*found):
            yield f"regions.{name}.{key}: {problem}"


def _wrong_links(regions: Mapping[RegionId, Region], links: tuple[Link, ...]) -> Iterator[str]:
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


_TABLES: dict[str, type[Table]] = {
    "mesh": Mesh,
    "nats": NatsLimits,
    "regions": Region,
    "links": Link,
    "tenants": Tenant,
}


def _known_keys(loc: Location) -> Collection[str]:
    if "proactive" in loc[:-1]:
        return Proactive.model_fields
    if "routing" in loc[:-1]:
        return Routing.model_fields
    table = _TABLES[str(loc[0])] if len(loc) > 1 else Topology
    return table.model_fields
