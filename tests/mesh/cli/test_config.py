"""`mesh config check` names every mistake of a mesh.toml; other commands refuse it likewise."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from infra.topology import DEFAULT_FILE
from mesh.cli.main import main

GOOD = DEFAULT_FILE.read_text()
BAD = GOOD.replace("rtt_ms = 80", "rtt = 80").replace(
    "[regions.us]\n", '[routing]\npolicy = "msh"\n[regions.us]\nrouting.policy = "random"\n', 1
)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def line_of(text: str, part: str) -> int:
    """The line of the first one that begins so, counted from 1."""
    return next(n for n, line in enumerate(text.splitlines(), 1) if line.startswith(part))


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "mesh.toml"
    path.write_text(BAD)
    return path


def mistakes(path: Path) -> list[str]:
    policy, own = line_of(BAD, "policy ="), line_of(BAD, "routing.policy")
    link, rtt = line_of(BAD, "[[links]]"), line_of(BAD, "rtt =")
    return [
        f"{path}:{policy}:1: routing.policy: unknown policy 'msh'; did you mean \"mesh\"?",
        f"{path}:{own}:1: regions.us.routing.policy: unknown policy 'random'; there are ",
        f"{path}:{link}:1: links.0.rtt_ms: missing; add it",
        f'{path}:{rtt}:1: links.0.rtt: unknown key; did you mean "rtt_ms"?',
    ]


def test_a_right_file_is_counted():
    result = run("config", "check", DEFAULT_FILE)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{DEFAULT_FILE}: no mistakes; 3 regions, 12 replicas, 3 links\n"


def test_all_mistakes_are_named_with_their_lines(bad: Path):
    result = run("config", "check", bad)
    *lines, count = result.stderr.splitlines()
    assert (result.exit_code, result.stdout, count) == (1, "", "4 mistakes")
    assert [line[: len(start)] for line, start in zip(lines, mistakes(bad), strict=True)] == (
        mistakes(bad)
    )


def test_a_missing_file_is_a_mistake(tmp_path: Path):
    result = run("config", "check", tmp_path / "nowhere.toml")
    assert result.exit_code == 1
    assert "nowhere.toml: can't be read (No such file or directory)" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("up", "--config"),
        ("router", "--region", "us", "--router", "r1", "--config"),
        ("batch-runner", "--region", "us", "--name", "batch-0", "--config"),
        ("infra", "nats", "--out", "out", "--config"),
        ("infra", "streams", "--credentials", "rendered", "--config"),
        ("doctor", "--config"),
    ],
    ids=" ".join,
)
def test_every_command_that_reads_it_says_the_same(
    bad: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(bad.parent)
    result = run(*words, bad)
    assert result.exit_code == 2
    said = result.stderr.replace("mesh router: ", "", 1).removeprefix("Error: ").splitlines()
    assert [line[: len(start)] for line, start in zip(said, mistakes(bad), strict=True)] == (
        mistakes(bad)
    )


def test_a_region_that_others_reach_without_a_key_is_a_warning_and_no_mistake(tmp_path):
    path = tmp_path / "mesh.toml"
    path.write_text(GOOD.replace("127.0.0.1:8101", "192.0.2.1:8101"))
    found = run("config", "check", path)
    assert found.exit_code == 0 and found.stderr.count("warning") == 1
    assert "http of us (192.0.2.1:8101): whoever reaches it is served" in found.stderr
    path.write_text(path.read_text() + "[auth]\nrequired = true\n")
    assert "warning" not in run("config", "check", path).output
