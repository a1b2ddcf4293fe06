"""The agent as a function: `run(config, clock, epoch, stop)`."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from nats.aio.client import Client

from agents.adapters.bus import AgentBus
from agents.adapters.engine import Engine
from agents.adapters.kinds import KINDS, EngineKind
from agents.adapters.link import Link
from agents.adapters.own_name import OwnName
from agents.adapters.standing import Standing
from agents.config import OUTSTANDING_MAX_MOST, AgentConfig
from agents.core.agent import AgentCore
from agents.core.beat import Replica
from agents.runtime.agent import Agent
from agents.runtime.metrics import serve_metrics
from infra import bus
from infra.ending import end_all
from schemas import subjects


@dataclass(frozen=True, slots=True)
class Stop:
    """How a process is asked to end: `drain` first, `at_once` when patience is over."""

    drain: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self) -> None:
        """The first time: drain. The second time: at once."""
        (self.at_once if self.drain.is_set() else self.drain).set()


async def run(config: AgentConfig, clock: Callable[[], float], epoch: int, stop: Stop) -> None:
    """Serve one engine's work from the bus until `stop`.

    `epoch` must rise with every start. Raises BusUnreachable, or a group of it, when there is no
    bus to serve from or it does not let us, and NameTaken when another agent has this name; an
    engine that is not there yet is waited for.
    """
    async with AsyncExitStack() as opened:
        standing = Standing(config.region, config.replica)
        name = OwnName(config.region, config.replica, epoch, clock)
        link = Link()
        client = await _connected(config, standing, name, link)
        opened.push_async_callback(bus.close, client)
        await name.take(client)
        engine = Engine(
            api_url=config.engine_url,
            metrics_url=config.metrics_page,
            kind=KINDS[config.engine_kind],
            clock=clock,
            key=None if config.engine_key is None else config.engine_key.get_secret_value(),
            models=config.models,
            asks_batch_max=config.batch_max is None,
        )
        opened.callback(engine.close)
        ears = AgentBus(client, link, config.region, config.replica)
        async with asyncio.TaskGroup() as tasks:
            agent = Agent(config, AgentCore(_replica(config, epoch)), ears, engine, clock, tasks)
            if config.metrics_port:
                await serve_metrics(
                    opened, config.metrics_host, config.metrics_port, agent.heartbeat, ears
                )
            await ears.listen(agent.feed, agent.credit)
            standing.check()
            background = [
                tasks.create_task(standing.hold()),
                tasks.create_task(name.hold()),
                tasks.create_task(agent.keep_time()),
                tasks.create_task(agent.read_engine()),
                tasks.create_task(agent.keep_working()),
                tasks.create_task(link.tell(agent.feed)),
                tasks.create_task(ears.outbox.run()),
                tasks.create_task(_tell_ready(config.ready_file, agent.ready)),
            ]
            try:
                await stop.drain.wait()
                await agent.drain(config.drain_timeout_s, stop.at_once)
            finally:  # the group itself cancels only once, and a cancel can get lost
                await end_all(background)
                await agent.cut()


async def _connected(config: AgentConfig, standing: Standing, name: OwnName, link: Link) -> Client:
    def back() -> None:
        name.back()
        link.back()

    password = config.nats_password
    address = bus.BusAddress(
        config.nats_url,
        config.nats_user,
        None if password is None else password.get_secret_value(),
    )
    return await bus.connect(
        address,
        name=f"agent {config.region}/{config.replica}",
        inbox_prefix=subjects.inbox_prefix(config.region, config.replica),
        on_error=standing.complained,
        on_lost=link.lost,
        on_back=back,
    )


def _replica(config: AgentConfig, epoch: int) -> Replica:
    kind = KINDS[config.engine_kind]
    return Replica(
        region=config.region,
        replica=config.replica,
        epoch=epoch,
        engine=config.engine_kind,
        outstanding_max=outstanding_max(config, kind),
        heartbeat_s=config.heartbeat_ms / 1000,
        batch_max=config.batch_max,
        residency=config.residency,
        counts_own=not kind.has_metrics,
    )


def outstanding_max(config: AgentConfig, kind: EngineKind) -> int:
    """Requests to hold at most; where the engine shows no queue, as many as it runs at once."""
    if config.outstanding_max is not None:
        return config.outstanding_max
    if config.batch_max is None:
        return kind.outstanding_max
    known = max(config.batch_max, kind.outstanding_max if kind.has_metrics else 0)
    return min(known, OUTSTANDING_MAX_MOST)


async def _tell_ready(path: str | None, ready: asyncio.Event) -> None:
    """Write the ready file when the replica first takes work."""
    await ready.wait()
    if path is not None:
        whole = Path(path + ".part")
        whole.write_bytes(orjson.dumps({"ready": True}))
        whole.rename(path)
