"""One of a region's three nats-servers is restarted, killed, or hangs, in turn, under load.

    make drills                     # with the other drills; QUICK=1: one round of each
    python -m tests.programs.bus_drill --rounds 20 --before PATH/TO/nats-server-2.14.6

Two regions of three nats-servers each, twenty streams and plain requests under way at any time in
both, and a batch job in us whose lines are answered meanwhile. Engines stamp every token, so a
mixed answer, a gap and a repetition show. A request must end whole, or, once its stream has begun,
with one error event; nothing may be refused; every line of the job is answered exactly once; a
replica that was drained before stays drained, and no region is adopted. With `--before` the servers
begin with that program, and the first restarts are the upgrade. Then us is drained: its requests
are forwarded to eu, whose servers fail as often.

The same load is first measured on regions of one server each: CPU of us's servers beside it.
"""

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import click
import uvloop

from infra import bus, topology
from infra.nats import server
from mesh.adapters.operator_orders import ORDERS, DrainTarget
from mesh.demo.local_mesh import LocalMesh
from mesh.demo.options import DemoOptions, fitted
from mesh.demo.session import served_models
from mesh.demo.state_directory import StateDirectory
from mesh.doctor.logins import read_logins
from schemas import subjects
from schemas.ids import RegionId, ReplicaId
from tests.programs.batch_jobs.job import JobClient, input_file
from tests.programs.bench.proc import cpu_s
from tests.programs.fault_run.breaking import Breakable
from tests.programs.fault_run.clients import Clients, Request, Router
from tests.programs.fault_run.reading import End
from tests.support.mesh_up import write_config
from tests.support.result_page import result_page

HOME, DRAINED = RegionId("us"), ReplicaId("us-2")
AWAY = RegionId("eu")
REGIONS = (HOME, AWAY)
REPLICAS = 3
SERVERS = 3
STREAMS = 20
TOKENS = (16, 256)
TIME_SCALE = 4.0
HUNG_S = 5.0
MEASURED_S = 20.0
BACK_WITHIN_S = 60.0
JOB_WITHIN_S = 3600.0
PAUSE_S_MAX = 2.0


class Kind(StrEnum):
    RESTARTED = "restarted"
    KILLED = "killed"
    HUNG = f"hung for {HUNG_S:g} s"


@dataclass
class Found:
    """What happened, by kind of fault."""

    requests: dict[str, list[Request]] = field(default_factory=dict)
    rounds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    cpu: dict[int, float] = field(default_factory=dict)  # servers → share of a core, of us's


class Drill:
    """One mesh at work."""

    def __init__(self, broken: Breakable, mesh: LocalMesh, clients: Clients, found: Found) -> None:
        self._broken, self._mesh, self._clients, self._found = broken, mesh, clients, found
        self._read = 0

    def names(self, region: str) -> list[str]:
        return sorted(name for name in self._mesh.pids if name.startswith(f"nats-{region}"))

    async def measure(self, servers: int) -> None:
        """The CPU of us's nats-servers at this load."""
        pids = [self._mesh.pids[name] for name in self.names(HOME)]
        began, before = time.monotonic(), cpu_s(pids)
        await asyncio.sleep(MEASURED_S)
        self._found.cpu[servers] = (cpu_s(pids) - before) / (time.monotonic() - began)
        self.account("before any fault")

    def account(self, spell: str) -> None:
        """What has ended since is this one's."""
        ended = self._clients.requests[self._read :]
        self._read += len(ended)
        self._found.requests.setdefault(spell, []).extend(ended)

    async def rounds(self, region: RegionId, rounds: int) -> None:
        """So many of each kind at the region's servers."""
        turn = itertools.cycle(self.names(region))
        for number in range(rounds):
            for kind in Kind:
                name = next(turn)
                await self.fault(kind, name, region)
                click.echo(f"{number + 1}: {name} {kind}: {_worst(self._found)}", err=True)
            next(turn)  # else each server would have one kind of fault for ever

    async def fault(self, kind: Kind, name: str, region: RegionId) -> None:
        """Do it, and wait until the server is back and its copies are as the others'."""
        pid = self._mesh.pids[name]
        if kind is Kind.HUNG:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(HUNG_S)
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(pid, signal.SIGKILL if kind is Kind.KILLED else signal.SIGTERM)
            async with asyncio.timeout(BACK_WITHIN_S):
                while self._mesh.pids.get(name, pid) == pid:
                    await asyncio.sleep(0.05)
        await self._until_in_step(region)
        spell = f"{region}: {kind}"
        self._found.rounds[spell] += 1
        self.account(spell)

    async def _until_in_step(self, region: RegionId) -> None:
        address = read_logins(self._mesh._topology, self._mesh._state.config)[region].system
        assert address is not None
        client = await bus.connect(address, name="drill", inbox_prefix=subjects.INBOX_ROOT)
        try:
            until = time.monotonic() + BACK_WITHIN_S
            while not await _in_step(client):
                if time.monotonic() > until:
                    self._found.problems.append(f"not in step within {BACK_WITHIN_S:g} s")
                    return
                await asyncio.sleep(0.2)
        finally:
            await bus.close(client)


