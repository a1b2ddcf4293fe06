"""The rendered files: who gets which, that they stay, and that the server takes them."""

import json
import os
import re
import stat
from pathlib import Path

import bcrypt
import pytest

from infra import topology
from infra.address import Address
from infra.nats import bundle, server
from infra.nats.bundle import PasswordsUnreadable
from infra.nats.region_config import NO_ADDRESS
from infra.private_files import write_private
from infra.topology import DEFAULT_FILE, Topology, parse
from tests.support.nats_regions import mesh_toml


@pytest.fixture
def demo() -> Topology:
    return topology.load(DEFAULT_FILE)


def contents(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def with_us_replicas(count: int) -> Topology:
    return parse(DEFAULT_FILE.read_text().replace("replicas = 4 ", f"replicas = {count} ", 1), "t")


def test_the_server_takes_every_configuration(tmp_path, demo: Topology):
    binary = server.find()
    for files in bundle.write(demo, tmp_path).values():
        server.check_config(binary, files.config)


def test_a_single_region_needs_no_links(tmp_path):
    alone = parse(DEFAULT_FILE.read_text().split("[regions.eu]")[0], "t")
    files = bundle.write(alone, tmp_path)
    server.check_config(server.find(), files["us"].config)
    assert "leafnodes" not in files["us"].config.read_text()


def test_every_process_has_its_own_file_and_only_its_owner_reads_it(tmp_path, demo: Topology):
    bundle.write(demo, tmp_path)
    users = [
        "router",
        "observer",
        "operator",
        "admin",
        "setup",
        "system",
        "batch",
        "batch-setup",
        "batch-observer",
        *(f"agent-us-{n}" for n in range(4)),
    ]
    credentials = tmp_path / "us" / "credentials"
    assert sorted(path.stem for path in credentials.iterdir()) == sorted(users)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {0o600}


def test_folders_of_secrets_are_closed_and_an_earlier_rendering_is_tightened(
    tmp_path, demo: Topology
):
    before = os.umask(0o022)
    try:
        out = tmp_path / "a" / "rendered"
        bundle.write(demo, out)
        folders = [out, *(out / r for r in demo.regions), out / "us" / "credentials"]
        assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
        for path in (*folders, *out.rglob("*.env"), out / "us" / "nats.conf"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        bundle.write(demo, out)
        modes = {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()}
        assert modes == {0o600}
        assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders[1:]} == {0o700}
    finally:
        os.umask(before)


def test_credentials_are_the_variables_that_processes_read(tmp_path, demo: Topology):
    files = bundle.write(demo, tmp_path)
    lines = files["us"].credentials["agent-us-0"].read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines)
    password = variables.pop("NATS_PASSWORD")
    assert variables == {
        "NATS_URL": "nats://127.0.0.1:4101",
        "NATS_USER": "agent-us-0",
        "MESH_REGION": "us",
    }
    assert len(password) >= 32


def test_a_servers_file_has_hashes_of_passwords_and_of_links_it_dials_the_passwords(
    tmp_path, demo: Topology
):
    """Who reads the file can log in as nobody, but as the server itself in other regions."""
    files = bundle.write(demo, tmp_path)
    kept = json.loads((tmp_path / bundle.PASSWORDS).read_text())["passwords"]
    for region, written in files.items():
        text = written.config.read_text()
        ours = [link for link in demo.links if link.solicitor == region]
        dialled = {f"{link.acceptor}/link-{region}" for link in ours}
        assert {key for key, password in kept.items() if password in text} == dialled
        hashes = dict(re.findall(r'"user": "([^"]+)",\s+"password": "([^"]+)"', text))
        own = {key.split("/")[1] for key in kept if key.startswith(f"{region}/")}
        assert hashes.keys() == own
        for user, found in hashes.items():
            assert bcrypt.checkpw(kept[f"{region}/{user}"].encode(), found.encode()), user
    salts = [line[:29] for line in re.findall(r"\$2a\$04\$[^\"]+", text)]
    assert len(set(salts)) == len(salts)


def test_all_routers_and_only_they_share_a_key_for_prefixes(tmp_path, demo: Topology):
    files = bundle.write(demo, tmp_path)
    holders = {
        (region, user): path.read_text().split("MESH_PREFIX_KEY=")[1].split()[0]
        for region, written in files.items()
        for user, path in written.credentials.items()
        if "MESH_PREFIX_KEY=" in path.read_text()
    }
    assert set(holders) == {(region, "router") for region in demo.regions}
    [key] = set(holders.values())
    assert len(key) >= 32
    assert not any(key in written.config.read_text() for written in files.values())


