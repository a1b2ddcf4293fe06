"""The configuration of one router process, made from mesh.toml and a command line.

Settings come from the command line, else from the region's `[routing]`, else from the mesh's, else
from the defaults of `RouterSettings`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.address import Address
from infra.auth_table import AuthTable
from infra.batch_table import BatchTable
from infra.bus import BusAddress
from infra.tenant_table import TenantTable
from infra.topology import Topology
from mesh.adapters.access_log import AccessLogFormat
from mesh.adapters.ended_requests import KEPT
from mesh.adapters.recorder import RecordTo
from mesh.adapters.tail_rule import SlowLimits
from mesh.core.model.geo import GeoLocation
from mesh.core.model.model_targets import ModelRule
from mesh.core.model.settings import RouterSettings
from mesh.http.callers import ApiKeys
from mesh.http.server import CONNECTIONS_MAX, HttpTimes
from mesh.http.tls import ServerTls
from mesh.runtime.mesh_file import region_problems
from schemas.ids import RegionId, RouterId
from schemas.settings import ContinueStreams, RoutingTable

NOTHING_GIVEN = RoutingTable()


@dataclass(frozen=True, slots=True)
class RegionEntry:
    """How clients reach a region; None where mesh.toml does not say."""

    endpoint: str | None = None  # base URL
    location: GeoLocation | None = None


@dataclass(frozen=True, slots=True)
class BatchAccess:
    """The region's store of files and batches."""

    address: BusAddress  # with the login of its account
    limits: BatchTable


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router of one region."""

    region: RegionId
    router: RouterId
    peers: tuple[RegionId, ...]
    http_host: str
    http_port: int
    shares_port: bool = False  # with other workers of this router
    workers: int = 1  # that this router has
    metrics: Address | None = None  # of a page of this process alone
    console: Address | None = None  # as mesh.toml has it, where no option does
    by_option: frozenset[str] = frozenset()  # of `http` and `metrics`, those given by options
    connections_max: int = CONNECTIONS_MAX  # of clients
    cors_origins: tuple[str, ...] = ()  # whose pages may call; "*" for all
    routes: tuple[str, ...] = ()  # of engines, beside those known, that clients may call
    http_times: HttpTimes = field(default_factory=HttpTimes)
    tls: ServerTls | None = None  # to serve https with
    bus: BusAddress
    bus_servers: int = 1  # that the region has; `bus` may name fewer
    settings: RouterSettings
    hash_key: str  # of prompt block hashes; equal in all regions, or sketches mean nothing
    epoch: int  # differs at every start
    seed: int
    sse_keep_alive_s: float = 10.0  # how long a stream may be silent; 0 for as long as it is
    drain_s: float = 30.0  # for open requests after a request to stop
    record: RecordTo | None = None
    access_log: AccessLogFormat = AccessLogFormat.OFF
    requests_kept: int = KEPT  # that have ended, for `mesh explain`
    slow: SlowLimits = field(default_factory=SlowLimits)  # such requests are traced
    entries: Mapping[RegionId, RegionEntry] = field(default_factory=dict)
    keys: ApiKeys = field(default_factory=dict)  # by the SHA-256 of the API key
    tenants: Mapping[str, TenantTable] = field(default_factory=dict)  # as mesh.toml has them
    auth: AuthTable = field(default_factory=AuthTable)
    batch: BatchAccess | None = None  # where the region has batch runners

    @property
    def url(self) -> str:
        """Where it serves clients."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{Address(self.http_host, self.http_port)}"


def router_settings(
    topology: Topology,
    region: RegionId,
    given: RoutingTable = NOTHING_GIVEN,
    **others: Any,
) -> RouterSettings:
    """The settings of a region's routers. `given`: the command line's choices; its policy holds for
    all classes of requests. `others` are settings by their names.

    Raises TopologyError that names the key of an unknown policy, ValueError for other mistakes.
    """
    chosen = given.over(topology.routing_of(region))
    if given.policy is not None:
        chosen = chosen.model_copy(update={"policy_by_priority": {}})
    for key, problem in region_problems(topology, region, chosen):
        raise topology.error(key, problem)
    others["models"] = model_rules(topology)
    others["tenant_weights"] = tuple(
        (name, tenant.weight) for name, tenant in topology.tenants.items() if tenant.weight != 1.0
    )
    others["links"] = tuple(
        (peer, topology.link(region, peer).bytes_per_s) for peer in topology.peers(region)
    )
    if topology.ground.labels:
        others["ground"] = topology.ground_for(region)
    return RouterSettings(**chosen.as_settings() | others)


def model_rules(topology: Topology) -> tuple[ModelRule, ...]:
    """What mesh.toml says of single models."""
    return tuple(
        ModelRule(
            name=name,
            to=tuple((table.to or {}).items()),
            shadow=tuple(table.shadow.items()),
            slo_ttft_s=None if table.slo_ttft_ms is None else table.slo_ttft_ms / 1000,
            policy=table.policy,
            queue_delay_s_max=table.queue_delay_s_max,
            hold_max=table.hold_max,
            continue_streams=table.continue_streams or ContinueStreams.EXACT,
        )
        for name, table in topology.models.items()
    )


def region_entries(topology: Topology) -> dict[RegionId, RegionEntry]:
    """How clients reach each region."""
    return {
        name: RegionEntry(region.endpoint, region.location and GeoLocation(*region.location))
        for name, region in topology.regions.items()
    }
