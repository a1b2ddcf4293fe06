"""One world: regions with routers and replicas, their network, their clients, their faults.

The fleet is up before the first client sends a request: heartbeats have arrived, digests are
exchanged and round trips measured. The world ends when every request has ended and no agent holds
one, so that a leak in any table shows.

`run` returns a report with the fields of `mesh replay`'s out file. A twin adds:

- `decisions`, `decisions_per_s`: requests that routers decided on, and that number over the
  seconds spent in `RouterCore.handle` for it by the clock `perf`; null without one.
- `gpu_busy_s`: seconds in which an engine had a batch, summed over replicas, warm-up included.
- `batch_occupancy`: how full batches were while engines were busy (`mesh.sim.engine`).
- `forwarded`: requests that a replica of a peer region answered.
- `trie_bytes_per_s`: prefix gossip over each link's directions, `us>eu`, over the whole run.
- `warm_ups`: prefix warm-ups of all routers that are up.
- `digest`: a hash of every request's end. Equal digests, equal runs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random

from agents.sim.profiles import Profile
from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.policies import PolicyMakers
from mesh.core.router import RouterCore
from mesh.replay.report import RunReport
from mesh.sim import faults as fault
from mesh.sim.clients import SimClients
from mesh.sim.config import WorldConfig
from mesh.sim.engine import ReplicaEngine
from mesh.sim.event_queue import EventQueue
from mesh.sim.lease_streams import LeaseStreams
from mesh.sim.network import Network
from mesh.sim.place import Meter, Surroundings
from mesh.sim.pulse import Pulse
from mesh.sim.replica import SimReplica
from mesh.sim.request_log import OnRequestEnd, RequestLog
from mesh.sim.router import ROUTER, SimRouter
from mesh.sim.trie_links import TrieLinks
from mesh.sim.workload import Workload
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.state import Digest

ROUTERS_FROM_S = 1.0  # agents are up by then
SETTLE_S = 2.5  # then a ping and a digest have crossed the widest table
WORK_LEFT_S_MAX = 30.0  # for agents to end their answers when no client waits any more
PROGRESS_S = 1.0  # virtual


class World:
    """Call `run` once; tests and reports read the attributes."""

    def __init__(
        self,
        workload: Workload,
        config: WorldConfig,
        *,
        perf: Callable[[], float] | None = None,
        makers: Callable[["World"], PolicyMakers] | None = None,
    ) -> None:
        """`perf`: a clock to measure decisions by, or None.

        `makers`: makes policies that may see the whole world.
        """
        self.config = config
        self.queue = EventQueue()
        self.meter = Meter(perf)
        self._makers = makers
        self._inside = 0  # answers that agents hold
        self.network = Network(
            self.queue,
            config.rtt,
            self.dice("network"),
            jitter_s=config.jitter_s,
            loss=config.loss,
        )
        self.replicas: dict[ReplicaId, SimReplica] = {}
        self.routers: dict[RegionId, SimRouter] = {}  # the first of each region
        self.region_routers: dict[RegionId, list[SimRouter]] = {}  # all
        self._pulses: dict[Origin, Pulse] = {}
        self._epochs: dict[Origin, int] = {}
        regions = list(config.regions)
        self.requests = RequestLog(regions, self.dice("samples"), SETTLE_S + config.warmup_s)
        self.trie_links = TrieLinks(self.network, self.region_routers, config.shape)
        self.leases = LeaseStreams(
            self.queue,
            self.network,
            self.region_routers,
            config.shape,
            lambda origin: self._pulses[origin].say_alive(),
        )
        self._add_routers()
        for region, fleet in config.profiles().items():
            for number, profile in enumerate(fleet):
                self._add_replica(region, number, profile)
        self._add_pulses()
        self.clients = SimClients(
            workload,
            self.queue,
            self.network,
            {region: self.region_routers[config.shape.router_of(region)] for region in regions},
            self.requests,
            self.dice("clients"),
            timeout_s=config.timeout_s,
            token_error=config.token_error,
            is_quiet=self._all_answered,
        )

    def dice(self, name: str) -> Random:
        """A random generator for one part of the world, independent of others' draws."""
        return Random(f"{self.config.seed} {name}")

    def run(self, progress: Callable[[int, float], None] | None = None) -> None:
        """Play to the end. `progress`: requests ended, virtual seconds."""
        phases = self.dice("phases")
        for replica in self.replicas.values():
            self.queue.at(phases.uniform(0.0, self.config.reading_s), replica.start)
        for router in self.all_routers():
            self.queue.at(ROUTERS_FROM_S + phases.uniform(0.0, 0.1), self.open_router, router)
        self.queue.at(SETTLE_S, self.clients.begin)
        for trouble in self.config.faults:
            self._schedule(trouble)
        if self.config.until_s < inf:
            self.queue.at(SETTLE_S + self.config.until_s, self._end)
        if progress is not None:
            self.queue.at(SETTLE_S, self._report_progress, progress)
        self.queue.run()

    def open_router(self, router: SimRouter) -> None:
        """Start or restart a router."""
        origin = Origin(router.site, router.name)
        epoch = self._epochs[origin] = self._epochs.get(origin, 0) + 1
        name = router.site if router.name == ROUTER else f"{router.site} {router.name}"
        router.open(
            RouterCore(
                region=router.site,
                router=router.name,
                epoch=epoch,
                settings=self.config.router_settings(),
                dice=self.dice(f"router {name} {epoch}"),
                makers=None if self._makers is None else self._makers(self),
                peers=self.config.shape.peers_of(router.site, self.routers),
            )
        )
        self._pulses[origin].begin(epoch)

    def all_routers(self) -> list[SimRouter]:
        """The routers of all regions."""
        return [router for routers in self.region_routers.values() for router in routers]

    # Building.

    def _add_routers(self) -> None:
        shape, config, around = self.config.shape, self.config, self._surroundings()
        for site in dict.fromkeys(shape.router_of(region) for region in config.regions):
            self.region_routers[site] = [
                SimRouter(site, self.queue, self.network, around, RouterId(f"r{number}"))
                for number in range(1, config.routers + 1)
            ]
            self.routers[site] = self.region_routers[site][0]

    def _surroundings(self) -> Surroundings:
        """The parts of this world that every router uses."""
        return Surroundings(
            replicas=self.replicas,
            routers=self.region_routers,
            first_byte=lambda ask: self.clients.first_byte(ask),
            answered=lambda ask, answered: self.clients.answered(ask, answered),
            publish=self._publish,
            gossip=lambda origin: (
                self.trie_links.performers(origin) | self.leases.performers(origin)
            ),
            request_s=self.config.settings.request_s_max,
            pick=self.dice("queue groups").randrange,
            meter=self.meter,
        )

    def _add_replica(self, region: RegionId, number: int, profile: Profile) -> None:
        name = ReplicaId(f"{region}-{number + 1}")
        self.replicas[name] = SimReplica(
            name,
            region,
            self.config,
            ReplicaEngine(profile, lambda: self.queue.now, self.config.kv_tokens),
            self.queue,
            self.network,
            self.region_routers[self.config.shape.router_of(region)],
            self._count_inside,
            self.leases.adopters_of,
        )

    def _add_pulses(self) -> None:
        gap_s = 0.0 if self.config.news_at_once else self.config.router_settings().digest_s
        fleet = list(self.replicas.values())
        for router in self.all_routers():
            peers = self.config.shape.peers_of(router.site, self.region_routers)
            self._pulses[Origin(router.site, router.name)] = Pulse(
                router,
                [one for peer in peers for one in self.region_routers[peer]],
                fleet,
                self.queue,
                self.network,
                gap_s,
                self.leases.was_adopted,
            )

    def _publish(self, origin: Origin, digest: Digest) -> None:
        self._pulses[origin].publish(digest)

    # Ending.

    def _count_inside(self, more: int) -> None:
        self._inside += more
        if self._inside == 0 and self.clients.quiet:
            self.queue.stop()

    def _all_answered(self) -> None:
        if self._inside == 0:
            self.queue.stop()
        else:
            self.queue.after(WORK_LEFT_S_MAX, self.queue.stop)

    def _end(self) -> None:
        self.clients.give_up()
        self.queue.stop()

    def _report_progress(self, progress: Callable[[int, float], None]) -> None:
        progress(self.requests.ended, self.queue.now - SETTLE_S)
        self.queue.after(PROGRESS_S, self._report_progress, progress)

    # Faults.

    def _schedule(self, trouble: fault.SimFault) -> None:
        begin, end = self._actions(trouble)
        self.queue.at(SETTLE_S + trouble.at_s, begin)
        if trouble.until_s < inf:
            self.queue.at(SETTLE_S + trouble.until_s, end)

    def _actions(self, trouble: fault.SimFault) -> tuple[Callable[[], None], Callable[[], None]]:
        """The calls that begin and end a fault."""
        if isinstance(trouble, fault.Cut):
            ends = trouble.one, trouble.other
            return partial(self.network.cut, *ends), partial(self.network.heal, *ends)
        if isinstance(trouble, fault.RouterCrash):
            routers = self.region_routers[trouble.region]
            return partial(_each, routers, SimRouter.crash), partial(
                _each, routers, self.open_router
            )
        if isinstance(trouble, fault.RegionFault):
            region = trouble.region
            return partial(self.leases.stop, region), partial(self.leases.resume, region)
        replica = self.replicas[trouble.replica]
        if isinstance(trouble, fault.ReplicaCrash):
            return replica.crash, replica.restart
        if isinstance(trouble, fault.EngineCrash):
            return replica.crash_engine, replica.engine.restart
        rate = 1.0 / trouble.factor if isinstance(trouble, fault.EngineSlow) else 0.0
        return partial(replica.set_rate, rate), partial(replica.set_rate, 1.0)


