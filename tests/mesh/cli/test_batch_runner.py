"""The command line of `mesh batch-runner`: what it reads, and what it refuses."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from infra.nats import bundle
from infra.topology import parse
from mesh.cli.batch_runner import command
from tests.support.batch_regions import batch_toml


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "mesh.toml"
    path.write_text(batch_toml())
    return path


def refused(*arguments: object, status: int = 2) -> str:
    """What it says when it does not start."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--region", "mars"], 'no region "mars"'),
        (["--region", "us", "--name", "r1"], "no batch runner 'r1' in [regions.us]"),
        (["--region", "us", "--metrics", "x"], "--metrics: "),
        (["--region", "us", "--batch-credentials", "empty.env"], "no NATS_USER; give batch.env"),
        (["--region", "us", "--batch-credentials", "wrong.env"], "line 1 is not NAME=value"),
    ],
)
def test_what_it_refuses(toml, tmp_path, monkeypatch, arguments, why) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.env").write_text("")
    (tmp_path / "wrong.env").write_text("what\n")
    assert why in refused(*arguments, "--config", toml)


def test_it_ends_where_no_server_is(toml, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("infra.bus.START_TIMEOUT_S", 0.2)
    files = bundle.write(parse(toml.read_text(), "t"), tmp_path / "rendered")["us"].credentials
    logins = "--credentials", files["router"], "--batch-credentials", files["batch"]
    said = refused("--region", "us", "--config", toml, *logins, status=1)  # its unit tries again
    assert "no bus at" in said
