"""What real processes play of a world; why one may end; links that hold and lose; a short world."""

import asyncio
import signal
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from infra import topology
from infra.address import Address
from mesh.demo.options import DemoOptions
from mesh.demo.state_directory import StateDirectory
from mesh.supervisor.program import FileWritten, Program, ProgramKind
from mesh.supervisor.supervisor import ProgramDied
from tests.programs.fault_run import world_mesh
from tests.programs.fault_run.breaking import BY_KILL
from tests.programs.fault_run.clients import Clients
from tests.programs.fault_run.links import LATE_S, FaultyLine, FaultyWan
from tests.programs.fault_run.reading import End
from tests.programs.fault_run.run import Settings
from tests.programs.fault_run.schedule import Shape
from tests.programs.fault_run.world_mesh import WorldMesh
from tests.programs.fault_run.world_plan import PLAYED, plan_of, program_of
from tests.programs.fault_run.worlds import WorldRun, counted, play
from tests.seeds.world import parse, world_of
from tests.support.mesh_up import write_config
from tests.support.until import PATIENCE_S

WORLD = """
seed 7
0 mesh policy=least-load
0 region name=us routers=2 far=0.005
0 region name=eu routers=1 far=0.02
0 replica name=us-0 region=us model=a
0 replica name=eu-0 region=eu model=b
1.5 router_dies router=us.r2 for=1
1.6 agent_namesake replica=us-0 for=2
1.7 drain region=eu replica=eu-0 move=1 for=1
1.7 clock_steps region=us by=5 for=0
1.8 cut_one_way one=us other=eu for=0.5
2 bus_restarts region=eu for=0.5
2 engine_stops replica=eu-0 for=0.5
3 ask n=1 router=us.r1 model=a
3 agent_leaves replica=eu-0 for=0.5
"""


def test_a_plan_has_the_shape_of_its_world_and_those_faults_that_real_processes_play():
    plan = plan_of(parse(WORLD))
    assert (plan.why_not, plan.routers) == ("", {"us": ["r1", "r2"], "eu": ["r1"]})
    assert (plan.replicas, plan.streams, plan.policy) == ({"us": 1, "eu": 1}, 8, "least-load")
    assert plan.rtt_ms == {("eu", "us"): 50}
    programs = [line for line in plan.faults if line.what not in ("drain", "cut_one_way")]
    assert [(line.at, program_of(line)) for line in programs] == [
        (1.5, "router-us-r2"),
        (1.6, "agent-us-0"),
        (2, "nats-eu"),
        (2, "engine-eu-0"),
        (3, "agent-eu-0"),
    ]
    assert plan.left_out == {"clock_steps": 1}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("0 region name=ap\n0 region name=sa", "more than 3 regions"),
        *[
            (
                "".join(f"0 replica name=us-{n} region=us\n" for n in "1234"),
                "more than 12 processes",
            )
        ],
        ("0 replica name=us-1 region=us role=decode", "simulated engines make no pairs"),
    ],
)
def test_a_world_that_real_processes_do_not_play_has_a_reason(more, why):
    assert plan_of(parse(WORLD + more)).why_not == why


def test_worlds_have_every_fault_that_is_played_and_no_unknown_one_is_left_out():
    played, left_out = Counter[str](), Counter[str]()
    for seed in range(300):
        plan = plan_of(world_of(seed))
        played.update(line.what for line in plan.faults)
        left_out += plan.left_out
    assert played.keys() == PLAYED
    engines, messages = {"engine_mode", "engine_model"}, {"lossy", "stray_work"}
    runners = {"runner_dies", "runner_stops", "runner_leaves"}
    assert left_out.keys() == engines | messages | runners | {"streams_stop", "clock_steps"}


@pytest.fixture
def mesh(tmp_path):
    """One that has not started."""
    config = write_config(tmp_path, regions=("us", "eu"))
    options = DemoOptions(config=config, state=tmp_path / ".mesh")
    return WorldMesh(topology.load(config), options, StateDirectory(options.state))


def blamed(mesh, name, how, tail=""):
    """Whether it ended by itself, as the mesh is told now that it has ended."""
    region = name.split("-")[1]
    ready = FileWritten(Path("ready"))
    program = Program(name=name, kind=ProgramKind.AGENT, region=region, command=(), ready=ready)
    mesh._happened(ProgramDied(program, how, Path("log"), tail, 1.0))
    ended, mesh.ended_by_themselves = mesh.ended_by_themselves, []
    return len(ended) == 1


async def test_a_kill_is_why_a_program_ends_once(mesh):
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()  # so there is no such process
    killed = []
    mesh._kill_one("agent-us-0", gone.pid, signal.SIGCONT, killed.append)
    assert killed == ["agent-us-0"]
    assert not blamed(mesh, "agent-us-0", BY_KILL)
    assert blamed(mesh, "agent-us-0", BY_KILL), "again, before it was ready"
    assert blamed(mesh, "agent-eu-0", BY_KILL)
    mesh._kill_one("agent-us-0", gone.pid, signal.SIGCONT, killed.append)
    assert blamed(mesh, "agent-us-0", "ended with status 1"), "it failed before it was killed"


async def test_what_leaves_is_told_so_once(mesh, monkeypatch):
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    killed, name = [], "router-us-r1"
    running = SimpleNamespace(pids={name: gone.pid})
    monkeypatch.setattr(mesh, "mesh", running, raising=False)
    async with mesh._dead(name, signal.SIGTERM, killed.append):
        async with mesh._dead(name, signal.SIGTERM, killed.append):
            assert killed == [name]
        async with mesh._dead(name, signal.SIGKILL, killed.append):
            assert killed == [name, name]


