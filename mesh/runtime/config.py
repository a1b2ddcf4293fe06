"""What one router process needs to know; made by the command line, from mesh.toml and options."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from infra.address import Address
from infra.bus import BusAddress
from mesh.adapters.connections import CONNECTIONS_MAX
from mesh.adapters.http_server import HttpTimes
from mesh.adapters.recorder import RecordTo
from mesh.adapters.tenants import Keys
from mesh.core.federation.geo import Location
from mesh.core.settings import RouterSettings
from schemas.ids import RegionId, RouterId


@dataclass(frozen=True, slots=True)
class Entry:
    """How clients come to a region; None for what mesh.toml does not say."""

    endpoint: str | None = None  # base URL
    location: Location | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router of one region."""

    region: RegionId
    router: RouterId
    peers: tuple[RegionId, ...]
    http_host: str
    http_port: int
    shares_port: bool = False  # with other workers of this router: the kernel spreads connections
    metrics: Address | None = None  # a page of this process's own, besides
    by_option: frozenset[str] = frozenset()  # of these two, what mesh.toml did not say: for errors
    connections_max: int = CONNECTIONS_MAX  # of clients
    cors_origins: tuple[str, ...] = ()  # pages of these may call; "*" for every one
    http_times: HttpTimes = field(default_factory=HttpTimes)
    bus: BusAddress
    settings: RouterSettings
    hash_key: str  # of prompt block hashes; equal in all regions, or sketches mean nothing
    epoch: int  # differs at every start
    seed: int
    drain_s: float = 30.0  # for requests under way when asked to stop
    record: RecordTo | None = None
    entries: Mapping[RegionId, Entry] = field(default_factory=dict)
    keys: Keys = field(default_factory=dict)  # by the SHA-256 of the API key
