from pathlib import Path

import pytest

from agents.core.offline_profile import encode_profile
from infra.topology import DEFAULT_FILE, TopologyError, load
from mesh.demo.options import DemoOptions, GivenEngine, fitted, profile_files
from tests.agents.core.test_offline_profile import PROFILE
from tests.support.mesh_up import write_config


def replicas(**asked):
    topology = fitted(load(DEFAULT_FILE), DemoOptions(config=DEFAULT_FILE, state=Path(), **asked))
    return {name: region.replicas for name, region in topology.regions.items()}


def test_without_options_the_configuration_decides():
    assert replicas()["eu"] == ("eu-0", "eu-1", "eu-2", "eu-3")


def test_a_number_of_replicas_holds_for_every_region():
    assert replicas(replicas=1) == {"us": ("us-0",), "eu": ("eu-0",), "ap": ("ap-0",)}


def test_a_mesh_without_any_replica_is_an_error():
    with pytest.raises(TopologyError, match=r"mesh.toml: no region has a replica.*--replicas"):
        replicas(replicas=0)


def test_given_engines_leave_no_simulated_one_anywhere():
    engines = tuple(GivenEngine(region, "http://127.0.0.1:1") for region in ("us", "ap", "us"))
    assert replicas(engines=engines) == {"us": ("us-0", "us-1"), "eu": (), "ap": ("ap-0",)}


def test_an_engine_of_no_region_is_an_error_that_names_the_regions():
    with pytest.raises(TopologyError, match=r'--engine mars=.*no region "mars": there are us, eu'):
        replicas(engines=(GivenEngine("mars", "http://127.0.0.1:1"),))


def test_more_replicas_than_a_machine_can_hold_is_an_error():
    with pytest.raises(TopologyError, match=r"123 replicas.*too many.*--replicas"):
        replicas(replicas=41)


def test_workers_hold_for_every_region():
    topology = fitted(load(DEFAULT_FILE), DemoOptions(config=DEFAULT_FILE, state=Path(), workers=2))
    assert [region.workers for region in topology.regions.values()] == [2, 2, 2]


def test_more_workers_than_a_region_may_have_are_an_error():
    topology = load(DEFAULT_FILE)
    regions = {
        name: region.model_copy(update={"routers": ("r1", "r2")})
        for name, region in topology.regions.items()
    }
    topology = topology.model_copy(update={"regions": regions})
    with pytest.raises(TopologyError, match=r"--workers 9: regions\.us\.workers: 19 processes"):
        fitted(topology, DemoOptions(config=DEFAULT_FILE, state=Path(), workers=9))


def profiled_mesh(folder: Path, file: str) -> Path:
    config = write_config(folder)
    config.write_text(
        config.read_text().replace("[regions.eu]", f'[regions.eu]\nprofile = "{file}"')
    )
    return config


def test_a_regions_profile_lies_beside_the_configuration(tmp_path):
    config = profiled_mesh(tmp_path, "eu.profile.json")
    (tmp_path / "eu.profile.json").write_bytes(encode_profile(PROFILE))
    assert profile_files(load(config), config) == {"eu": tmp_path / "eu.profile.json"}
    assert profile_files(load(DEFAULT_FILE), DEFAULT_FILE) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "can't be read: No such file or directory"),
        ("{}", "is no profile: engine: Field required"),
        ("us", "is no profile: Invalid JSON"),
    ],
)
def test_a_file_that_is_no_profile_is_an_error_that_names_the_key(tmp_path, text, problem):
    config, file = profiled_mesh(tmp_path, "eu.json"), tmp_path / "eu.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(TopologyError) as caught:
        profile_files(load(config), config)
    said = str(caught.value)
    assert said.startswith(f"{config}:") and f": regions.eu.profile: {file} {problem}" in said
    assert str(caught.value).endswith("write one with mesh-agent profile")
