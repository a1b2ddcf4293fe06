"""Turns of the meter with real processes."""

import sys

from tests.programs.bench.cells import Cell, Client
from tests.programs.bench.measure import Meter
from tests.programs.bench.processes import Processes
from tests.programs.bench.systems.direct import direct
from tests.programs.bench.systems.system import Place, System
from tests.support.ports import free_ports

SMALL = Cell("small", Client.OWN, 50, 4, 5, 2)


async def test_processes_beside_the_path_are_measured_and_not_added_to_it(tmp_path):
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    async with Processes(tmp_path / "logs") as processes:
        command = (sys.executable, "-m", "tests.programs.bench.engine", str(port))
        ready = processes.answers(f"{url}/health")
        engine = await processes.start("engine", command, ready=ready)
        idle = await processes.start("idle", ("sleep", "60"))
        await direct(Place(processes, [url], tmp_path))
        system = System(
            "as a router", (url,), "", router=(idle,), path={"router": (idle,)},
            beside={"frontends": (engine,)},
        )  # fmt: skip
        figures = await Meter(tmp_path, tmp_path).measure(SMALL, system, 0)
    assert figures["frontends_cpu_us"] > 0
    assert figures["path_cpu_us"] == figures["front_cpu_us"]