@pytest.mark.parametrize(
    ("fault", "tail"),
    [
        ("agent_namesake replica=us-0", "an agent us/us-0 runs already"),
        ("bus_hangs region=us", "no bus at nats://127.0.0.1:4222"),
    ],
)
async def test_a_fault_excuses_what_it_lets_end_for_a_while(mesh, monkeypatch, fault, tail):
    [line] = parse(f"seed 1\n2 {fault} for=0").faults
    how = "ended with status 1"
    assert blamed(mesh, "agent-us-0", how, tail)
    mesh._excuse(line)
    assert not blamed(mesh, "agent-us-0", how, tail)
    assert blamed(mesh, "agent-us-0", how, "another reason")
    assert blamed(mesh, "agent-eu-0", how, tail)
    mesh._reasons.clear()
    monkeypatch.setattr(world_mesh, "EXCUSED_S", 0.0)
    mesh._excuse(line)
    assert blamed(mesh, "agent-us-0", how, tail), "too late"


async def test_a_drain_that_moves_streams_is_ordered_so(mesh, monkeypatch):
    given = []

    async def ordered(*words):
        given.append(words)

    monkeypatch.setattr(mesh, "_ordered", ordered)
    for line in parse("seed 1\n2 drain region=us replica=us-0 move=1 for=0").faults:
        await mesh.play(line, print)
    assert given == [("drain", "--move", "--timeout-s", 0, "us-0"), ("undrain", "us-0")]


async def test_a_store_is_removed_only_if_its_server_was_killed(mesh, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    async with mesh._dead("nats-us", signal.SIGKILL, print, store):
        pass
    assert store.is_dir(), "the server did not run"


async def test_a_mesh_that_does_not_start_is_a_problem_of_its_world(tmp_path):
    with StateDirectory(tmp_path / ".mesh").held():  # by another one
        [problem] = (await play(plan_of(parse(WORLD)), tmp_path)).violations
    assert problem.startswith("not played to its end:\nTraceback")


async def test_an_error_while_a_fault_is_played_is_a_problem_of_its_world(mesh):
    plan = plan_of(parse(WORLD + "2 cut one=us other=me for=0"))
    shape = Shape(regions=("us", "eu"), routers=(), replicas=0)
    settings = Settings(seed=1, shape=shape, requests=0, faults=0)
    run = WorldRun(settings, mesh, [], Clients([], "a", 1), print)
    await run._one(plan.faults[-1], 0.0)
    [problem] = run._result.violations
    assert problem.startswith("not played: ") and "ValueError" in problem


async def test_late_items_are_delayed_by_the_dice_and_only_while_the_fault_lasts():
    wan = FaultyWan(Address("127.0.0.1", 1), one_way_s=1.0, dice=Random(7))
    late, usual = FaultyLine(wan, 0), FaultyLine(wan, 1)
    async with wan.faulty("late", (0,)):
        late.push(b"one", 5.0)
        usual.push(b"one", 5.0)
    assert (late.next_due, usual.next_due) == (6.0 + Random(7).expovariate(1 / LATE_S), 6.0)
    again = FaultyLine(wan, 0)
    again.push(b"two", 5.0)
    assert again.next_due == 6.0


async def test_a_link_holds_one_way_and_loses_what_was_held_when_it_was_cut():
    came: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while data := await reader.read(10):
                came.put_nowait(data)
                writer.write(data)

    async with asyncio.timeout(PATIENCE_S), await asyncio.start_server(answer, "127.0.0.1") as far:
        wan = FaultyWan(Address(*far.sockets[0].getsockname()), one_way_s=0.0, dice=Random(1))
        async with wan:
            reader, writer = await asyncio.open_connection(*wan.address)
            with closing(writer):
                async with wan.faulty("stall", (1,)):
                    writer.write(b"one")
                    assert await came.get() == b"one"
                    while not wan.held_bytes:
                        await asyncio.sleep(0.01)
                assert await reader.read(10) == b"one"
                async with wan.faulty("cut_one_way", (0,)):
                    writer.write(b"two")
                    while not wan.held_bytes:
                        await asyncio.sleep(0.01)
                assert await reader.read(10) == b"", "the connection is lost"
            assert came.empty()
            reader, writer = await asyncio.open_connection(*wan.address)
            with closing(writer):
                writer.write(b"three")
                assert await reader.read(10) == b"three"


async def test_a_link_that_flaps_loses_its_connections_and_takes_none_until_the_last_flap_ends():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            writer.write(await reader.read(10))

    async with asyncio.timeout(PATIENCE_S), await asyncio.start_server(answer, "127.0.0.1") as far:
        wan = FaultyWan(Address(*far.sockets[0].getsockname()), one_way_s=0.0, dice=Random(1))
        async with wan:
            reader, writer = await asyncio.open_connection(*wan.address)
            with closing(writer):
                async with wan.flapping():
                    async with wan.flapping():
                        with suppress(ConnectionResetError):
                            assert await reader.read(10) == b"", "the connection is lost"
                    with pytest.raises(ConnectionRefusedError):
                        await asyncio.open_connection(*wan.address)
            reader, writer = await asyncio.open_connection(*wan.address)
            with closing(writer):
                writer.write(b"one")
                assert await reader.read(10) == b"one"


@pytest.mark.timeout(240)
async def test_a_short_world_is_played_and_every_request_ends_once(tmp_path):
    result = await play(plan_of(parse(WORLD)), tmp_path)
    assert result.violations == [], counted(result.requests)
    assert sum(one.end is End.WHOLE for one in result.requests) > 10
    logs = {log.stem: log.read_text() for log in (tmp_path / ".mesh" / "logs").glob("*.log")}
    assert "an agent us/us-0 runs already" in logs["agent-us-0-again"]
    assert "an operator drained it" in logs["agent-eu-0"]
    assert "is back" in logs["router-eu-r1"]  # the bus
