"""`mesh infra nats`: the command as its user sees it."""

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from infra.topology import DEFAULT_FILE
from mesh.cli.infra import command


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["nats", *map(str, arguments)])


def test_without_a_file_the_demo_is_rendered(tmp_path):
    result = run("--out", tmp_path)
    assert result.exit_code == 0, result.output
    for region in ("us", "eu", "ap"):
        assert (tmp_path / region / "nats.conf").exists()
        assert region in result.output


def test_paths_are_whole_however_long(tmp_path):
    deep = tmp_path / ("long" * 30)
    lines = run("--out", deep).output.splitlines()
    assert f"  us: {deep}/us/nats.conf" in lines
    assert f"  eu: {deep}/eu/credentials/ (13 files of credentials)" in lines


def test_no_password_is_printed(tmp_path):
    output = run("--out", tmp_path).output
    for path in tmp_path.rglob("*.env"):
        assert path.read_text().split("NATS_PASSWORD=")[1].split()[0] not in output


def test_rotate_is_asked_for(tmp_path):
    run("--out", tmp_path)
    before = (tmp_path / "passwords.json").read_text()
    run("--out", tmp_path)
    assert (tmp_path / "passwords.json").read_text() == before
    run("--out", tmp_path, "--rotate")
    assert (tmp_path / "passwords.json").read_text() != before


def test_a_mistake_in_mesh_toml_is_told_and_nothing_is_written(tmp_path):
    config = tmp_path / "mesh.toml"
    text = DEFAULT_FILE.read_text()
    config.write_text(text.replace("rtt_ms = 80", 'rtt_ms = "x"'))
    line = text[: text.index("rtt_ms = 80")].count("\n") + 1
    result = run("--config", config, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.output.startswith(f"Error: {config}:{line}:1: links.0.rtt_ms: ")
    assert not (tmp_path / "out").exists()


def test_an_old_server_is_told_and_nothing_is_written(tmp_path):
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho nats-server: v2.10.4\n")
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    result = run("--out", tmp_path / "out", "--nats-server", old)
    assert result.exit_code == 2
    assert "nats-server 2.10.4 is too old" in result.output
    assert not (tmp_path / "out").exists()


def test_lost_passwords_are_not_replaced_silently(tmp_path):
    (tmp_path / "passwords.json").write_text("{")
    result = run("--out", tmp_path)
    assert result.exit_code == 2
    assert "not a passwords file" in result.output


def test_an_output_that_cant_be_written_is_one_line(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    result = run("--out", blocker / "out")
    assert result.exit_code == 1
    assert result.output.startswith("Error: can't write below ")


@pytest.mark.parametrize("arguments", [(), ("--config", "x", "--out")])
def test_the_output_directory_must_be_given(arguments: tuple[str, ...]):
    assert run(*arguments).exit_code == 2
