"""What `make test-pythons` looks for and says; that a suite passes is not run from a suite."""

import platform
import sys
import tomllib
from pathlib import Path

import pytest

from tests import pythons
from tests.pythons import ROOT, Python, find, run, supported

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HERE = "{}.{}".format(*sys.version_info)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_project_requires_no_python_older_than_those_it_is_tested_with():
    minors = supported()
    assert PROJECT["requires-python"] == f">={minors[0]}"
    assert minors == [f"3.{11 + number}" for number in range(len(minors))]


def test_this_suite_runs_with_a_supported_python():
    assert HERE in supported()


@pytest.mark.parametrize("text", ["README.md", "CONTRIBUTING.md"])
def test_texts_name_the_pythons_it_is_tested_with(text):
    *others, last = supported()
    assert f"{', '.join(others)} and {last}" in (ROOT / text).read_text().replace("\n", " ")


def test_an_interpreter_on_the_path_is_found(tmp_path, monkeypatch):
    (tmp_path / f"python{HERE}").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find(HERE) == Python(HERE, platform.python_version(), str(tmp_path / f"python{HERE}"))


def test_one_that_only_pyenv_knows_is_found(tmp_path, monkeypatch):
    """Its name on the PATH fails, as pyenv's does for versions that are not chosen."""
    real = script(tmp_path / "versions" / "3.99.1" / "python3.99", "echo 3.99.1")
    script(tmp_path / "bin" / "python3.99", "exit 127")
    script(tmp_path / "bin" / "pyenv", f'[ "$*" = "whence --path python3.99" ] && echo {real}')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    assert find("3.99") == Python("3.99", "3.99.1", str(real))


def test_another_version_under_the_name_does_not_count(tmp_path, monkeypatch):
    script(tmp_path / "python3.99", "echo 3.9.9")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert find("3.99") is None


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({"3.97": 0, "3.98": 0}, 0),
        ({"3.97": 2, "3.98": 0}, 1),
        ({"3.97": 0, "3.98": 2}, 1),
        ({}, 1),
    ],
)
def test_any_failure_fails_and_missing_ones_are_named(monkeypatch, statuses, expected):
    here = {minor: Python(minor, f"{minor}.0", "…") for minor in statuses}
    monkeypatch.setattr(pythons, "find", here.get)
    said: list[str] = []
    tested: list[str] = []

    def test(python: Python) -> int:
        tested.append(python.minor)
        return statuses[python.minor]

    assert run(["3.97", "3.98", "3.99"], test, said.append) == expected
    assert tested == list(statuses)
    text = "\n".join(said)
    assert "Python 3.99: not tested" in text
    for minor, status in statuses.items():
        assert f"Python {minor}.0: {'FAILED with status 2' if status else 'passed'}" in text
