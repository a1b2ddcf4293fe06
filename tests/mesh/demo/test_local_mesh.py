"""Which routers a mesh of given engines waits for; the rest is tested as a process."""

import asyncio
import sys

import pytest

from infra.topology import DEFAULT_FILE, load
from mesh.demo import local_mesh
from mesh.demo.local_mesh import LocalMesh
from mesh.demo.options import DemoOptions, GivenEngine
from mesh.demo.state_directory import StateDirectory
from mesh.supervisor.program import FileWritten, Program, ProgramKind
from mesh.supervisor.supervisor import ProgramReady
from tests.support.until import PATIENCE_S, until

SLEEP = "import time; time.sleep(60)"
SLEEP_READY = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"


@pytest.mark.parametrize(("source", "within_s"), [(SLEEP, 0.1), (SLEEP_READY, 30.0)])
async def test_a_router_without_an_engine_is_listed_as_not_ready(
    tmp_path, monkeypatch, source, within_s
):
    monkeypatch.setattr(local_mesh, "UP_WITHOUT_IT_AFTER_S", within_s)
    engines = (GivenEngine("us", "http://127.0.0.1:1"),)
    options = DemoOptions(config=DEFAULT_FILE, state=tmp_path, engines=engines)
    ready = tmp_path / "ready"
    router = Program(
        name="router-us-r1",
        kind=ProgramKind.ROUTER,
        region="us",
        command=(sys.executable, "-I", "-S", "-c", source, str(ready)),
        ready=FileWritten(ready),
    )
    state, events = StateDirectory(tmp_path), []
    with state.held():
        async with LocalMesh(load(DEFAULT_FILE), options, state, events.append) as mesh:
            await mesh._start_router(router)
            assert mesh.routers_not_ready == ([] if source == SLEEP_READY else ["router-us-r1"])
            assert [isinstance(event, ProgramReady) for event in events] == (
                [True] if source == SLEEP_READY else []
            )
            mesh.hurry()


async def test_a_mesh_of_simulated_engines_is_ready_after_its_routers(tmp_path):
    options = DemoOptions(config=DEFAULT_FILE, state=tmp_path)
    answers = tmp_path / "answers"
    router = Program(
        name="router-us-r1",
        kind=ProgramKind.ROUTER,
        region="us",
        command=(sys.executable, "-I", "-S", "-c", SLEEP),
        ready=FileWritten(answers),
    )
    state = StateDirectory(tmp_path)
    with state.held():
        async with LocalMesh(load(DEFAULT_FILE), options, state, lambda event: None) as mesh:
            starting = asyncio.create_task(mesh._start_router(router))
            await until(lambda: "router-us-r1" in mesh.pids)
            await asyncio.wait([starting], timeout=0.3)
            assert not starting.done()
            answers.touch()
            async with asyncio.timeout(PATIENCE_S):
                await starting
            mesh.hurry()