def test_a_region_knows_no_secret_of_another_but_its_links(tmp_path, demo: Topology):
    files = bundle.write(demo, tmp_path)
    us = files["us"].config.read_text()
    for user, path in files["eu"].credentials.items():
        password = path.read_text().split("NATS_PASSWORD=")[1].split()[0]
        assert password not in us, user


def test_rendering_again_gives_the_same_bytes(tmp_path, demo: Topology):
    bundle.write(demo, tmp_path)
    before = contents(tmp_path)
    bundle.write(demo, tmp_path)
    assert contents(tmp_path) == before


def test_a_new_replica_changes_no_other_file(tmp_path, demo: Topology):
    bundle.write(demo, tmp_path)
    before = contents(tmp_path)
    bundle.write(with_us_replicas(5), tmp_path)
    after = contents(tmp_path)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"passwords.json", "us/nats.conf", "us/credentials/agent-us-4.env"}


def test_a_replica_that_is_gone_leaves_no_credentials(tmp_path, demo: Topology):
    bundle.write(demo, tmp_path)
    bundle.write(with_us_replicas(1), tmp_path)
    left = {path.stem for path in (tmp_path / "us" / "credentials").glob("agent-*")}
    assert left == {"agent-us-0"}
    assert "agent-us-3" not in (tmp_path / "us" / "nats.conf").read_text()


def test_rotate_gives_every_user_a_new_password(tmp_path, demo: Topology):
    bundle.write(demo, tmp_path)
    before = contents(tmp_path)
    bundle.write(demo, tmp_path, rotate=True)
    after = contents(tmp_path)
    assert before.keys() == after.keys()
    assert all(after[name] != before[name] for name in before)


def test_a_proxied_link_is_dialled_where_the_proxy_listens(tmp_path, demo: Topology):
    proxied = {("us", "eu"): [Address("127.0.0.1", 5555)]}
    files = bundle.write(demo, tmp_path, leaf_addresses=proxied)
    us, eu = files["us"].config.read_text(), files["eu"].config.read_text()
    assert "@127.0.0.1:5555" in us
    assert "@127.0.0.1:4202" not in us
    assert "@127.0.0.1:4203" in us, "the other link goes straight"
    assert '"listen": "127.0.0.1:4202"' in eu


def test_a_server_is_told_of_no_address_but_the_one_that_it_dials(tmp_path, demo: Topology):
    """It would dial others too; and it must be told something, or versions up to 2.14 hang up."""
    us_eu, us_ap, eu_ap = (("us", "eu"), ("us", "ap"), ("eu", "ap"))
    files = bundle.write(demo, tmp_path)
    assert '"advertise": "127.0.0.1:4202"' in files["eu"].config.read_text()
    assert '"advertise": "127.0.0.1:4203"' in files["ap"].config.read_text()
    assert "advertise" not in files["us"].config.read_text(), "it accepts no link"
    proxies = [[Address("127.0.0.1", port)] for port in (5555, 5556, 5557)]
    proxied = dict(zip((us_eu, us_ap, eu_ap), proxies, strict=True))
    files = bundle.write(demo, tmp_path, leaf_addresses=proxied)
    assert '"advertise": "127.0.0.1:5555"' in files["eu"].config.read_text()
    assert f'"advertise": "{NO_ADDRESS}"' in files["ap"].config.read_text(), "two dial it"
    assert "no_advertise" not in files["ap"].config.read_text()


def test_state_is_kept_in_the_given_directory(tmp_path, demo: Topology):
    files = bundle.write(demo, tmp_path / "out", state_directory=tmp_path / "state")
    config = files["us"].config.read_text()
    assert f'"store_dir": "{tmp_path}/state/us"' in config
    assert '"sync_interval": "always"' in config, "what is acknowledged survives a power cut"


def test_a_named_host_is_dialled_by_name_and_served_on_every_interface(tmp_path):
    named = parse(DEFAULT_FILE.read_text().replace("127.0.0.1:4203", "ap.example.com:4203"), "t")
    files = bundle.write(named, tmp_path)
    assert "@ap.example.com:4203" in files["us"].config.read_text()
    assert '"listen": "0.0.0.0:4203"' in files["ap"].config.read_text()


