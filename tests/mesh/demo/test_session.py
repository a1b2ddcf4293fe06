"""What is said when a mesh can't begin; the rest of a session is tested as a process."""

import io
import socket

import pytest
from rich.console import Console

from infra import topology
from mesh.demo import session
from mesh.demo.options import DemoOptions
from mesh.demo.session import PortsUnusable, run
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