async def _in_step(client: bus.BusClient) -> bool:
    """Whether every server answers, and each copy of a stream is current."""
    inbox = client.new_inbox()
    replies = await client.subscribe(inbox)
    body = json.dumps({"accounts": True, "streams": True}).encode()
    await client.publish("$SYS.REQ.SERVER.PING.JSZ", body, reply=inbox)
    try:
        reports = [await replies.next_msg(timeout=2.0) for _ in range(SERVERS)]
    except TimeoutError:
        return False
    finally:
        await replies.unsubscribe()
    led: dict[str, list[dict[str, Any]]] = {}  # streams, as their leaders see the other copies
    known: set[str] = set()
    for report in (json.loads(each.data) for each in reports):
        for account in report["data"].get("account_details") or ():
            for stream in account.get("stream_detail") or ():
                known.add(stream["name"])
                if stream["cluster"].get("leader") == report["server"]["name"]:
                    led[stream["name"]] = stream["cluster"].get("replicas") or []
    copies = [copy for replicas in led.values() for copy in replicas]
    return known == led.keys() and all(
        copy.get("current") and not copy.get("offline") for copy in copies
    )


async def on_mesh(
    directory: Path, servers: int, found: Found, work: Callable[[Drill, str, str], Awaitable[None]]
) -> None:
    """Start a mesh with so many nats-servers a region, and its clients; then `work`."""
    directory.mkdir()
    config = write_config(
        directory, regions=REGIONS, replicas=REPLICAS, batch_runners=("batch-0",), rtt_ms={}
    )
    state = StateDirectory(directory / ".mesh")
    options = DemoOptions(
        config=config, state=state.path, time_scale=TIME_SCALE, bus_servers=servers
    )
    with state.held():
        mesh_file = fitted(topology.load(config), options)
        broken = Breakable(mesh_file, options, state)
        async with broken.mesh as mesh:
            await mesh.start()
            [model] = await served_models(mesh_file)
            routers = [
                Router(f"router-{region}", f"http://{mesh.endpoints[region]['r1']}")
                for region in mesh_file.regions
            ]
            clients, stop = Clients(routers, model, 1, TOKENS), asyncio.Event()
            drill = Drill(broken, mesh, clients, found)
            async with asyncio.TaskGroup() as group:
                group.create_task(clients.ask_until(stop, STREAMS))
                try:
                    await work(drill, routers[0].url, model)
                finally:
                    stop.set()
            drill.account("at the end")


