"""All offline work of one world: the regions' stores, batch runners, and lines' results."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mesh.core.model.prompt import Prompt
from mesh.core.offline import effects as ofx
from mesh.core.offline.core import OfflineCore
from mesh.core.offline.state import RunnerState
from mesh.sim.config import RunnerCrash
from mesh.sim.control_plane import ALIVE_S, TICK_S
from mesh.sim.network import BUS_S, RegionPair
from mesh.sim.offline.config import MESH, OfflineConfig
from mesh.sim.offline.jobs import SimJob
from mesh.sim.offline.runner import SimBatchRunner
from mesh.sim.offline.store import JobStore, LineOutcome, LineResult, StoredJob
from mesh.sim.replica import SimReplica
from mesh.sim.workload import estimate
from schemas.exchange import Refusal
from schemas.ids import RegionId, RouterId
from schemas.state import OfflineState, encode_state

if TYPE_CHECKING:
    from mesh.sim.world import World

SEE_JOBS_S = 1.0
HEADER_BYTES = 4  # colon, blank and line end


class OfflineWork:
    """Call `begin` once; the world's `all_answered` is called when every line has a result."""

    def __init__(self, world: "World", config: OfflineConfig) -> None:
        self._world = world
        self._config = config
        self._queue = world.queue
        self._network = world.network
        self._began_at = 0.0
        self._to_submit = len(config.jobs)
        self._pick = world.dice("offline queue groups").randrange
        self._dice = world.dice("offline estimates")
        self._epochs: Counter[tuple[RegionId, RouterId]] = Counter()
        self.stores = {site: JobStore(is_ordered=config.by_prefix) for site in world.region_routers}
        names = [RouterId(f"batch-{number}") for number in range(config.runners)]
        self.runners = {
            site: [SimBatchRunner(world, self, site, name) for name in names]
            for site in world.region_routers
        }
        self.results: list[tuple[StoredJob, LineResult]] = []  # as they were stored
        self.late_jobs: set[str] = set()  # reported late by a runner
        self.state_bytes: Counter[RegionPair] = Counter()  # of OfflineState, over links
        self.line_header_bytes: Counter[RegionPair] = Counter()  # of lines given to peers
        self.answered_elsewhere = 0
        self.preempted = 0  # aborted at the engine for online requests
        self.given_back = 0  # for them too, before the engine had it
        self.refused = 0

    @property
    def is_done(self) -> bool:
        """Whether every job was submitted and every line has a result."""
        return not self._to_submit and not any(
            next(store.open_jobs(), None) for store in self.stores.values()
        )

    def begin(self, opens_at: float, jobs_at: float) -> None:
        """Start the runners, and submit jobs, whose times count from `jobs_at`."""
        self._began_at = jobs_at
        phases = self._world.dice("offline phases")
        for runner in self._all_runners():
            self._queue.at(opens_at + phases.uniform(0.0, 0.1), self.open_runner, runner)
        for job in self._config.jobs:
            self._queue.at(jobs_at + job.at_s, self._submit, job)

    def open_runner(self, runner: SimBatchRunner) -> None:
        """Start or restart a runner."""
        self._epochs[(runner.site, runner.name)] += 1
        epoch = self._epochs[(runner.site, runner.name)]
        is_meshwide = self._config.scope == MESH and bool(self._world.peers_of(runner.site))
        settings = self._config.settings
        if not self._config.by_prefix:
            settings = replace(settings, utility_ratio=0.0)
        core = OfflineCore(
            RunnerState(
                region=runner.site,
                runner=runner.name,
                epoch=epoch,
                settings=settings if is_meshwide else replace(settings, takes_peers=False),
                dice=self._world.dice(f"runner {runner.site} {runner.name} {epoch}"),
                unix_at_zero=0.0,
            )
        )
        runner.open(core, epoch)
        self._tick(runner, core)
        self._keep_alive(runner, core, True)
        self._see_jobs(runner, core)

    def _all_runners(self) -> list[SimBatchRunner]:
        return [runner for runners in self.runners.values() for runner in runners]

    def pick_runner(self, region: RegionId) -> SimBatchRunner:
        """One of the region's runners, as a queue group would choose; a crashed one if all are."""
        runners = self.runners[region]
        living = [runner for runner in runners if runner.is_up] or runners
        return living[self._pick(len(living))]

    def estimate(self, hashes: tuple[int, ...], tokens: int) -> Prompt:
        """A line's prompt as its runner sees it."""
        return estimate(hashes, tokens, self._world.config.token_error, self._dice)

    # Jobs.

    def _submit(self, job: SimJob) -> None:
        self._to_submit -= 1
        site = self._world.config.shape.router_of(job.region)
        stored = self.stores[site].submit(job, self._queue.now)
        self._queue.at(stored.deadline, self._expire, site, stored)
        self._show_jobs(site)

    def _show_jobs(self, site: RegionId) -> None:
        for runner in self.runners[site]:
            self._queue.after(BUS_S, runner.see_jobs)

    def _expire(self, site: RegionId, stored: StoredJob) -> None:
        if stored.expire(self._queue.now):
            self._over(site)

    def settled(self, site: RegionId, stored: StoredJob, result: LineResult) -> None:
        """A line has its one result."""
        self.results.append((stored, result))
        is_answered = result.outcome is LineOutcome.ANSWERED
        self.answered_elsewhere += is_answered and result.region != site
        if stored.is_over:
            self._over(site)

    def _over(self, site: RegionId) -> None:
        self._show_jobs(site)
        if self.is_done and self._world.clients.is_done:
            self._world.all_answered()

    def paced(self, effect: ofx.JobPaced) -> None:
        """A runner's estimate of a job's end."""
        if effect.late:
            self.late_jobs.add(effect.job)

    def was_refused(self, reason: str) -> None:
        """An agent or a peer has refused a line."""
        self.refused += reason == Refusal.NO_OFFLINE_ROOM

    # What runners send beside requests.

    def publish(self, runner: SimBatchRunner, state: OfflineState) -> None:
        """To the other runners of its region, and to peers' where lines may go there."""
        home = runner.site
        peers: Sequence[RegionId] = ()
        if self._config.scope == MESH:
            peers = self._world.peers_of(home)
        size = len(encode_state(state)) if peers else 0
        for region in (home, *peers):
            if region != home:
                self.state_bytes[(home, region)] += size
            for other in self.runners[region]:
                if other is not runner:
                    self._network.send_state(home, region, other.receive_state, state)

    def _tick(self, runner: SimBatchRunner, core: OfflineCore) -> None:
        if runner.core is core:
            runner.tick()
            self._queue.after(TICK_S, self._tick, runner, core)

    def _see_jobs(self, runner: SimBatchRunner, core: OfflineCore) -> None:
        if runner.core is core:
            runner.see_jobs()
            self._queue.after(SEE_JOBS_S, self._see_jobs, runner, core)

    def _keep_alive(self, runner: SimBatchRunner, core: OfflineCore, is_first: bool) -> None:
        """To the agents that hold answers for it; the first one to all, for the epoch."""
        if runner.core is not core:
            return
        for replica in self._world.replicas.values():
            if is_first or replica.answers_to(runner):
                self._network.send(
                    runner.site, replica.site, _receive_keepalive, replica, runner, runner.epoch
                )
        self._queue.after(ALIVE_S, self._keep_alive, runner, core, False)

    def forwarded(self, source: RegionId, to: RegionId, headers: dict[str, str]) -> None:
        """A line goes to a peer with these headers."""
        size = sum(len(name) + len(value) for name, value in headers.items())
        self.line_header_bytes[(source, to)] += size + HEADER_BYTES * len(headers)

    def link_bytes(self) -> Counter[RegionPair]:
        """What crossed links beside prompts and answers, by direction."""
        return self.state_bytes + self.line_header_bytes

    # Faults.

    def crash(self, fault: RunnerCrash) -> None:
        """The region's runners are killed."""
        for runner in self.runners[fault.region]:
            runner.crash()

    def restart(self, fault: RunnerCrash) -> None:
        for runner in self.runners[fault.region]:
            self.open_runner(runner)


def _receive_keepalive(replica: SimReplica, runner: SimBatchRunner, epoch: int) -> None:
    replica.receive_keepalive(runner.site, runner.name, epoch, None)
