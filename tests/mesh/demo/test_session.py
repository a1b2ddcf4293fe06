"""When a mesh can't begin, and what signals mean; the rest is tested as a process."""

import asyncio
import io
import os
import signal
import socket

import pytest
from rich.console import Console

from infra import topology
from mesh.demo import session
from mesh.demo.options import DemoOptions
from mesh.demo.session import DemoSession, PortsUnusable, run
from mesh.demo.state_directory import StateDirectory
from tests.support.mesh_up import write_config


async def test_taken_ports_of_the_packaged_file_are_reported_with_a_remedy(tmp_path, monkeypatch):
    config = write_config(tmp_path, regions=("us",))
    address = topology.load(config).regions["us"].http
    monkeypatch.setattr(session, "DEFAULT_FILE", config)
    options = DemoOptions(config=config, state=tmp_path / ".mesh")
    with (
        socket.create_server(tuple(address)),
        pytest.raises(PortsUnusable, match=r"is taken.*\nto use other ports: copy that file"),
    ):
        await run(options, Console(file=io.StringIO()))
    assert not options.state.exists()


@pytest.mark.parametrize(("number", "hurries"), [(signal.SIGTERM, 0), (signal.SIGINT, 1)])
async def test_a_sigterm_that_make_forwards_late_does_not_kill_what_ends(tmp_path, number, hurries):
    config = write_config(tmp_path, regions=("us",))
    options = DemoOptions(config=config, state=tmp_path / ".mesh")
    console = Console(file=io.StringIO())
    demo = DemoSession(topology.load(config), options, StateDirectory(options.state), console)
    calls = []
    demo._mesh.hurry = lambda: calls.append(number)
    handled = asyncio.Event()
    with demo._signals():
        demo._ending_since = asyncio.get_running_loop().time() - 2.0
        os.kill(os.getpid(), number)
        asyncio.get_running_loop().call_later(0.1, handled.set)
        await handled.wait()
    assert len(calls) == hurries
