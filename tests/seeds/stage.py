"""Plays a world: starts its processes, lets its lines happen, tells a judge what was seen."""

import asyncio
import contextvars
import gc
import logging
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import infra.bus
import mesh.adapters.bus
from agents.config import AgentConfig
from agents.core.replica_config import AdapterSource
from agents.runtime import process as agent_process
from agents.runtime.agent import Agent
from infra.batch_table import BatchTable
from infra.bus import BusAddress
from infra.tenant_table import TenantTable, key_hash, listed_callers
from mesh.core.gossip import publisher
from mesh.core.model.model_targets import ModelRule
from mesh.core.model.settings import RouterSettings
from mesh.core.offline.settings import OfflineSettings
from mesh.http.form_parts import model_place
from mesh.http.large_bodies import LargeBodies
from mesh.http.read_request import read_fields
from mesh.runtime import batch_runner, ticks
from mesh.runtime import router as router_process
from mesh.runtime.batch_runner import RunnerConfig
from mesh.runtime.config import BatchAccess, RouterConfig
from mesh.runtime.router import Router
from schemas import subjects
from schemas.control import RegionControl, encode_control
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.kv_transfer import TransferKind
from schemas.limits import LimitsTable
from schemas.residency import Ground, ground, parse_labels
from schemas.settings import parse_pushing
from tests.seeds.bus import BATCH_USER, PAYLOAD_MAX, Bus, Message
from tests.seeds.clients import Client
from tests.seeds.engine import GOOD, Engine
from tests.seeds.jobs import Job
from tests.seeds.kv_events import KvCache, Source
from tests.seeds.loop import Process, VirtualLoop, this_process
from tests.seeds.sockets import Sockets
from tests.seeds.world import ANY, HEALS_S, Line, World
from tests.support.batch_mesh import EASY

UNIX_S = 1_800_000_000.0
LARGE_S = 0.02  # until a large body is read
RESTART_S = 1.0  # of a process that ended by itself, by its supervisor
JOBS_S = 120.0  # for batch jobs, without a token: lines of a dead runner are free after 30
TAIL_S_MAX = 1000.0  # of a world after its last fault
QUIET_S = 1.5  # after the last client
PROFILES = {  # "tight": two at once, two more wait
    "easy": EASY,
    "tight": replace(
        EASY,
        computing=(0.01, 1e-9, 1e-9, 0.0, 0.0, 1e-9, 5e-3),
        waiting=(0.01, 0.0, 1e-9, 0.0, 0.0, 0.0, 5e-3),
        latency_budget_s=0.022,
        queued_requests_max=2,
    ),
}
# Of prefix gossip, where a world wants so: few deltas are repeated, and sets have many parts.
GOSSIP = ((publisher, "LOG_DELTAS_MAX", 2), (publisher, "PART_BLOCKS_MAX", 64))


class Host:
    """Where one router or agent runs, and is started again. `part`: its Router or Agent's core."""

    def __init__(self, stage: "Stage", name: str, run: Callable[["Host"], Any]) -> None:
        self.stage, self.name, self._run = stage, name, run
        self.process: Process | None = None
        self.starts: list[float] = []
        self.part: Any = None
        self.stop: Any = None
        self.why_ended = ""
        self.is_wanted = True

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive

    @property
    def epoch(self) -> int:
        return int(self.stage.wall(self.name) * 1000)

    def start(self) -> None:
        if self.is_wanted and not self.is_alive:
            self.starts.append(self.stage.loop.time())
            self.process = process = Process(self.stage.loop, self.name)
            process.do(lambda: self.stage.loop.create_task(self._supervised(process)))

    async def _supervised(self, process: Process) -> None:
        try:
            await self._run(self)
            self.why_ended = "left"
        except (Exception, BaseExceptionGroup) as problem:
            self.why_ended = repr(problem)
            self.stage.seen.exits.append((self.stage.loop.time(), self.name, repr(problem)))
        process.kill()
        self.stage.after(RESTART_S, self.start)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.part = None


