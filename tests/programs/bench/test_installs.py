import tomllib

import pytest

from tests.programs.bench import installs
from tests.programs.bench.installs import PYPROJECT, groups, installed
from tests.programs.bench.processes import Absent

PROJECT = tomllib.loads(PYPROJECT.read_text())


@pytest.mark.parametrize(
    "name", ["sglang-router", "vllm-router", "smg", "aiperf", "dynamo", "vllm"]
)
def test_every_program_is_pinned_in_the_project(name):
    found = groups(name, PROJECT)
    assert any("==" in requirement for group in found.values() for requirement in group)


def test_groups_without_dependencies_are_installed_first():
    assert list(groups("dynamo", PROJECT)) == ["bench-dynamo-alone", "bench-dynamo"]


def test_an_engine_has_groups_of_its_own():
    assert list(groups("vllm", PROJECT)) == ["engine-vllm-alone", "engine-vllm"]


def test_nothing_is_known_of_others():
    assert groups("stranger", PROJECT) == {}


async def test_what_can_not_be_installed_is_absent_with_the_reason(tmp_path, monkeypatch):
    wrong = tmp_path / "pyproject.toml"
    wrong.write_text('[dependency-groups]\nbench-x = ["./nowhere-at-all"]\n')
    monkeypatch.setattr(installs, "PYPROJECT", wrong)
    with pytest.raises(Absent, match="can't be installed"):
        await installed("x", tmp_path / "envs")
    assert not (tmp_path / "envs" / "x" / "installed").exists()


async def test_what_is_installed_is_not_installed_again(tmp_path, monkeypatch):
    empty = tmp_path / "pyproject.toml"
    empty.write_text("[dependency-groups]\nbench-x = []\n")
    monkeypatch.setattr(installs, "PYPROJECT", empty)
    programs = tmp_path / "envs" / "x" / "bin"
    (tmp_path / "envs" / "x").mkdir(parents=True)
    digest = installs.digest({"bench-x": []})
    (tmp_path / "envs" / "x" / "installed").write_text(digest)
    assert await installed("x", tmp_path / "envs") == programs
    assert not programs.exists()  # nothing was made


async def test_what_a_script_prints_is_installed_as_well(tmp_path, monkeypatch):
    project = tmp_path / "pyproject.toml"
    project.write_text("[dependency-groups]\nengine-x = []\n")
    monkeypatch.setattr(installs, "PYPROJECT", project)
    script = tmp_path / "script.py"
    script.write_text("print('./what-the-script-wants')")
    with pytest.raises(Absent, match="what-the-script-wants"):
        await installed("x", tmp_path / "envs", script)
    assert not installs.is_installed("x", tmp_path / "envs", script)


def test_an_environment_is_made_again_when_its_script_changes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('torch')")
    before = installs.digest({}, script)
    script.write_text("print('numpy')")
    assert installs.digest({}, script) != before
