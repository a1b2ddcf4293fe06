"""What `make` does before its target, and how it passes arguments on."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def installed(checkout: Path, venv: str) -> str:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    made = subprocess.run(
        ["make", f"{venv}/.installed", f"VENV={venv}"],
        cwd=checkout,
        env=alone,  # a `make test` above would have its say
        check=True,
        capture_output=True,
        text=True,
    )
    return made.stdout


@pytest.mark.parametrize("venv", [".venv", ".venv-3.99"])
def test_it_says_that_it_installs_and_only_then(tmp_path, venv):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for script in ("infra/virtual-environment", f"{venv}/bin/python"):  # that take no minute
        path = tmp_path / script
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    said = f"installing into {venv}, which takes a minute or two\n"
    assert installed(tmp_path, venv).startswith(said)
    assert "installing" not in installed(tmp_path, venv)
    assert [path.name for path in tmp_path.glob(".venv*")] == [venv]


def test_a_path_may_have_a_space():
    for argument in (
        "compare TRACE", "fidelity TRACE", "gossip-live TRACE", "study-mesh TRACES", "bench BESIDE",
    ):  # fmt: skip
        target, name = argument.split()
        made = subprocess.run(
            ["make", "-n", target, f"{name}=two words"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "two words" in shlex.split(made.stdout), argument
