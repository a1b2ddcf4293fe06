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
- `offline`: batch jobs, if there are any (`mesh.sim.offline.report`).
- `adapter_loads`: loads of LoRA adapters, of all engines, if there are adapters.
- `digest`: a hash of every request's end. Equal digests, equal runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Any

from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.model import effects as fx
from mesh.core.policies import PolicyMakers
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from mesh.replay.report import RunReport
from mesh.sim.clients import OnRequestEnd, RequestLog, SimClients
from mesh.sim.config import (
    ROUTER,
    Cut,
    EngineCrash,
    EngineSlow,
    RegionFault,
    ReplicaCrash,
    RouterCrash,
    RunnerCrash,
    SimFault,
    WorldConfig,
)
from mesh.sim.control_plane import LeaseStreams, PrefixGossip, RouterTimers
from mesh.sim.engine import SCRAPE_EVERY_S
from mesh.sim.event_queue import EventQueue
from mesh.sim.network import Network
from mesh.sim.offline.config import NONE as NO_OFFLINE
from mesh.sim.offline.report import offline_report
from mesh.sim.offline.runner import SimBatchRunner
from mesh.sim.offline.work import OfflineWork
from mesh.sim.replica import SimReplica
from mesh.sim.router import SimRouter
from mesh.sim.session_host import SessionHost
from mesh.sim.workload import Workload
from schemas.held import HeldAsk
from schemas.ids import RegionId, ReplicaId, RouterId

ROUTERS_FROM_S = 1.0  # agents are up by then
SETTLE_S = 2.5  # then a ping and a digest have crossed the widest table
WORK_LEFT_S_MAX = 30.0  # for agents to end their answers when no client waits any more
PROGRESS_S = 1.0  # virtual

Action = Callable[[], None]


@dataclass(slots=True)
class DecisionMeter:
    """What deciding costs: the seconds `handle` took for requests, by a clock from outside."""

    clock: Callable[[], float] | None = None
    decisions: int = 0
    seconds: float = 0.0


