"""What real processes play of a world; links that hold and lose; one short world."""

import asyncio
from collections import Counter
from contextlib import closing

import pytest

from infra.address import Address
from tests.programs.fault_run.links import FaultyWan
from tests.programs.fault_run.reading import End
from tests.programs.fault_run.world_plan import PLAYED, plan_of, program_of
from tests.programs.fault_run.worlds import counted, play
from tests.seeds.world import parse, world_of
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
1.7 drain region=eu replica=eu-0 for=1
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


def test_every_fault_of_worlds_is_played_or_counted_as_left_out():
    seen: Counter[str] = Counter()
    for seed in range(300):
        plan, world = plan_of(world_of(seed)), world_of(seed)
        assert len(plan.faults) + plan.left_out.total() == len(world.faults)
        seen.update(line.what for line in plan.faults)
    assert seen.keys() == PLAYED


async def test_a_link_holds_one_way_and_loses_what_was_held_when_it_was_cut():
    came: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while data := await reader.read(10):
                came.put_nowait(data)
                writer.write(data)

    async with asyncio.timeout(PATIENCE_S), await asyncio.start_server(answer, "127.0.0.1") as far:
        wan = FaultyWan(Address(*far.sockets[0].getsockname()), one_way_s=0.0)
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


@pytest.mark.timeout(240)
async def test_a_short_world_is_played_and_every_request_ends_once(tmp_path):
    result = await play(plan_of(parse(WORLD)), tmp_path)
    assert result.violations == [], counted(result.requests)
    assert sum(one.end is End.WHOLE for one in result.requests) > 10
    logs = {log.stem: log.read_text() for log in (tmp_path / ".mesh" / "logs").glob("*.log")}
    assert "an agent us/us-0 runs already" in logs["agent-us-0-again"]
    assert "an operator drained it" in logs["agent-eu-0"]
    assert "is back" in logs["router-eu-r1"]  # the bus
