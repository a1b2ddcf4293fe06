"""The batch runner process: bus, store, offline core, and periodic work.

On the bus it is one more router of its region, which serves no clients: it has an inbox and
keepalives of its own, so agents cancel the lines of a runner that is gone. It publishes no digest,
claims no lease and sends no prefixes.
"""

import asyncio
import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg

from infra.address import Address
from infra.batch_table import BatchTable
from infra.bus import BusAddress
from infra.process import LimitedLog, end_all, first_of
from infra.tenant_table import TenantTable, caller_of
from mesh.adapters.batch_bus import RunnerBus, RunnerListeners
from mesh.adapters.bus import has_headers
from mesh.adapters.process_page import ProcessPage
from mesh.adapters.runner_metrics import RunnerMetrics
from mesh.batch.held_lines import HeldLines
from mesh.batch.job_follower import JobFollower
from mesh.batch.job_tasks import JobTasks
from mesh.batch.line_models import LineModels
from mesh.batch.output_line import Tokens
from mesh.batch.queues import ACK_WAIT_S
from mesh.batch.records import StoreError
from mesh.batch.store import BatchStore
from mesh.core.model import events as ev
from mesh.core.model.model_targets import ModelRule, ModelTargets
from mesh.core.model.prompt import PromptReader
from mesh.core.offline import effects as ofx
from mesh.core.offline import events as oev
from mesh.core.offline.core import OfflineCore
from mesh.core.offline.forecast import ForecastInvalid, read_forecast, write_forecast
from mesh.core.offline.jobs import REPORTED_TOKENS_MAX
from mesh.core.offline.settings import OfflineSettings
from mesh.core.offline.state import RunnerState
from mesh.http.read_request import BodyBudget
from mesh.runtime.control_plane import ReplyGuard, read_lease
from mesh.runtime.limits import LimitGossip, Member
from mesh.runtime.name_claim import NameClaim, NameTaken
from mesh.runtime.peer_requests import PeerRequests
from mesh.runtime.request_messages import RequestMessages
from mesh.runtime.ticks import IDLE_S, keep_alive, keep_ticking
from mesh.runtime.usage_writer import UsageWriter
from mesh.session.cost import Seen, estimated
from mesh.session.record import Home, Identifiers, OpenRequest
from mesh.session.session import Session
from mesh.session.usage_book import UsageBook, account
from schemas import exchange, state, subjects, wire
from schemas.batch import BatchJob
from schemas.ids import RegionId, RouterId
from schemas.limits import TENANT

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02
FILL_S = 5.0  # between readings of how full the store is
PUT_BACK_S = 5.0  # for lines on their way to the store, after the drain limit
INBOX_SECRET_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """One batch runner of one region. `router`: its name, which no router of the region has."""

    region: RegionId
    router: RouterId
    peers: tuple[RegionId, ...]
    bus: BusAddress
    store: BusAddress  # the same server, with the login for batch jobs
    limits: BatchTable
    settings: OfflineSettings
    hash_key: str  # of prompt block hashes
    epoch: int  # differs at every start
    seed: int
    metrics: Address | None = None
    models: tuple[ModelRule, ...] = ()  # aliases that lines may name
    tenants: Mapping[str, TenantTable] = field(default_factory=dict)  # as mesh.toml has them


class _Observer(RunnerMetrics):
    """Metrics, and what is learned of answers."""

    def __init__(self, runner: "BatchRunner", config: RunnerConfig) -> None:
        super().__init__(config.region, config.peers)
        self._runner = runner

    def served(self, record: OpenRequest, end: exchange.End) -> None:
        runner = self._runner
        super().served(record, end)
        held = runner.lines.line_of(record)
        if held is None:
            return
        runner.account(record)
        if end.prompt_tokens < 0:
            return
        runner.prompts.learn(held.line.model, held.size, end.prompt_tokens)
        reported = (end.prompt_tokens, max(0, end.completion_tokens))
        tokens = Tokens(*(min(count, REPORTED_TOKENS_MAX) for count in reported))
        runner.jobs.computed(held.line.job, tokens)

    def attempt_failed(self, record: OpenRequest, event: ev.AttemptFailed) -> None:
        super().attempt_failed(record, event)
        if not event.preempted:
            request = record.request.request_id
            log.info("%s: attempt %d: %s", request, event.attempt, event.detail)

    def handed_out(self, key: int, region: RegionId) -> None:
        self.handed_out_to(region, offline=self._runner.lines.is_offline(key))

    def body_dropped(self, kept_bytes: int) -> None:
        self._runner.bodies.give_back(kept_bytes)

    def unreadable(self, what: str, text: str, *args: object) -> None:
        self._runner.limited.warning(what, "unreadable", text, *args)


async def run(
    config: RunnerConfig,
    stop: asyncio.Event,
    on_ready: Callable[["BatchRunner"], None] = lambda runner: None,
) -> None:
    """Do batch jobs until `stop` is set, then give back what is not done.

    Raises BusUnreachable or OSError (of the metrics page) at the start, NameTaken there or later,
    and BusUnreachable when the server has closed the connection for good.
    """
    runner = BatchRunner(config)
    try:
        await runner.open()
        on_ready(runner)
        await first_of(stop.wait(), runner.until_broken())
        await runner.drain()
    finally:
        await runner.close()