def _each(routers: Sequence[SimRouter], act: Callable[[SimRouter], None]) -> None:
    for router in routers:
        act(router)


def run(
    workload: Workload,
    config: WorldConfig,
    *,
    progress: Callable[[int, float], None] | None = None,
    perf: Callable[[], float] | None = None,
    makers: Callable[[World], PolicyMakers] | None = None,
    watch: OnRequestEnd | None = None,
) -> RunReport:
    """Play a workload in a twin to its end.

    `progress` is called with requests ended and virtual seconds, once a virtual second. `perf` is a
    wall clock (`time.perf_counter`); all else in the report is the same in every run. `makers`:
    policies that may see the whole world, for a bound that no router could reach. `watch` is called
    with every reported end and the world's time.
    """
    world = World(workload, config, perf=perf, makers=makers)
    world.requests.watch = watch
    world.run(progress)
    return report(world, workload)


def report(world: World, workload: Workload) -> RunReport:
    """The report of a finished world."""
    requests, meter, config = world.requests, world.meter, world.config
    assert requests.asked == requests.ended, "a request was lost or counted twice"
    engines = [replica.engine for replica in world.replicas.values()]
    samples = sum(engine.occupancy_samples for engine in engines)
    occupancy = sum(engine.occupancy_sum for engine in engines)
    return requests.report(
        {
            "decisions": meter.decisions,
            "decisions_per_s": meter.decisions / meter.seconds if meter.seconds else None,
            "gpu_busy_s": sum(engine.busy_s for engine in engines),
            "batch_occupancy": occupancy / samples if samples else None,
            "forwarded": requests.forwarded,
            "trie_bytes_per_s": {
                f"{source}>{to}": sent / world.queue.now
                for (source, to), sent in sorted(world.trie_links.sent_bytes.items())
            },
            "warm_ups": _warm_ups(world),
            "digest": requests.digest(),
            "policy": config.settings.policy,
            "topology": config.topology,
            "pushing": str(config.settings.pushing),
            "seed": config.seed,
            "replicas": {region: len(fleet) for region, fleet in config.regions.items()},
            "workload": {"name": workload.name, **workload.facts},
        }
    )


def _warm_ups(world: World) -> dict[str, float]:
    """Sums over all routers that are up."""
    found = [
        router.core.warming
        for routers in world.region_routers.values()
        for router in routers
        if router.core
    ]
    counts = ("begun", "ended", "stopped", "failed", "guests")
    return {
        **{name: sum(getattr(one.counts, name) for one in found) for name in counts},
        "tokens": sum(one.tokens for one in found),
        "idle_s": sum(one.budget.idle_s for one in found),
        "spent_s": sum(one.budget.spent_s for one in found),
    }
