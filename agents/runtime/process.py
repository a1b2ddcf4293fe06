"""The agent as a function: `run(config, clock, epoch, stop)`."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from agents.adapters.bus import AgentBus, BusAuthorization
from agents.adapters.engine import EngineClient, EngineOptions
from agents.adapters.engine_kinds import KINDS, EngineDialect
from agents.adapters.kv_events import KvEventSource
from agents.adapters.name_guard import NameGuard
from agents.adapters.outbox import BusConnection
from agents.config import OUTSTANDING_MAX_MOST, AgentConfig
from agents.core.agent import AgentCore
from agents.core.engine_cache import EngineCache
from agents.core.held_blocks import HeldBlocks
from agents.core.held_log import HeldLog
from agents.core.known_speed import KnownSpeed, of_profile
from agents.core.replica_config import KvPart, ReplicaConfig
from agents.runtime.agent import Agent
from agents.runtime.held_prompts import HeldPrompts
from agents.runtime.metrics import serve_metrics
from agents.runtime.speed_file import SpeedFile
from infra import bus
from infra.process import end_all, write_ready_file
from infra.service_manager import NO_SERVICE_MANAGER, ServiceManager
from schemas import subjects


@dataclass(frozen=True, slots=True)
class Stop:
    """A request to end: `drain` first, then `at_once`."""

    drain: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: asyncio.Event = field(default_factory=asyncio.Event)

    def request(self) -> None:
        """The first time: drain. The second time: at once."""
        (self.at_once if self.drain.is_set() else self.drain).set()


async def run(
    config: AgentConfig,
    clock: Callable[[], float],
    epoch: int,
    stop: Stop,
    manager: ServiceManager = NO_SERVICE_MANAGER,
) -> None:
    """Serve one engine's work from the bus until `stop`; wait for one that does not answer yet.

    `epoch` must rise with every start. Raises BusUnreachable when no server answers or permits
    this agent, and ReplicaNameTaken when another has its name, alone or in a group.
    """
    async with AsyncExitStack() as opened:
        authorization = BusAuthorization(config.region, config.replica)
        name = NameGuard(config.region, config.replica, epoch, clock)
        connection = BusConnection()
        client = await _connected(config, authorization, name, connection)
        opened.push_async_callback(bus.close, client)
        await name.take(client)
        engine = engine_client(config, clock)
        opened.callback(engine.close)
        agent_bus = AgentBus(client, connection, config.region, config.replica)
        speeds = SpeedFile(config.state_dir)
        core = AgentCore(replica_config(config, epoch, speeds.read()))
        held = _held_prompts(config, epoch, agent_bus, engine, clock)
        async with asyncio.TaskGroup() as tasks:
            agent = Agent(config, core, agent_bus, engine, clock, tasks, held)
            if config.metrics_port != 0:
                host, port = config.metrics_host, config.metrics_port
                await serve_metrics(opened, host, port, agent, agent_bus)
            await agent_bus.listen(agent.feed, agent.credit)
            if held is not None:
                await agent_bus.listen_for_blocks(held.received)
            authorization.check()
            background = [
                tasks.create_task(authorization.watch()),
                tasks.create_task(name.watch()),
                tasks.create_task(agent.keep_time()),
                tasks.create_task(agent.scrape_engine()),
                tasks.create_task(agent.keep_alive()),
                tasks.create_task(connection.report(agent.feed)),
                tasks.create_task(agent_bus.outbox.run()),
                tasks.create_task(speeds.keep_current(agent.learned_speed)),
                tasks.create_task(_write_ready_file(config.ready_file, agent.ready)),
            ]
            if held is not None:
                background.append(tasks.create_task(held.run()))
            reporting = tasks.create_task(_report(manager, agent))
            try:
                await stop.drain.wait()
                manager.report_stopping()
                await agent.drain(config.drain_timeout_s, stop.at_once)
            finally:  # the group itself cancels only once, and a cancel can get lost
                await end_all(background)
                await agent.close()
                await end_all([reporting])


def engine_client(config: AgentConfig, clock: Callable[[], float]) -> EngineClient:
    """The agent's engine, as its operator described it."""
    return EngineClient(
        api_url=config.engine_url,
        metrics_url=config.metrics_page,
        kind=KINDS[config.engine_kind],
        clock=clock,
        options=EngineOptions(
            key=None if config.engine_key is None else config.engine_key.get_secret_value(),
            models=config.models,
            reads_batch_max=config.batch_max is None,
            asks_usage=config.ask_usage,
            routes=config.routes,
            rank=config.data_parallel_rank,
            finds_paths=config.role is None,
        ),
    )