def test_limits_and_monitoring_are_those_of_the_file(tmp_path):
    text = DEFAULT_FILE.read_text().replace(
        'leaf = "127.0.0.1:4201"', 'leaf = "127.0.0.1:4201"\nmonitor = "127.0.0.1:8222"'
    )
    files = bundle.write(parse(text + "[nats]\nmax_payload_mib = 16\n", "t"), tmp_path)
    config = files["us"].config.read_text()
    assert "max_payload: 16777216\n" in config
    assert 'http: "127.0.0.1:8222"\n' in config
    assert "\nhttp:" not in files["eu"].config.read_text()


def test_every_user_gets_a_long_password_of_its_own(tmp_path):
    kept = bundle.keep_passwords(tmp_path / "p.json", ["a", "b", "c"])
    assert len(set(kept.values())) == 3
    assert all(len(password) >= 32 for password in kept.values())


def test_two_meshes_share_none(tmp_path):
    one = bundle.keep_passwords(tmp_path / "one.json", ["a"])
    two = bundle.keep_passwords(tmp_path / "two.json", ["a"])
    assert one["a"] != two["a"]


def test_a_new_user_changes_no_other_password(tmp_path):
    before = bundle.keep_passwords(tmp_path / "p.json", ["a", "b"])
    after = bundle.keep_passwords(tmp_path / "p.json", ["a", "b", "c"])
    assert {user: after[user] for user in before} == before
    assert after["c"] not in before.values()


def test_who_left_and_comes_back_starts_anew(tmp_path):
    before = bundle.keep_passwords(tmp_path / "p.json", ["a", "b"])
    bundle.keep_passwords(tmp_path / "p.json", ["a"])
    assert bundle.keep_passwords(tmp_path / "p.json", ["a", "b"])["b"] != before["b"]


def test_rotate_makes_all_of_them_new(tmp_path):
    before = bundle.keep_passwords(tmp_path / "p.json", ["a", "b"])
    after = bundle.keep_passwords(tmp_path / "p.json", ["a", "b"], rotate=True)
    assert all(after[user] != before[user] for user in before)
    assert bundle.keep_passwords(tmp_path / "p.json", ["a", "b"]) == after


def test_only_the_owner_can_read_the_file(tmp_path):
    bundle.keep_passwords(tmp_path / "p.json", ["a"])
    assert stat.S_IMODE((tmp_path / "p.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", json.dumps({"v": 2, "passwords": {}}), json.dumps({"v": 1}), "\xff"],
)
def test_a_file_that_is_none_of_ours_is_an_error_and_stays(tmp_path, text: str):
    path = tmp_path / "p.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(PasswordsUnreadable, match="restore it, or remove it"):
        bundle.keep_passwords(path, ["a"])
    assert path.read_text(encoding="latin-1") == text


def test_a_readable_file_becomes_private(tmp_path):
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_folders_are_made_on_the_way(tmp_path):
    write_private(tmp_path / "a" / "b" / "secret", "text")
    assert (tmp_path / "a" / "b" / "secret").read_text() == "text"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "secret"
    write_private(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "half of it \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_three_servers_know_one_another_and_dial_every_server_of_a_peer(tmp_path):
    """Each begins with another one; what a single server of another region has is as ever."""
    mesh = parse(mesh_toml(("us", "eu", "ap"), clusters=("us", "ap")), "mesh.toml")
    files = bundle.write(mesh, tmp_path)
    us = mesh.regions["us"]
    assert [config.name for config in files["us"].configs] == [
        "nats-1.conf",
        "nats-2.conf",
        "nats-3.conf",
    ]
    for number, config in enumerate(files["us"].configs):
        server.check_config(server.find(), config)
        text = config.read_text()
        others = [each.cluster for each in us.servers if each != us.servers[number]]
        routes = re.findall(r"nats-route://cluster:[^@]+@([^\"]+)", text)
        assert routes == [str(address) for address in others]
        assert f'/{number + 1}"' in text, "its own store"
        dialled = re.findall(r"nats-leaf://link-us:[^@]+@([^\"]+)", text)
        ap = [str(address) for address in mesh.regions["ap"].leaf]
        assert dialled == [*ap[number:], *ap[:number], str(*mesh.regions["eu"].leaf)]
    lines = files["us"].credentials["router"].read_text().splitlines()
    assert f"NATS_URL={us.bus_url}" in lines
    assert "cluster" not in files["eu"].config.read_text()
    single = parse(mesh_toml(("us", "eu", "ap"), clusters=("ap",)), "mesh.toml")
    bundle.write(single, tmp_path)
    assert [path.name for path in (tmp_path / "us").glob("*.conf")] == ["nats.conf"]