class World:
    """Call `run` once; its parts, tests and reports read the attributes."""

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
        self.meter = DecisionMeter(perf)
        self._makers = makers
        self._outstanding = 0  # answers that agents hold
        # Called with the tokens of each prompt, those predicted and those found to be cached.
        self.watch_cached: Callable[[int, int, int], None] | None = None
        self._pick = self.dice("queue groups").randrange
        self.network = Network(
            self.queue,
            config.rtt,
            self.dice("network"),
            jitter_s=config.jitter_s,
            loss=config.loss,
        )
        self.gossip = PrefixGossip(self)
        self.leases = LeaseStreams(self)
        self._epochs: dict[Origin, int] = {}
        sites = dict.fromkeys(map(config.shape.router_of, config.regions))
        names = [RouterId(f"r{number}") for number in range(1, config.routers + 1)]
        self.region_routers = {
            site: [SimRouter(self, site, name) for name in names] for site in sites
        }
        self.routers = {site: routers[0] for site, routers in self.region_routers.items()}
        self.replicas = {
            name: SimReplica(self, name, region, profile)
            for region, fleet in config.profiles().items()
            for number, profile in enumerate(fleet, 1)
            for name in (ReplicaId(f"{region}-{number}"),)
        }
        gap_s = 0.0 if config.state_at_once else config.router_settings().digest_s
        self.timers = {
            router.origin: RouterTimers(self, router, gap_s) for router in self.all_routers()
        }
        regions = list(config.regions)
        self.requests = RequestLog(regions, self.dice("samples"), SETTLE_S + config.warmup_s)
        self.clients = SimClients(self, workload)
        offline = config.offline
        self.offline: OfflineWork | None = None
        if offline is not None and offline.scope != NO_OFFLINE:
            self.offline = OfflineWork(self, offline)

    def dice(self, name: str) -> Random:
        """A random generator for one part of the world, independent of others' draws."""
        return Random(f"{self.config.seed} {name}")

    def run(self, progress: Callable[[int, float], None] | None = None) -> None:
        """Play to the end. `progress`: requests ended, virtual seconds."""
        phases = self.dice("phases")
        for replica in self.replicas.values():
            self.queue.at(phases.uniform(0.0, SCRAPE_EVERY_S), replica.start)
        for router in self.all_routers():
            self.queue.at(ROUTERS_FROM_S + phases.uniform(0.0, 0.1), self.open_router, router)
        self.queue.at(SETTLE_S, self.clients.begin)
        if self.offline is not None:
            self.offline.begin(ROUTERS_FROM_S, SETTLE_S)
        for fault in self.config.faults:
            self._schedule(fault)
        if self.config.until_s < inf:
            self.queue.at(SETTLE_S + self.config.until_s, self._end)
        if progress is not None:
            self.queue.at(SETTLE_S, self._report_progress, progress)
        self.queue.run()

    def open_router(self, router: SimRouter) -> None:
        """Start or restart a router."""
        origin = router.origin
        epoch = self._epochs[origin] = self._epochs.get(origin, 0) + 1
        name = router.site if router.name == ROUTER else f"{router.site} {router.name}"
        router.open(
            RouterCore(
                RouterState(
                    region=router.site,
                    router=router.name,
                    epoch=epoch,
                    settings=self.config.router_settings(),
                    dice=self.dice(f"router {name} {epoch}"),
                    makers=None if self._makers is None else self._makers(self),
                    peers=self.peers_of(router.site),
                )
            )
        )
        self.timers[origin].begin(epoch)

    def all_routers(self) -> list[SimRouter]:
        return [router for routers in self.region_routers.values() for router in routers]

    def peers_of(self, region: RegionId) -> tuple[RegionId, ...]:
        """The regions whose routers are peers of this one's."""
        return self.config.shape.peers_of(region, self.region_routers)

    def router(self, origin: Origin) -> SimRouter:
        [found] = [one for one in self.region_routers[origin.region] if one.name == origin.router]
        return found

    def host(self, origin: Origin) -> SessionHost:
        """The router or batch runner with that name: an inbox says it."""
        for runner in self.runners_of(origin.region):
            if runner.name == origin.router:
                return runner
        return self.router(origin)

    def runners_of(self, region: RegionId) -> Sequence[SimBatchRunner]:
        """The batch runners of a region whose routers are its own; none without offline work."""
        return () if self.offline is None else self.offline.runners[region]

    def given_back(self, *, begun: bool) -> None:
        """An agent has given a line back for online requests; `begun`: its engine had it."""
        if self.offline is not None:
            self.offline.preempted += begun
            self.offline.given_back += not begun

    def pick_router(self, region: RegionId) -> SimRouter:
        """One of the region's routers, as a queue group would choose; a crashed one if all are."""
        routers = self.region_routers[region]
        living = [router for router in routers if router.is_up] or routers
        return living[self._pick(len(living))]

    def _ask_held(self, router: SimRouter, effect: fx.AskHeld) -> None:
        replica = self.replicas[effect.replica]
        ask = HeldAsk(effect.epoch)
        self.network.send_state(router.site, replica.site, replica.receive_held_ask, ask)

    def control_performers(self, router: SimRouter) -> dict[type, Callable[[Any], None]]:
        """How those effects of a router are performed that are about no request."""
        origin = router.origin
        return {
            fx.PublishDigest: lambda effect: self.timers[origin].digests.offer(effect.digest),
            **self.gossip.performers(origin),
            **self.leases.performers(origin),
            fx.AskHeld: partial(self._ask_held, router),
        }

    # Ending.

    def count_outstanding(self, more: int) -> None:
        """Agents hold so many answers more, or fewer."""
        self._outstanding += more
        if self._outstanding == 0 and self._is_done:
            self.queue.stop()

    def all_answered(self) -> None:
        """No request is open and none will be sent: end when agents hold no answer either.

        Called again when every line of offline work has its result.
        """
        if not self._is_done:
            return
        if self._outstanding == 0:
            self.queue.stop()
        else:
            self.queue.after(WORK_LEFT_S_MAX, self.queue.stop)

    @property
    def _is_done(self) -> bool:
        return self.clients.is_done and (self.offline is None or self.offline.is_done)

    def _end(self) -> None:
        self.clients.give_up()
        self.queue.stop()

    def _report_progress(self, progress: Callable[[int, float], None]) -> None:
        progress(self.requests.ended, self.queue.now - SETTLE_S)
        self.queue.after(PROGRESS_S, self._report_progress, progress)

    # Faults.

    def _schedule(self, fault: SimFault) -> None:
        begin, end = self._actions(fault)
        self.queue.at(SETTLE_S + fault.at_s, begin)
        if fault.until_s < inf:
            self.queue.at(SETTLE_S + fault.until_s, end)

    def _actions(self, fault: SimFault) -> tuple[Action, Action]:
        """The calls that begin and end a fault."""
        if isinstance(fault, Cut):
            ends = fault.one, fault.other
            return partial(self.network.cut, *ends), partial(self.network.heal, *ends)
        if isinstance(fault, RouterCrash):
            return partial(self._crash_routers, fault.region), partial(
                self._open_routers, fault.region
            )
        if isinstance(fault, RunnerCrash):
            assert self.offline is not None, "no batch runner to crash"
            return partial(self.offline.crash, fault), partial(self.offline.restart, fault)
        if isinstance(fault, RegionFault):
            return partial(self.leases.stop, fault.region), partial(
                self.leases.resume, fault.region
            )
        replica = self.replicas[fault.replica]
        if isinstance(fault, ReplicaCrash):
            return replica.crash, replica.restart
        if isinstance(fault, EngineCrash):
            return replica.crash_engine, replica.engine.restart
        rate = 1.0 / fault.factor if isinstance(fault, EngineSlow) else 0.0
        return partial(replica.set_rate, rate), partial(replica.set_rate, 1.0)

    def _crash_routers(self, region: RegionId) -> None:
        for router in self.region_routers[region]:
            router.crash()

    def _open_routers(self, region: RegionId) -> None:
        for router in self.region_routers[region]:
            self.open_router(router)


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
    clock of this process's CPU time (`time.process_time`); all else in the report is the same in
    every run. `makers`: policies that may see the whole world, for a bound that no router could
    reach. `watch` is called with every reported end and the world's time.
    """
    world = World(workload, config, perf=perf, makers=makers)
    world.requests.watch = watch
    world.run(progress)
    return report(world, workload)


def report(world: World, workload: Workload) -> RunReport:
    """The report of a finished world."""
    requests, meter, config = world.requests, world.meter, world.config
    assert requests.sent == requests.ended, "a request was lost or counted twice"
    engines = [replica.engine for replica in world.replicas.values()]
    samples = sum(engine.occupancy_samples for engine in engines)
    occupancy = sum(engine.occupancy_sum for engine in engines)
    offline = world.offline
    loads = sum(engine.adapter_loads for engine in engines)
    return requests.report(
        {
            **({} if offline is None else {"offline": offline_report(world, offline, SETTLE_S)}),
            "decisions": meter.decisions,
            "decisions_per_s": meter.decisions / meter.seconds if meter.seconds else None,
            "gpu_busy_s": sum(engine.busy_s for engine in engines),
            "batch_occupancy": occupancy / samples if samples else None,
            "forwarded": requests.forwarded,
            "trie_bytes_per_s": {
                f"{source}>{to}": sent / world.queue.now
                for (source, to), sent in sorted(world.gossip.sent_bytes.items())
            },
            **({} if config.adapters is None else {"adapter_loads": loads}),
            "digest": requests.digest(),
            "policy": config.settings.policy,
            "topology": config.topology,
            "pushing": str(config.settings.pushing),
            "seed": config.seed,
            "replicas": {region: len(fleet) for region, fleet in config.regions.items()},
            "workload": {"name": workload.name, **workload.facts},
        }
    )
