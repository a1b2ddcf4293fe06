"""infra/compose.yaml says what the code says: commands, files, ports, regions and links.

No container engine is needed here. The file is held against the schema of the Compose
Specification, the real command line, the real renderer and its own mesh.toml.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from click.testing import CliRunner

import agents.cli
import mesh.cli.main
from agents.runtime.metrics import PORTS
from infra import topology

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "infra" / "compose.yaml"
COMPOSE_DIR = ROOT / "infra" / "compose"
MESH_TOML = COMPOSE_DIR / "mesh.toml"
STATE = "/var/lib/mesh"
CLI = {"mesh": mesh.cli.main.main, "mesh-agent": agents.cli.main}

compose: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
services: dict[str, dict[str, Any]] = compose["services"]
OURS = {name: each for name, each in services.items() if "command" in each and name != "prometheus"}


@pytest.fixture(scope="module")
def mesh_toml() -> topology.Topology:
    return topology.load(MESH_TOML)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the service `render` writes."""
    out = tmp_path_factory.mktemp("state")
    arguments = [_on_host(word, out) for word in shlex.split(services["render"]["command"])]
    result = CliRunner().invoke(CLI[arguments[0]], arguments[1:])
    assert result.exit_code == 0, result.output
    return out


def _on_host(word: str, state: Path) -> str:
    """A word of a command with the paths of the container turned into those they are here."""
    for volume in services["render"]["volumes"]:
        source, target = volume.split(":")[:2]
        here = state if target == STATE else (COMPOSE_FILE.parent / source)
        if word == target or word.startswith(f"{target}/"):
            return str(here) + word.removeprefix(target)
    return word


def _words(service: str) -> list[str]:
    """The command of a service, without the wrapper that gives it credentials."""
    words = shlex.split(services[service]["command"])
    return words[2:] if words[0] == "with-credentials" else words


def test_is_a_compose_file():
    schema = json.loads((ROOT / "tests/data/compose-spec/compose-spec.json").read_text())
    jsonschema.Draft7Validator(schema).validate(compose)


def test_every_region_has_its_server_routers_engines_and_agents(mesh_toml):
    expected = {"render"}
    for region, has in mesh_toml.regions.items():
        assert has.routers == ("r1",), "the file has one router per region, named r1"
        assert has.batch_runners == ("batch-0",)
        kinds = ("nats", "streams", "router", "batch-runner")
        expected |= {f"{kind}-{region}" for kind in kinds}
        expected |= {f"{kind}-{name}" for kind in ("engine", "agent") for name in has.replicas}
    assert set(OURS) == expected


@pytest.mark.parametrize("name", [name for name in OURS if not name.startswith("nats-")])
def test_commands_are_those_of_the_command_line(name, rendered, monkeypatch):
    for variable in ("NATS_URL", "NATS_USER", "NATS_PASSWORD"):
        monkeypatch.setenv(variable, "nats://from-the-credentials-file")
    words = [_on_host(word, rendered) for word in _words(name)]
    command: click.Command = CLI[words[0]]
    context, rest = click.Context(command, info_name=words[0]), words[1:]
    while isinstance(command, click.Group):
        subcommand = command.get_command(context, rest[0])
        assert subcommand is not None, f"{words[0]} has no command {rest[0]}"
        command, rest = subcommand, rest[1:]
    command.make_context(words[0], rest)  # raises UsageError for what the command would not take


def test_servers_and_credentials_files_are_those_that_render_writes(rendered):
    for name, service in OURS.items():
        words = shlex.split(service["command"])
        if words[0] in ("with-credentials", "nats-server"):
            path = words[1] if words[0] == "with-credentials" else words[-1]
            assert Path(_on_host(path, rendered)).is_file(), f"{name}: {path}"
            assert service["depends_on"]["render"]["condition"].endswith("completed_successfully")


