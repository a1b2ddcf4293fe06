"""One world: regions with routers and replicas, their network, their clients, what goes wrong.

The fleet is up before the first client asks: replicas have been heard of, digests exchanged and
round trips measured. The world ends when everything is asked and answered and no agent works on
anything any more, so a leak in any table is there to be seen.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random

from agents.sim.profile import Profile
from mesh.core.gossip.told import Origin
from mesh.core.policies import Makers
from mesh.core.router import RouterCore
from mesh.sim import faults as fault
from mesh.sim.clients import Clients
from mesh.sim.config import WorldConfig
from mesh.sim.engine import Engine
from mesh.sim.event_queue import EventQueue
from mesh.sim.lease_streams import LeaseStreams
from mesh.sim.ledger import Ledger
from mesh.sim.network import Network
from mesh.sim.pulse import Pulse
from mesh.sim.replica import ReplicaPlan, SimReplica
from mesh.sim.router import SimRouter
from mesh.sim.surroundings import Meter, Surroundings
from mesh.sim.tickets import ROUTER
from mesh.sim.trie_links import TrieLinks
from mesh.sim.workload import Workload
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.state import Digest

ROUTERS_FROM_S = 1.0  # agents are up by then
SETTLE_S = 2.5  # then a ping and a digest have crossed the widest table
WORK_LEFT_S_MAX = 30.0  # what agents may still be busy with when nobody waits any more
PROGRESS_S = 1.0  # virtual


class World:
    """`run` it once; the rest is there to be looked at."""

    def __init__(
        self,
        workload: Workload,
        config: WorldConfig,
        *,
        perf: Callable[[], float] | None = None,
        makers: Callable[["World"], Makers] | None = None,
    ) -> None:
        """`perf`: a clock to measure decisions by; None keeps the result free of it.

        `makers`: makes the policies that routers may have, if they are to see the whole world.
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
        self.routers: dict[RegionId, SimRouter] = {}  # the first, or only one of each region
        self.crews: dict[RegionId, list[SimRouter]] = {}  # all of them
        self._pulses: dict[Origin, Pulse] = {}
        self._epochs: dict[Origin, int] = {}
        regions = list(config.regions)
        self.ledger = Ledger(regions, self.dice("samples"), SETTLE_S + config.warmup_s)
        self.trie_links = TrieLinks(self.network, self.crews, config.shape)
        self.leases = LeaseStreams(
            self.queue,
            self.network,
            self.crews,
            config.shape,
            lambda origin: self._pulses[origin].say_alive(),
        )
        self._add_routers()
        for region, fleet in config.profiles().items():
            for number, profile in enumerate(fleet):
                self._add_replica(region, number, profile)
        self._add_pulses()
        self.clients = Clients(
            workload,
            self.queue,
            self.network,
            {region: self.crews[config.shape.router_of(region)] for region in regions},
            self.ledger,
            self.dice("clients"),
            timeout_s=config.timeout_s,
            token_error=config.token_error,
            is_quiet=self._all_answered,
        )

    def dice(self, name: str) -> Random:
        """Chance for one part of the world: others' draws don't move it."""
        return Random(f"{self.config.seed} {name}")

    def run(self, progress: Callable[[int, float], None] | None = None) -> None:
        """Let the whole of it happen. `progress`: requests ended, virtual seconds."""
        phases = self.dice("phases")
        for replica in self.replicas.values():
            self.queue.at(phases.uniform(0.0, self.config.reading_s), replica.start)
        for router in self._all_routers():
            self.queue.at(ROUTERS_FROM_S + phases.uniform(0.0, 0.1), self.open_router, router)
        self.queue.at(SETTLE_S, self.clients.begin)
        for trouble in self.config.faults:
            self._schedule(trouble)
        if self.config.until_s < inf:
            self.queue.at(SETTLE_S + self.config.until_s, self._end)
        if progress is not None:
            self.queue.at(SETTLE_S, self._tell, progress)
        self.queue.run()

    def open_router(self, router: SimRouter) -> None:
        """Start a router, or start it anew."""
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

    def _all_routers(self) -> list[SimRouter]:
        return [router for crew in self.crews.values() for router in crew]

    # Building.

    def _add_routers(self) -> None:
        shape, config, around = self.config.shape, self.config, self._surroundings()
        for site in dict.fromkeys(shape.router_of(region) for region in config.regions):
            self.crews[site] = [
                SimRouter(site, self.queue, self.network, around, RouterId(f"r{number}"))
                for number in range(1, config.routers + 1)
            ]
            self.routers[site] = self.crews[site][0]

    def _surroundings(self) -> Surroundings:
        """What every router sees of this world."""
        return Surroundings(
            replicas=self.replicas,
            routers=self.crews,
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
        config = self.config
        crew = self.crews[config.shape.router_of(region)]
        plan = ReplicaPlan(
            name=ReplicaId(f"{region}-{number + 1}"),
            site=region,
            region=crew[0].site,
            heartbeat_s=config.heartbeat_s,
            reading_s=config.reading_s,
            outstanding_max=config.outstanding_max,
            batch_max=profile.max_seqs if config.batch_max_told else None,
            beat_gap_s=0.0 if config.news_at_once else config.heartbeat_s,
        )
        engine = Engine(profile, lambda: self.queue.now, config.kv_tokens)
        self.replicas[plan.name] = SimReplica(
            plan,
            engine,
            self.queue,
            self.network,
            crew,
            self._count_inside,
            self.leases.adopters_of,
        )

    def _add_pulses(self) -> None:
        gap_s = 0.0 if self.config.news_at_once else self.config.router_settings().digest_s
        fleet = list(self.replicas.values())
        for router in self._all_routers():
            peers = self.config.shape.peers_of(router.site, self.crews)
            self._pulses[Origin(router.site, router.name)] = Pulse(
                router,
                [one for peer in peers for one in self.crews[peer]],
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

    def _tell(self, progress: Callable[[int, float], None]) -> None:
        progress(self.ledger.ended, self.queue.now - SETTLE_S)
        self.queue.after(PROGRESS_S, self._tell, progress)

    # Faults.

    def _schedule(self, trouble: fault.Fault) -> None:
        begin, end = self._actions(trouble)
        until_s = trouble.back_at_s if isinstance(trouble, _CRASHES) else trouble.until_s
        self.queue.at(SETTLE_S + trouble.at_s, begin)
        if until_s < inf:
            self.queue.at(SETTLE_S + until_s, end)

    def _actions(self, trouble: fault.Fault) -> tuple[Callable[[], None], Callable[[], None]]:
        """What begins a fault and what ends it."""
        if isinstance(trouble, fault.Cut):
            ends = trouble.one, trouble.other
            return partial(self.network.cut, *ends), partial(self.network.heal, *ends)
        if isinstance(trouble, fault.RouterCrash):
            crew = self.crews[trouble.region]
            return partial(_each, crew, SimRouter.crash), partial(_each, crew, self.open_router)
        if isinstance(trouble, fault.LeaseStreamDown):
            region = trouble.region
            return partial(self.leases.stop, region), partial(self.leases.resume, region)
        replica = self.replicas[trouble.replica]
        if isinstance(trouble, fault.ReplicaCrash):
            return replica.crash, replica.restart
        if isinstance(trouble, fault.EngineCrash):
            return replica.crash_engine, replica.engine.restart
        rate = 0.0 if isinstance(trouble, fault.EngineHang) else 1.0 / trouble.factor
        return partial(replica.set_rate, rate), partial(replica.set_rate, 1.0)


def _each(crew: Sequence[SimRouter], act: Callable[[SimRouter], None]) -> None:
    for router in crew:
        act(router)


_CRASHES = fault.ReplicaCrash, fault.EngineCrash, fault.RouterCrash
