"""Regions that do batch jobs: nats-servers, agents that take offline work, batch runners."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from agents.core.offline_profile import OfflineProfile
from agents.core.slo_profile import Measure
from infra.address import Address
from mesh.batch.records import StoreUnavailable
from mesh.batch.store import BatchStore
from mesh.core.model.model_targets import ModelRule
from mesh.core.offline.settings import OfflineSettings
from mesh.runtime.batch_runner import BatchRunner, RunnerConfig
from schemas.batch import BatchJob, JobStatus
from schemas.ids import RegionId, RouterId
from tests.support.batch_regions import opened
from tests.support.nats_regions import NatsRegions
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_mesh import SmallMesh, small_mesh
from tests.support.until import PATIENCE_S

JOB_S = 25.0  # for a job to get that far; less than ACK_WAIT_S

# Of an engine that is never in the way.
EASY = OfflineProfile(
    engine="vllm",
    model="tiny",
    measured_at=0,
    computing=(1e-4, 1e-9, 1e-9, 0.0, 0.0, 1e-9, 1e-9),
    waiting=(1e-4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    latency_budget_s=10.0,
    limits_s={Measure.TBT_P99: 10.0},
    chunk_tokens=8192,
    prefill_tokens_max=8192,
    queued_tokens_max=10_000_000,
)


class BatchMesh:
    """Use `batch_mesh`."""

    def __init__(self, regions: NatsRegions, mesh: SmallMesh, store: BatchStore) -> None:
        self.regions, self.mesh, self.store = regions, mesh, store
        self.runners: dict[str, BatchRunner] = {}

    async def agent(self, replica: str, engine: ScriptedEngine, **options: object) -> None:
        """An agent that takes offline work, in the region that its name begins with."""
        region = replica.partition("-")[0]
        await self.mesh.agent(region, replica, engine, profile=EASY, **options)

    async def runner(
        self,
        region: str = "us",
        name: str = "batch-0",
        *,
        metrics: bool = False,
        models: tuple[ModelRule, ...] = (),
        **settings: object,
    ) -> BatchRunner:
        """A batch runner in this process. `metrics`: whether it has a page."""
        topology = self.regions.topology
        home = RegionId(region)
        config = RunnerConfig(
            region=home,
            router=RouterId(name),
            peers=topology.peers(region),
            bus=self.regions.address(region, "router"),
            store=self.regions.address(region, "batch"),
            limits=topology.batch,
            settings=OfflineSettings(
                ground=topology.ground_for(home), **{"drain_s_max": 5.0} | settings
            ),
            hash_key="test",
            epoch=time.time_ns() // 1_000_000,
            seed=7,
            metrics=Address("127.0.0.1", 0) if metrics else None,
            models=models,
            tenants=topology.tenants,
        )
        runner = BatchRunner(config)
        self.mesh.stack.push_async_callback(runner.close)
        await runner.open()
        self.runners[f"{region}/{name}"] = runner
        return runner

    async def until(self, job: BatchJob, status: JobStatus) -> BatchJob:
        """Wait until the job has that status; its record then. Lines that a runner has are given to
        another one only after a longer time."""
        async with asyncio.timeout(JOB_S):
            while True:
                with contextlib.suppress(StoreUnavailable):  # its server may have started anew
                    found = await self.store.jobs.get(job.id)
                    if found.status is status:
                        return found
                    assert not found.is_over, f"{found.status}: {found.errors}"
                await asyncio.sleep(0.02)

    async def until_running(self, job: BatchJob) -> None:
        """Wait until the job's lines are queued."""
        await self.until(job, JobStatus.IN_PROGRESS)

    async def until_answered(self, job: BatchJob, lines: int) -> None:
        """Wait until so many lines of the job have a result."""
        async with asyncio.timeout(3 * PATIENCE_S):
            while await self.store.results.count(job.id) < lines:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def batch_mesh(regions: NatsRegions) -> AsyncIterator[BatchMesh]:
    """The store of us; start agents and runners."""
    async with opened(regions) as store, small_mesh(regions) as mesh:
        yield BatchMesh(regions, mesh, store)