@dataclass
class Seen:
    """What clients, engines, the bus' watcher and operators saw. `errors`: logged, or of tasks."""

    world: World
    ground: Ground
    clients: list[Client] = field(default_factory=list)
    engines: dict[str, Engine] = field(default_factory=dict)
    orders: list[tuple[float, Line, bool]] = field(default_factory=list)  # acknowledged
    looks: list[tuple[float, Line, dict[tuple[str, str], str]]] = field(default_factory=list)
    crossed: list[tuple[float, int, str]] = field(default_factory=list)  # prompts, into a region
    exits: list[tuple[float, str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    routers: dict[str, Host] = field(default_factory=dict)
    agents: dict[str, Host] = field(default_factory=dict)
    runners: dict[str, Host] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)

    @property
    def hosts(self) -> dict[str, Host]:
        return self.routers | self.agents | self.runners

    ended_at: float = 0.0
    steps: int = 0
    queries: list[str] = field(default_factory=list)


class Errors(logging.Handler):
    def __init__(self, seen: Seen) -> None:
        super().__init__(logging.ERROR)
        self._seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        why = "" if record.exc_info is None else f": {record.exc_info[1]!r}"
        self._seen.errors.append(record.getMessage()[:300] + why)


class Stage:
    """One run of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loop = loop = VirtualLoop()
        self.outside = contextvars.copy_context()
        self.dice = Random(f"stage {world.seed}")
        regions = {line.of["name"]: line for line in world.all("region")}
        far = {name: line.number("far") for name, line in regions.items()}
        self.bus = Bus(loop, Random(f"bus {world.seed}"), far)
        self.bus.delivered = self._delivered
        self.sockets = Sockets(loop, Random(f"sockets {world.seed}"))
        self.clock_steps: dict[str, float] = {}
        self.drains: dict[str, list[Line]] = {name: [] for name in regions}
        self.routing: dict[str, str] = {}
        self.ground = self._ground(regions)
        self.tenants = {line.of["name"]: tenant(line) for line in world.all("tenant")}
        self.seen = Seen(world, self.ground)
        [self.options] = [line.of for line in world.all("mesh")] or [{}]
        for server in self.bus.servers.values():
            server.payload_bytes_max = int(self.options.get("payload_max", PAYLOAD_MAX))
        for name, line in regions.items():
            for number in range(int(line.number("routers"))):
                router = f"{name}.r{number + 1}"
                self.seen.routers[router] = Host(self, router, self._run_router)
        for line in world.all("runner"):
            self.seen.runners[line.of["name"]] = Host(self, line.of["name"], self._run_runner)
        self.lines = {line.of["name"]: line for line in world.all("replica")}
        for name, line in self.lines.items():
            dice = Random(f"{name} {world.seed}")
            self.seen.engines[name] = engine = Engine(loop, dice, name, line.of["model"])
            engine.slots = int(line.number("slots", 8))
            engine.keeps_responses = "responses" in line.of
            engine.tells_kv = "kv_events" in line.of
            engine.prefill_us = line.number("prefill_us")
            engine.role, engine.kind = line.of.get("role", ""), engine_kind(line)
            engine.fetch = self._fetched
            self.seen.agents[name] = Host(self, name, self._run_agent)

    def _fetched(self, name: str) -> int | None:
        """Of which request that KV cache is, if its engine still has it."""
        engine = self.seen.engines[name.split(".")[0]]
        return engine.kept.get(name) if engine.process.is_alive else None

    def _kv_cache(self, address: str) -> KvCache | None:
        engine = self.seen.engines[address.removeprefix("tcp://").split(":")[0]]
        return engine.cache if engine.process.is_alive else None

    def _ground(self, regions: dict[str, Line]) -> Ground:
        if not any("labels" in line.of for line in regions.values()):
            return Ground()
        carried = {
            RegionId(name): parse(line.of.get("labels", "")) for name, line in regions.items()
        }
        confined = {
            RegionId(name): parse(line.of["confined"])
            for name, line in regions.items()
            if line.of.get("confined")
        }
        return ground(carried, confined)

    def wall(self, name: str) -> float:
        """The wall clock of a process."""
        region = name.split(".")[0].split("-")[0]
        return UNIX_S + self.loop.time() + self.clock_steps.get(region, 0.0)

    def after(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        """Outside all processes."""
        self.at(self.loop.time() + delay_s, call, *args)

    def at(self, when: float, call: Callable[..., object], *args: object) -> None:
        self.loop.call_at(when, call, *args, context=self.outside)

    # Processes.

    def settings(self) -> RouterSettings:
        of = self.options
        given: dict[str, Any] = {"ground": self.ground, "policy": of.get("policy", "mesh")}
        if "pushing" in of:
            given["pushing"] = parse_pushing(of["pushing"])
        if "queue_delay_s_max" in of:
            given["queue_delay_s_max"] = float(of["queue_delay_s_max"])
        if "alias" in of:
            shares = tuple((ModelId(name), 1.0) for name in of["alias"].split(","))
            given["models"] = (ModelRule(name=ModelId(ANY), to=shares),)
        given["tenant_weights"] = tuple((name, one.weight) for name, one in self.tenants.items())
        for name, read in (("hops_max", int), ("hold_s_max", float)):
            if name in of:
                given[name] = read(of[name])
        if of.get("digests_ms", "250") != "100":  # which costs half as much to play
            given |= {"digest_s": 0.25, "digest_late_s": 0.9, "digest_lost_s": 2.5}
        return RouterSettings(**given)

    async def _run_router(self, host: Host) -> None:
        region, name = host.name.split(".")
        others = tuple(RegionId(each) for each in self.bus.servers if each != region)
        config = RouterConfig(
            region=RegionId(region),
            router=RouterId(name),
            peers=others,
            http_host=host.name,
            http_port=80,
            bus=BusAddress(f"nats://{region}"),
            settings=self.settings(),
            batch=BatchAccess(BusAddress(f"nats://{region}", BATCH_USER), BatchTable())
            if self.seen.runners
            else None,
            keys=listed_callers(self.tenants),
            tenants=self.tenants,
            hash_key="k",
            epoch=host.epoch,
            seed=self.dice.randrange(1 << 30),
            drain_s=3.0,
        )
        host.stop = asyncio.Event()

        def ready(router: Router) -> None:
            host.part = router

        await router_process.run(config, host.stop, ready)

    async def _run_runner(self, host: Host) -> None:
        region, name = host.name.split(".")
        url = f"nats://{region}"
        config = RunnerConfig(
            region=RegionId(region),
            router=RouterId(name),
            peers=tuple(RegionId(each) for each in self.bus.servers if each != region),
            bus=BusAddress(url),
            store=BusAddress(url, BATCH_USER),
            limits=BatchTable(),
            settings=OfflineSettings(ground=self.ground, drain_s_max=3.0),
            hash_key="k",
            epoch=host.epoch,
            seed=self.dice.randrange(1 << 30),
            tenants=self.tenants,
        )
        host.stop = asyncio.Event()
        await batch_runner.run(config, host.stop)

    async def _run_agent(self, host: Host) -> None:
        line = self.lines[host.name]
        labels: Any = line.of.get("labels")
        of_pair: Any = line.of.get("role")
        adapters = {ModelId(name): AdapterSource(f"/{name}") for name in line.labels("adapters")}
        of = self.options
        config = AgentConfig(
            region=RegionId(line.of["region"]),
            replica=ReplicaId(host.name),
            nats_url=f"nats://{line.of['region']}",
            engine_kind=engine_kind(line),
            engine_url=f"http://engine.{host.name}",
            metrics_port=0,
            read_interval_ms=int(of.get("reads_ms", 50)),
            heartbeat_ms=int(of.get("beats_ms", 100)),
            drain_timeout_s=3.0,
            residency=labels,
            role=of_pair,
            kv_transfer=TransferKind(line.of.get("kv", "nixl")) if of_pair else None,
            kv_address=f"{host.name}:1" if of_pair == "prefill" and "kv" in line.of else None,
            profile=PROFILES[line.of.get("offline", "easy")]
            if self.seen.runners and of_pair is None
            else None,
            adapters=adapters,
            kv_events=f"tcp://{host.name}:1" if "kv_events" in line.of else None,
            load_adapters=1 if adapters else None,
            speed_probe="probes" in line.of,
        )
        host.stop = agent_process.Stop()
        await agent_process.run(config, self.loop.time, host.epoch, host.stop)

    def _agent(self, *args: Any) -> Agent:
        """An agent has begun."""
        agent, process = Agent(*args), this_process()
        for host in self.seen.agents.values():
            if host.process is process:
                host.part = agent
        return agent

    # The play.

    async def play(self) -> None:
        world, loop = self.world, self.loop
        for host in self.seen.hosts.values():
            self.at(self.dice.random() * 0.3, host.start)
        for line in world.faults:
            self.at(line.at, self._begin, line)
            if "for" in line.of:
                self.at(line.ends_at, self._end, line)
        for ask in world.asks:
            self.at(ask.at, self._ask, ask)
        for line in world.all("job"):
            self.seen.jobs.append(job := Job(loop, self.sockets, line))
            self.at(line.at, lambda job: loop.create_task(job.run()), job)
        last = max([line.ends_at for line in world.lines], default=0.0)
        await asyncio.sleep(max(last, world.healed_at + HEALS_S))
        patience_s, said, until = JOBS_S if self.seen.jobs else 60.0, -1, 0.0
        ends_at = loop.time() + TAIL_S_MAX
        while not self._all_have_ended():
            if self._said() > said:  # an engine of one place may take long for all
                said, until = self._said(), loop.time() + patience_s
            if loop.time() >= min(until, ends_at):
                break
            await asyncio.sleep(0.5)
        await asyncio.sleep(QUIET_S)
        self.seen.ended_at = loop.time()
        self.seen.errors += loop.problems

    def _all_have_ended(self) -> bool:
        clients = all(client.outcome is not None for client in self.seen.clients)
        return clients and all(job.is_read for job in self.seen.jobs)

    def _said(self) -> int:
        """Tokens of all engines."""
        engines = self.seen.engines.values()
        return sum(answer.tokens for engine in engines for answer in engine.answers)

    def _ask(self, ask: Line) -> None:
        before = (one for one in self.seen.clients if one.ask.of["n"] == ask.of.get("previous"))
        client = Client(self.loop, ask, next(before, None))
        self.seen.clients.append(client)
        client.open(self.sockets)

    def _delivered(self, message: Message, client: Any) -> None:
        self.seen.steps += 1
        if b'"n=' in message.data:
            begin = message.data.index(b'"n=') + 3
            number = int(message.data[begin : message.data.index(b" ", begin)])
            self.seen.crossed.append((self.loop.time(), number, client.server.region))

    # What goes wrong.

    def _begin(self, line: Line) -> None:
        getattr(self, f"_{line.what}")(line, is_begin=True)

    def _end(self, line: Line) -> None:
        getattr(self, f"_{line.what}")(line, is_begin=False)

    def _engine(self, line: Line) -> Engine | None:
        return self.seen.engines.get(line.of["replica"])

    def _engine_mode(self, line: Line, *, is_begin: bool) -> None:
        if (engine := self._engine(line)) is not None:
            engine.mode = line.of["mode"] if is_begin else GOOD
            if not is_begin:
                for connection in list(engine.open):
                    if engine.open[connection].was_bad:
                        connection.transport.abort()

    def _engine_dies(self, line: Line, *, is_begin: bool) -> None:
        if (engine := self._engine(line)) is not None:
            if is_begin:
                engine.kill()
            elif not engine.process.is_alive:
                engine.start()

    def _engine_model(self, line: Line, *, is_begin: bool) -> None:
        """Another engine, with another model, has its place."""
        if (engine := self._engine(line)) is not None:
            engine.kill()
            engine.model = line.of["model"] if is_begin else self.lines[engine.name].of["model"]
            engine.start()

    def _engine_stops(self, line: Line, *, is_begin: bool) -> None:
        if (engine := self._engine(line)) is not None:
            engine.process.stop() if is_begin else engine.process.go_on()

    def _host(self, line: Line) -> Host | None:
        of = line.of
        return self.seen.hosts.get(of.get("router") or of.get("runner") or of["replica"])

    def _dies(self, line: Line, *, is_begin: bool) -> None:
        if (host := self._host(line)) is not None:
            host.is_wanted = not is_begin
            host.kill() if is_begin else host.start()

    def _stops(self, line: Line, *, is_begin: bool) -> None:
        host = self._host(line)
        if host is not None and host.process is not None:
            host.process.stop() if is_begin else host.process.go_on()

    def _leaves(self, line: Line, *, is_begin: bool) -> None:
        host = self._host(line)
        if host is None:
            return
        host.is_wanted = not is_begin
        if not is_begin:
            host.start()
        elif host.process is not None and host.is_alive and host.stop is not None:
            stop = host.stop.set if isinstance(host.stop, asyncio.Event) else host.stop.request
            host.process.do(stop)

    def _namesake(self, line: Line, *, is_begin: bool) -> None:
        """A second process of its name starts."""
        host = self._host(line)
        if host is None:
            return
        if is_begin:
            twin = Host(self, host.name, host._run)
            other = twin.process = Process(self.loop, f"{host.name} again")
            host.namesake = twin  # type: ignore[attr-defined]
            host.is_wanted = True

            async def run() -> None:
                try:
                    await twin._run(twin)
                except (Exception, BaseExceptionGroup) as problem:
                    twin.why_ended = repr(problem)
                other.kill()

            other.do(lambda: self.loop.create_task(run()))
        elif (found := getattr(host, "namesake", None)) is not None:
            found.kill()

    def _stray_work(self, line: Line, *, is_begin: bool) -> None:
        """Work that none of its routers sent: it may be answered nowhere, or can't be read."""
        region = line.of["replica"].split("-")[0]
        subject = subjects.work(region, line.of["replica"])
        for reply in ("$JS.API.INFO", subjects.inbox(region, "r1", 1 << 40)):
            headers = {"Mesh-Path": "/v1/chat/completions", "Mesh-Deadline-Ms": "soon"}
            self.bus.carry(None, Message(subject, reply, headers, b"{}"), region)

    _agent_dies = _router_dies = _runner_dies = _dies
    _agent_stops = _router_stops = _runner_stops = _stops
    _agent_leaves = _router_leaves = _runner_leaves = _leaves
    _agent_namesake = _router_namesake = _namesake

    def _link(self, line: Line) -> tuple[str, str] | None:
        ends = line.of["one"], line.of["other"]
        return ends if ends in self.bus.links else None

    def _cut(self, line: Line, *, is_begin: bool) -> None:
        if (ends := self._link(line)) is not None:
            self.bus.cut(*ends, is_cut=is_begin)
            self.bus.cut(*reversed(ends), is_cut=is_begin)

    def _cut_one_way(self, line: Line, *, is_begin: bool) -> None:
        if (ends := self._link(line)) is not None:
            self.bus.cut(*ends, is_cut=is_begin)

    def _flap(self, line: Line, *, is_begin: bool) -> None:
        """The leaf connection is lost, and both servers know it at once."""
        if (ends := self._link(line)) is not None:
            for way in (ends, (ends[1], ends[0])):
                self.bus.links[way].cut_at = float("-inf") if is_begin else None

    def _stall(self, line: Line, *, is_begin: bool) -> None:
        if is_begin and (ends := self._link(line)) is not None:
            for way in (ends, (ends[1], ends[0])):
                self.bus.links[way].stalls_until = line.ends_at

    def _lossy(self, line: Line, *, is_begin: bool) -> None:
        if (ends := self._link(line)) is not None:
            self.bus.links[ends].lost = 0.15 if is_begin else 0.0

    def _late(self, line: Line, *, is_begin: bool) -> None:
        if (ends := self._link(line)) is not None:
            self.bus.links[ends].jitter_s = 0.1 if is_begin else 0.0

    def _bus_restarts(self, line: Line, *, is_begin: bool) -> None:
        if line.of["region"] in self.bus.servers:
            (self.bus.down if is_begin else self.bus.up)(line.of["region"])

    def _bus_hangs(self, line: Line, *, is_begin: bool) -> None:
        if is_begin and line.of["region"] in self.bus.servers:
            self.bus.servers[line.of["region"]].hangs_until = line.ends_at

    def _store_empties(self, line: Line, *, is_begin: bool) -> None:
        if is_begin and line.of["region"] in self.bus.servers:
            self.bus.down(line.of["region"])
            self.bus.servers[line.of["region"]].empty()
        elif line.of["region"] in self.bus.servers:
            self.bus.up(line.of["region"])

    def _streams_stop(self, line: Line, *, is_begin: bool) -> None:
        if line.of["region"] in self.bus.servers:
            self.bus.servers[line.of["region"]].has_streams = not is_begin

    def _clock_steps(self, line: Line, *, is_begin: bool) -> None:
        if is_begin:
            region = line.of["region"]
            self.clock_steps[region] = self.clock_steps.get(region, 0.0) + line.number("by")

    # Operators.

    def _drain(self, line: Line, *, is_begin: bool) -> None:
        drains = self.drains.get(line.of["region"])
        if drains is None:
            return
        if is_begin:
            drains.append(line)
        else:
            states = self._states(line.of["region"], line.of.get("replica", ""))
            self.seen.looks.append((self.loop.time(), line, states))
            drains.remove(line)
        self._order(line, is_begin)

    def _states(self, region: str, replica: str) -> dict[tuple[str, str], str]:
        """What an operator sees of that region's replicas (or that one), at each of its routers."""
        return {
            (name, str(one.heartbeat.replica)): one.heartbeat.state
            for name, host in self.seen.routers.items()
            if name.startswith(f"{region}.") and host.is_alive and host.part is not None
            for one in host.part.core.replicas
            if one.heartbeat.region == region and replica in ("", one.heartbeat.replica)
        }

    def _routing(self, line: Line, *, is_begin: bool) -> None:
        region = line.of["region"]
        if is_begin:
            self.routing[region] = line.of["policy"]
        else:
            self.routing.pop(region, None)
        if region in self.drains:
            self._order(line, is_begin)

    def _order(self, line: Line, is_begin: bool) -> None:
        """As `mesh drain` writes it, again every half second until it is acknowledged."""
        region = line.of["region"]
        drains = self.drains[region]
        held = {one.of.get("replica", "") for one in drains}
        moved = {one.of.get("replica", "") for one in drains if "move" in one.of}
        policy = self.routing.get(region)
        record = RegionControl(
            region=RegionId(region),
            drained=tuple(ReplicaId(name) for name in sorted(held - {""})),
            all_drained="" in held,
            moved=tuple(ReplicaId(name) for name in sorted(moved - {""})),
            all_moved="" in moved,
            routing={} if policy is None else {"policy": policy},
            at_unix_s=self.wall(region),
        )
        message = Message(subjects.control(region), "", None, encode_control(record))
        if self.bus.write(region, message):
            self.seen.orders.append((self.loop.time(), line, is_begin))
        else:
            self.after(0.5, self._order, line, is_begin)

    @contextmanager
    def outside_is_ours(self) -> Iterator[None]:
        """In place of clocks, chance and the bus' client for as long as it lasts."""
        chance = Random(f"chance {self.world.seed}")

        def wall() -> float:
            process = this_process()
            return self.wall("" if process is None else process.name)

        ours: list[tuple[Any, str, Any]] = [
            (mesh.adapters.bus, "connect", self.bus.connect),
            (infra.bus, "connect", self.bus.connect),
            (agent_process, "Agent", self._agent),
            (agent_process, "KvEventSource", Source),
            (Source, "find", self._kv_cache),
            (LargeBodies, "_ask", read_large),
            (ticks, "TICK_S", float(self.options.get("ticks_ms", 100)) / 1000),
            (random, "uniform", chance.uniform),
            (os, "urandom", chance.randbytes),
            (secrets, "token_bytes", chance.randbytes),
            (secrets, "token_hex", lambda count: chance.randbytes(count).hex()),
            (time, "monotonic", self.loop.time),
            (time, "time", wall),
            (time, "time_ns", lambda: int(wall() * 1e9)),
            (sys, "unraisablehook", lambda problem: None),  # of what was killed inside `finally`
        ]
        ours += GOSSIP if "gossip" in self.options else ()
        kept = [(module, name, getattr(module, name)) for module, name, _ in ours]
        root, handler = logging.getLogger(), Errors(self.seen)
        level = root.level
        root.addHandler(handler)
        logging.disable(logging.WARNING)
        for module, name, value in ours:
            setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, value in kept:
                setattr(module, name, value)
            logging.disable(logging.NOTSET)
            root.setLevel(level)
            root.removeHandler(handler)


def parse(text: str) -> Any:
    return parse_labels(text) if text else ()


async def read_large(_: LargeBodies, path: str, body: bytes, content_type: str) -> Any:
    """In place of the process that reads them."""
    await asyncio.sleep(LARGE_S)
    fields = read_fields(path, body, content_type)
    return replace(fields, model_place=model_place(body, content_type))


def engine_kind(line: Line) -> Any:
    return "sglang" if line.of.get("kv") == "sglang" else "vllm"


def tenant(line: Line) -> TenantTable:
    """Its one API key is its name."""
    name, of = line.of["name"], line.of
    limits = {"requests_per_minute": of.get("requests"), "concurrent_requests": of.get("at_once")}
    given = {limit: int(most) for limit, most in limits.items() if most is not None}
    labels = line.labels("labels")
    return TenantTable(
        key_sha256=(key_hash(name),),
        weight=line.number("weight", 1.0),
        limits=LimitsTable(**given) if given else None,
        **({"residency": labels} if labels else {}),
    )


def play(world: World, judge: Callable[[Seen], Any]) -> Any:
    """What the judge says at the end, while all still stands."""
    stage = Stage(world)
    loop = stage.loop
    gc.disable()
    try:
        with stage.outside_is_ours():
            main = loop.create_task(stage.play())
            loop.run_until_complete(main)
            found = judge(stage.seen)
            for task in asyncio.all_tasks(loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            for host in stage.seen.hosts.values():
                host.kill()
            loop.close()
            del stage, loop, main
            gc.collect()
    finally:
        gc.enable()
    return found