def _held_prompts(
    config: AgentConfig,
    epoch: int,
    agent_bus: AgentBus,
    engine: EngineClient,
    clock: Callable[[], float],
) -> HeldPrompts | None:
    """What follows the engine's KV events, where it publishes them."""
    if config.kv_events is None:
        return None
    cache = EngineCache(HeldBlocks())
    log = HeldLog(cache.held, epoch)
    source = KvEventSource(cache, config.kv_events, config.kv_events_replay, config.kv_events_topic)
    return HeldPrompts(source, log, engine.api, agent_bus.publish_held, clock)


async def _connected(
    config: AgentConfig, authorization: BusAuthorization, name: NameGuard, connection: BusConnection
) -> bus.BusClient:
    def reconnected() -> None:
        name.reconnected()
        connection.returned()

    def complained(problem: Exception) -> None:
        authorization.complained(problem)
        name.complained(problem)

    password = config.nats_password
    address = bus.BusAddress(
        config.nats_url,
        config.nats_user,
        None if password is None else password.get_secret_value(),
        config.bus_ca,
    )
    return await bus.connect(
        address,
        name=f"agent {config.region}/{config.replica}",
        inbox_prefix=subjects.inbox_prefix(config.region, config.replica),
        on_error=complained,
        on_lost=connection.lost,
        on_back=reconnected,
    )


def replica_config(config: AgentConfig, epoch: int, kept: KnownSpeed | None) -> ReplicaConfig:
    """`kept`: what the agent's last run learned of its engine's speed."""
    kind = KINDS[config.engine_kind]
    profiled = None if config.profile is None else of_profile(config.profile)
    return ReplicaConfig(
        region=config.region,
        replica=config.replica,
        epoch=epoch,
        engine=config.engine_kind,
        outstanding_max=outstanding_max(config, kind),
        heartbeat_s=config.heartbeat_ms / 1000,
        batch_max=config.batch_max,
        residency=config.residency,
        counts_own=not kind.has_metrics,
        offline=config.profile,
        offline_priority=config.offline_priority,
        speeds=tuple(speed for speed in (kept, profiled) if speed is not None),
        probes_speed=config.speed_probe,
        load_s=config.load_s,
        adapters=config.adapters,
        adapters_max=config.load_adapters or 0,
        kv=kv_part(config),
    )


def kv_part(config: AgentConfig) -> KvPart | None:
    """The engine's part in pairs; None where it answers alone."""
    if config.role is None or config.kv_transfer is None:
        return None
    return KvPart(config.kv_transfer, config.role, config.kv_address)


def outstanding_max(config: AgentConfig, kind: EngineDialect) -> int:
    """Requests to hold at most; where the engine shows no queue, as many as it runs at once."""
    if config.outstanding_max is not None:
        return config.outstanding_max
    if config.batch_max is None:
        return kind.outstanding_max
    known = max(config.batch_max, kind.outstanding_max if kind.has_metrics else 0)
    return min(known, OUTSTANDING_MAX_MOST)


async def _report(manager: ServiceManager, agent: Agent) -> None:
    """Serving begins with the first heartbeat, whether or not the engine answers yet."""
    await agent.announced.wait()
    manager.report_ready()
    await manager.keep_reporting(agent.status)


async def _write_ready_file(path: str | None, ready: asyncio.Event) -> None:
    await ready.wait()
    if path is not None:
        write_ready_file(Path(path), {"ready": True})
