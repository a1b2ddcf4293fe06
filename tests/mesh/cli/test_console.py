"""The options of a router's console: what they make, and what is refused before it starts."""

from pathlib import Path

import pytest

from infra.address import Address
from infra.bus import BusAddress
from infra.topology import parse
from mesh.cli.console import NAMES, console_config
from mesh.cli.unusable import Unusable
from mesh.core.model.settings import RouterSettings
from mesh.runtime.config import RouterConfig
from schemas.ids import RegionId, RouterId
from tests.support.nats_regions import mesh_toml

NOTHING = {"console": None, "console_credentials": (), "console_admin_credentials": (),
           "console_admin_key_file": None}  # fmt: skip


def config(topology, **given):
    router = RouterConfig(
        region=RegionId("us"),
        router=RouterId("r1"),
        peers=(),
        http_host="127.0.0.1",
        http_port=0,
        bus=BusAddress("nats://here:4222"),
        settings=RouterSettings(),
        hash_key="",
        epoch=0,
        seed=0,
    )
    return console_config(router, topology, NOTHING | given)


@pytest.fixture
def topology():
    return parse(mesh_toml(("us", "eu")), "mesh.toml")


@pytest.fixture
def login(tmp_path: Path) -> str:
    file = tmp_path / "observer.env"
    file.write_text("NATS_URL=nats://there:4222\nNATS_USER=u\nNATS_PASSWORD=p\n")
    return str(file)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    return file


def test_it_is_off_unless_an_address_is_given(topology, login, caplog):
    assert NOTHING.keys() == set(NAMES)
    assert config(topology) is None
    assert config(topology, console_credentials=(login,)) is None
    more = {"us": 'console = "127.0.0.1:8191"'}
    configured = parse(mesh_toml(("us", "eu"), more=more), "mesh.toml")
    assert config(configured) is None
    assert "--console-credentials" in caplog.text
    found = config(configured, console_credentials=(login,))
    assert found is not None and found.address == Address("127.0.0.1", 8191)
    assert found.admin_key is None


def test_the_own_regions_bus_is_the_routers_and_others_are_as_rendered(topology, login, key):
    found = config(
        topology,
        console="127.0.0.1:1",
        console_credentials=(login, f"eu={login}"),
        console_admin_credentials=(login,),
        console_admin_key_file=key,
    )
    assert found is not None and found.admin_key == "0123456789abcdef"
    us, eu = found.logins["us"], found.logins["eu"]
    assert us.observer == us.admin == BusAddress("nats://here:4222", "u", "p")
    assert (eu.observer, eu.admin) == (BusAddress("nats://there:4222", "u", "p"), None)


def test_what_is_wrong_is_named(topology, login, key, tmp_path):
    short = tmp_path / "short"
    short.write_text("short")
    (tmp_path / "half.env").write_text("NATS_USER=u\n")
    good = {"console": "127.0.0.1:1", "console_credentials": (login,)}
    for wrong, text in (
        ({"console": "nowhere"}, "host:port"),
        ({"console_credentials": ()}, "needs --console-credentials"),
        ({"console_credentials": ("none.env",)}, "none.env"),
        ({"console_credentials": (f"xx={login}",)}, "no region 'xx'; there are us, eu"),
        ({"console_credentials": (str(tmp_path / "half.env"),)}, "no NATS_PASSWORD"),
        ({"console_admin_key_file": key}, "together"),
        ({"console_admin_credentials": (login,)}, "together"),
        (
            {"console_admin_credentials": (login,), "console_admin_key_file": short},
            "openssl rand",
        ),
    ):
        with pytest.raises(Unusable) as caught:
            config(topology, **(good | wrong))
        assert text in caught.value.format_message()