def test_commands_name_the_replica_of_their_service(mesh_toml):
    for region, has in mesh_toml.regions.items():
        router = shlex.split(services[f"router-{region}"]["command"])
        assert router[1] == f"{STATE}/{region}/credentials/router.env"
        assert router[router.index("--region") + 1] == region
        for replica in has.replicas:
            agent = shlex.split(services[f"agent-{replica}"]["command"])
            engine = shlex.split(services[f"engine-{replica}"]["command"])
            port = engine[engine.index("--port") + 1]
            assert agent[1] == f"{STATE}/{region}/credentials/agent-{replica}.env"
            assert agent[agent.index("--region") + 1] == region
            assert agent[agent.index("--replica") + 1] == replica
            assert agent[agent.index("--engine-url") + 1] == f"http://engine-{replica}:{port}"


def test_ports_are_those_of_mesh_toml_and_open_to_this_machine_only(mesh_toml):
    for region, has in mesh_toml.regions.items():
        for service, address in ((f"router-{region}", has.http), (f"nats-{region}", has.nats[0])):
            assert address.host == service
            assert services[service]["ports"] == [f"127.0.0.1:{address.port}:{address.port}"]
        assert has.leaf[0].host == f"nats-{region}"
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert len(set(published)) == len(published)


def test_a_network_per_region_and_one_per_link(mesh_toml):
    links = {f"link-{link.acceptor}-{link.solicitor}": link for link in mesh_toml.links}
    assert set(compose["networks"]) == set(mesh_toml.regions) | set(links)
    for name, link in links.items():
        network = compose["networks"][name]
        # Docker publishes a container's ports on a network that has a way out: were that a
        # link's, cutting the link would cut the region's own clients off.
        assert network == {"name": f"mesh-{name}", "internal": True}
        on_it = {service for service, has in services.items() if name in has.get("networks", ())}
        assert on_it == {f"nats-{region}" for region in link.between}


def test_files_that_are_mounted_or_built_from_exist():
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE_FILE.parent / source).exists(), f"{name}: {source}"
            else:
                assert source in compose["volumes"], f"{name}: {source}"
        if "build" in service:
            context = COMPOSE_FILE.parent / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()


def test_prometheus_reads_every_router_under_its_regions_name(mesh_toml):
    config = yaml.safe_load((COMPOSE_DIR / "prometheus.yml").read_text())
    job, runners, agents = config["scrape_configs"]
    names = [name for name in services if name.startswith("agent-")]
    assert {
        (target, labels["labels"]["region"])
        for labels in agents["static_configs"]
        for target in labels["targets"]
    } == {(f"{name}:{PORTS[0]}", name.split("-")[1]) for name in names}
    assert all(
        services[name]["environment"]["MESH_AGENT_METRICS_HOST"] == "0.0.0.0" for name in names
    )
    assert {
        (target, labels["labels"]["region"])
        for labels in runners["static_configs"]
        for target in labels["targets"]
    } == {(f"batch-runner-{region}:9100", region) for region in mesh_toml.regions}
    scraped = {entry["labels"]["region"]: entry["targets"] for entry in job["static_configs"]}
    assert scraped == {region: [str(has.http)] for region, has in mesh_toml.regions.items()}


def test_grafana_finds_the_dashboard_and_the_prometheus(mesh_toml):
    grafana = services["grafana"]
    folder = "/var/lib/grafana/dashboards"
    assert f"../dashboards:{folder}:ro" in grafana["volumes"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (ROOT / "dashboards" / home.relative_to(folder)).is_file()
    provider = yaml.safe_load((COMPOSE_DIR / "grafana/dashboards/mesh.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] == folder
    source = yaml.safe_load((COMPOSE_DIR / "grafana/datasources/prometheus.yaml").read_text())
    port = services["prometheus"]["ports"][0].rsplit(":", 1)[1]
    assert source["datasources"][0]["url"] == f"http://prometheus:{port}"