class BatchRunner:
    """One batch runner: `open`, then `drain` and `close`."""

    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        home, name, peers = config.region, config.router, config.peers
        self._clock = clock = asyncio.get_running_loop().time
        self.metrics = _Observer(self, config)
        self.limited = LimitedLog(log, clock)
        ground = config.settings.ground
        self._bus = RunnerBus(home, name, peers, config.bus, ground=ground)
        self.store = BatchStore(config.store, f"batch runner {home}/{name}", config.limits)
        self.core = OfflineCore(
            RunnerState(
                region=home,
                runner=name,
                epoch=config.epoch,
                settings=config.settings,
                dice=random.Random(config.seed),
                unix_at_zero=time.time() - clock(),
            )
        )
        self.prompts = PromptReader(config.hash_key)
        self.bodies = BodyBudget()  # of peers' lines
        self.session = Session(
            Home(home, name, ground),
            decide=self.core.handle,
            clock=clock,
            bus=self._bus,
            ids=Identifiers(lambda: os.urandom(INBOX_SECRET_BYTES).hex(), itertools.count(1)),
            observer=self.metrics,
        )
        feed, metrics, store = self.session.feed, self.metrics, self.store
        self.jobs = JobFollower(store, JobTasks(store, store.unix_s), feed, metrics, clock)
        job_of = self.jobs.in_progress
        models = LineModels(ModelTargets(config.models), self.core.served)
        self.lines = HeldLines(store, self.session, self.prompts, job_of, metrics, models)
        self.usage = UsageWriter(self._bus, UsageBook(home, name, config.epoch, (home, *peers)))
        self._limits = LimitGossip(Member(home, name, config.epoch, peers), self._bus, clock)
        self._limits.know(
            {
                TENANT + tenant: table.limits
                for tenant, table in config.tenants.items()
                if table.limits is not None
            }
        )
        self._name = NameClaim(home, name, config.epoch, self._bus, NameTaken.runner(home, name))
        self._messages = RequestMessages(config, self.session, self._bus)
        self._messages.takers.append(lambda token, msg: self._name.receive(token, msg.data))
        self._from_peers = PeerRequests(
            self.session,
            ReplyGuard(home, peers, metrics, clock),
            self.bodies,
            self.prompts.read,
            metrics,
            reads_receipts=lambda: False,
            channel="offline",
        )
        self._page = ProcessPage(metrics.registry, self.not_ready_because)
        self.session.performers.update(self._performers())
        self._show()
        self._tasks: list[asyncio.Task[None]] = []
        self._saving: set[asyncio.Task[None]] = set()

    def _show(self) -> None:
        metrics = self.metrics
        metrics.runner.labels(self._config.router).set(1)
        metrics.bus_connected.set_function(lambda: self._bus.is_connected)
        metrics.store_connected.set_function(lambda: self.store.is_connected)
        metrics.read(self)

    # What others read.

    def open_jobs(self) -> Iterable[BatchJob]:
        """Jobs of the region that have not ended."""
        return self.jobs

    def lines_held(self) -> int:
        """Lines that this runner has."""
        return len(self.lines)

    def lines_tried(self) -> int:
        """Those of them that a replica has, or is about to get."""
        return self.lines.tried

    @property
    def page_port(self) -> int:
        """The port of the metrics page."""
        return self._page.port

    def not_ready_because(self) -> str | None:
        """Why it does no jobs at present; None if it does."""
        if self.core.draining:
            return "this batch runner is shutting down"
        if not self._bus.is_connected or not self.store.is_connected:
            return "the bus can't be reached"
        return self.jobs.problem

    def status(self) -> str:
        """What it does, in one line for people."""
        problem = self.not_ready_because()
        return (
            f"{'' if problem is None else problem + '; '}{len(list(self.jobs))} jobs, "
            f"{len(self.lines)} lines here, {self.lines.tried} of them at replicas"
        )

    def account(self, record: OpenRequest) -> None:
        """Put down what a line's answer has cost, which is here."""
        answer = record.answer
        assert answer is not None and answer.end is not None
        end = answer.end
        counts = end.prompt_tokens, end.cached_tokens, end.completion_tokens
        cost = estimated(Seen(record.request, answer, record.decided, None, *counts))
        account(self.usage.book, record, answer.region or "", cost)
        tenant = record.tenant or ""
        whose = caller_of(tenant, self._config.tenants.get(tenant), record.request.key_id)
        if whose.limited:
            tokens = cost.uncached, cost.cached, cost.output
            self._limits.keeper.spent(whose.limited, tokens, self._clock())

    # From start to end.

    async def open(self) -> None:
        """Connect to the bus and the store, and begin."""
        config = self._config
        await self._bus.open_runner(
            RunnerListeners(
                heartbeat=self._messages.receive_heartbeat,
                offline_state=self._receive_state,
                lease=self._receive_lease,
                answer=self._messages.receive_answer,
                offline=self._from_peers.receive,
                lost=lambda: self.session.feed(ev.BusLost()),
                back=self.session.bus_returned,
            ),
            self._name,
        )
        await self.store.open()
        await self._restore_forecast()
        if config.metrics is not None:
            await self._page.open(config.metrics)
        for work in (
            self._ticks(),
            self._keep_alive(),
            self._bus.watch_streams(self._messages.read_last_heartbeat, lambda name, differs: None),
            self.lines.keep(),
            self.jobs.run(),
            self.usage.run(),
            self._limits.run(),
            self._name.keep(),
            self._watch_fill(),
        ):
            self._tasks.append(asyncio.create_task(work))

    async def until_broken(self) -> None:
        """Raise what ended one of the tasks that never end by themselves."""
        tasks = (*self._tasks, self._bus.sending)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def drain(self) -> None:
        """Take nothing new and put back what waits; wait for what runs, at most `drain_s_max`."""
        self.session.feed(ev.Drain())
        await self.jobs.stop()
        if not await self._idle_within(self._config.settings.drain_s_max):
            self.session.feed(ev.DrainOver())
            if not await self._idle_within(PUT_BACK_S):
                log.warning(
                    "%d lines were not put back; other runners get them in %g s",
                    len(self.lines),
                    ACK_WAIT_S,
                )

    async def _idle_within(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                while not self._is_idle():  # noqa: ASYNC110 - changes in many places
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            return False
        return True

    def _is_idle(self) -> bool:
        return self.core.is_idle and self.lines.is_idle

    async def close(self) -> None:
        await self._page.close()
        await self.jobs.stop()
        await self.lines.close()
        await end_all([*self._tasks, *self._saving])
        await self.store.close()
        await self.usage.close()
        await self._bus.close()

    # Effects.

    def _performers(self) -> dict[type, Callable[[Any], None]]:
        def publish_state(effect: ofx.PublishOffline) -> None:
            subject = subjects.offline_state(self._config.region)
            self._bus.publish(subject, state.encode_state(effect.state))

        return {
            **self.lines.performers,
            **self.jobs.performers,
            ofx.PublishOffline: publish_state,
            ofx.SaveForecast: self._save_forecast,
        }

    def _save_forecast(self, effect: ofx.SaveForecast) -> None:
        task = asyncio.create_task(self._save(write_forecast(effect.state)))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(self, data: bytes) -> None:
        try:
            await self.store.forecast.put(data)
        except StoreError as error:
            self.limited.warning("forecast", "store", "the forecast is not kept: %s", error)

    async def _restore_forecast(self) -> None:
        try:
            data = await self.store.forecast.get()
            if data is not None:
                self.session.feed(oev.ForecastRestored(read_forecast(data)))
        except (StoreError, ForecastInvalid) as error:
            log.warning("the forecast begins anew: %s", error)

    # The bus.

    def _receive_state(self, msg: Msg) -> None:
        """What a peer's runner, or another one of this region, publishes of its offline work."""
        if has_headers(msg):
            self.limited.warning("state", "headers", "%s dropped: it has headers", msg.subject)
            return
        try:
            found = state.decode_offline(msg.data)
        except wire.WireError as error:
            self.limited.warning("state", "unreadable", "offline state dropped: %.300s", error)
            return
        home, region = self._config.region, found.region
        if region != subjects.owner(msg.subject):
            text = "%s dropped: it names another region"
            self.limited.warning("state", "another", text, msg.subject)
        elif region in self._config.peers or (region, found.router) != (home, self._config.router):
            self.session.feed(oev.OfflineStateSeen(found))

    def _receive_lease(self, msg: Msg) -> None:
        try:
            self.session.feed(read_lease(msg))
        except wire.WireError as error:
            self.limited.warning("lease", "dropped", "lease on %s: %.300s", msg.subject, error)

    async def _watch_fill(self) -> None:
        while True:
            try:
                self.metrics.store_filled(await self.store.fill())
            except StoreError as error:
                self.metrics.store_filled({})
                self.limited.warning("fill", "store", "how full the store is: %s", error)
            await asyncio.sleep(FILL_S)

    # The clock.

    async def _ticks(self) -> None:
        late = self.metrics.loop_late.observe
        await keep_ticking(self.session, late, lambda: self.core.is_idle)

    async def _keep_alive(self) -> None:
        """Agents cancel the work of a runner that is silent, or that has another epoch."""
        config, idle_from = self._config, self._clock()

        def publish(next_within_s: float) -> None:
            keepalive = exchange.Alive(config.epoch, next_within_s=next_within_s)
            subject = subjects.alive(config.region, config.router)
            self._bus.publish(subject, wire.encode(keepalive))

        def rests() -> bool:
            nonlocal idle_from
            now = self._clock()
            if not self.core.is_idle:
                idle_from = now
            return now - idle_from >= IDLE_S

        await keep_alive(publish, rests)
