"""The command lines and environments of a demo's processes: who is told an engine's key."""

from pathlib import Path

import pytest

from agents.config import checked_key
from agents.runtime.command import command
from infra.address import Address
from infra.nats import bundle
from infra.topology import DEFAULT_FILE, load
from mesh.cli import router
from mesh.demo.commands import AGENT_DRAIN_S, ROUTER_DRAIN_S, Commands
from mesh.demo.options import DemoOptions, GivenEngine, GivenEngineKind, fitted
from mesh.demo.state_directory import StateDirectory
from mesh.supervisor.program import ProgramKind
from mesh.supervisor.supervisor import GRACE_S
from tests.support.nats_regions import SERVERS, mesh_toml

KEY = "sk-s3cret"
GIVEN = GivenEngine(
    "us",
    "http://h:1",
    "http://m:2/metrics",
    batch_max=8,
    models=("org/a", "b"),
    key=checked_key(KEY, "here"),
)


@pytest.fixture
def commands(tmp_path):
    topology = load(DEFAULT_FILE)
    options = DemoOptions(config=DEFAULT_FILE, state=tmp_path)
    files = bundle.write(topology, tmp_path / "config")
    (tmp_path / "run").mkdir()
    return Commands(topology, options, StateDirectory(tmp_path), Path("nats-server"), files)


def test_an_agent_gets_all_that_is_given_of_its_engine(commands):
    program = commands.agent("us", "us-0", GIVEN, GivenEngineKind.LLAMACPP)
    read = command.make_context("run", list(program.command[4:])).params
    assert (read["engine_url"], read["metrics_url"]) == (GIVEN.url, GIVEN.metrics_url)
    assert (read["batch_max"], read["models"]) == (8, ("org/a", "b"))


def test_the_key_is_in_a_file_of_its_agent_and_nowhere_else(commands):
    program = commands.agent("us", "us-0", GIVEN, GivenEngineKind.LLAMACPP)
    file = Path(program.command[program.command.index("--engine-key-file") + 1])
    assert (file.read_text(), file.stat().st_mode & 0o777) == (KEY, 0o600)
    assert KEY not in f"{program.command} {program.environment}"
    assert KEY not in repr(GIVEN)
    others = (
        *commands.nats("us"),
        commands.engine("us", "us-0"),
        commands.router("us", "r1", Address("127.0.0.1", 1), None),
        commands.agent("us", "us-1", GivenEngine("us", "http://h:1"), GivenEngineKind.VLLM),
    )
    for other in others:
        assert KEY not in f"{other.command} {other.environment}"


@pytest.mark.parametrize(("clusters", "asked"), [((), 3), (("us",), 1), (("us",), None)])
def test_a_router_knows_how_many_nats_servers_its_region_runs(
    tmp_path, monkeypatch, clusters, asked
):
    """It reads mesh.toml, in whose place `mesh up` may run another number."""
    file = tmp_path / "mesh.toml"
    file.write_text(mesh_toml(("us",), clusters=clusters))
    options = DemoOptions(config=file, state=tmp_path, bus_servers=asked)
    topology = fitted(load(file), options)
    files = bundle.write(topology, tmp_path / "config")
    commands = Commands(topology, options, StateDirectory(tmp_path), Path("nats-server"), files)
    program = commands.router("us", "r1", Address("127.0.0.1", 1), None)
    found = []
    monkeypatch.setattr(router, "_run", lambda config, *_: found.append(config))
    with pytest.raises(SystemExit):
        router.command.main(list(program.command[4:]))
    assert found[0].bus_servers == (asked or SERVERS)


def test_programs_have_ten_seconds_beyond_their_drain_before_they_are_killed():
    """On a busy machine an idle Python process may need several seconds to end."""
    drains_s = {ProgramKind.ROUTER: ROUTER_DRAIN_S, ProgramKind.AGENT: AGENT_DRAIN_S}
    for kind, grace_s in GRACE_S.items():
        assert grace_s >= drains_s.get(kind, 0.0) + 10.0