async def play(
    directory: Path, rounds: int, lines: int, before: Path | None, measured: bool
) -> Found:
    found = Found()
    program = directory / "bin" / server.NAME
    program.parent.mkdir()
    newest = server.find()

    def install(binary: Path) -> None:
        shutil.copy(binary, program.with_suffix(".new"))
        program.with_suffix(".new").rename(program)

    install(before or newest)
    os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"

    async def quiet(drill: Drill, url: str, model: str) -> None:
        job = JobClient(url)
        await job.submit(input_file(model, lines))
        await drill.measure(1)

    async def faults(drill: Drill, url: str, model: str) -> None:
        login = read_logins(drill._mesh._topology, drill._mesh._state.config)[HOME].admin
        assert login is not None
        client = await bus.connect(login, name="drill", inbox_prefix=subjects.INBOX_ROOT)
        await ORDERS.change(client, HOME, DrainTarget(HOME, (DRAINED,)).drained)
        job = JobClient(url)
        batch = await job.submit(input_file(model, lines))
        if measured:
            await drill.measure(SERVERS)
        install(newest)  # the first restart of each is its upgrade
        await drill.rounds(HOME, rounds)
        await ORDERS.change(client, HOME, DrainTarget(HOME, None).drained)
        await drill.rounds(AWAY, rounds)
        answers = await job.answers(batch.id, 0.0, JOB_WITHIN_S)
        found.problems += [f"batch job: {one}" for one in answers.problems(lines)]
        if DRAINED not in (await ORDERS.read(client, HOME)).record.drained:
            found.problems.append("the drain was lost")
        await bus.close(client)
        adopted = [count for url in _pages(drill) if (count := await _adoptions(url))]
        found.problems += [f"regions were adopted: {count:g} times" for count in adopted]

    if measured:
        await on_mesh(directory / "one", 1, found, quiet)
    found.requests.clear()
    await on_mesh(directory / "three", SERVERS, found, faults)
    return found


def _pages(drill: Drill) -> list[str]:
    return [url for region in REGIONS for url in drill._mesh.metrics(RegionId(region)).values()]


async def _adoptions(url: str) -> float:
    async with aiohttp.ClientSession() as http, http.get(url) as page:
        lines = (await page.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("mesh_adoptions_total"))


def _worst(found: Found) -> str:
    ended = [one for many in found.requests.values() for one in many]
    ends = Counter(one.end for one in ended)
    pause_s = max((one.pause_s for one in ended), default=0.0)
    return f"{dict(ends)}, longest pause {pause_s:.2f} s"


def problems(found: Found) -> list[str]:
    """All that must not be."""
    wrong = []
    for spell, ended in found.requests.items():
        for one in ended:
            said = [*one.violations]
            if one.end is End.REFUSED:
                said.append(f"refused: {one.detail}")
            if one.end is End.WHOLE and one.pause_s > PAUSE_S_MAX:
                said.append(f"paused for {one.pause_s:.1f} s")
            wrong += [f"request {one.number} ({spell}, {one.router}): {text}" for text in said]
    return wrong + found.problems


@result_page("bus-drill", "One of three nats-servers fails")
@click.command()
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True)
@click.option("--lines", type=click.IntRange(10), default=10_000, show_default=True)
@click.option(
    "--before", type=click.Path(exists=True, path_type=Path), help="An older nats-server."
)
@click.option("--measure/--no-measure", default=True, help="CPU beside one server's.")
def main(rounds: int, lines: int, before: Path | None, measure: bool) -> None:
    """Let one of three nats-servers fail under load, and print a table; exit 1 for a problem."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        found = uvloop.run(play(Path(name), rounds, lines, before, measure))
    click.echo(f"{STREAMS} requests at a time, a batch job of {lines:,} lines.")
    click.echo(
        "Where a server of eu fails, the replicas of us are drained: all of its requests cross.\n"
    )
    click.echo("| while | rounds | requests | whole | error event | HTTP error | wrong | pause s |")
    click.echo("|---|--:|--:|--:|--:|--:|--:|--:|")
    for spell, ended in found.requests.items():
        ends = Counter(one.end for one in ended)
        pause_s = max((one.pause_s for one in ended), default=0.0)
        counts = (ends[end] for end in (End.WHOLE, End.ERROR_EVENT, End.REFUSED, End.WRONG))
        row = [spell, str(found.rounds[spell] or ""), str(len(ended)), *map(str, counts)]
        click.echo(f"| {' | '.join(row)} | {pause_s:.2f} |")
    if measure:
        one, three = found.cpu[1], found.cpu[SERVERS]
        click.echo(f"\nCPU of us's nats-servers, in cores: one {one:.3f}, three {three:.3f}: ")
        click.echo(f"{three / one:.1f} times as much.")
    wrong = problems(found)
    click.echo(
        "\n".join(["", f"{time.monotonic() - began:.0f} s, {len(wrong)} problems", *wrong[:20]])
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
