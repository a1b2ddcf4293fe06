"""vLLM on a GPU as the program that is on PATH."""

import json
import sys

import pytest

from tests.engines.vllm_gpu import SHAPE, make_llama, program
from tests.programs.bench.processes import Absent

TRAINER = "import sys, pathlib; pathlib.Path(sys.argv[2]).mkdir()"  # in place of the tokenizer's


def a_vllm_on_path(folder, monkeypatch):
    for name, line in (("vllm", "exit 1"), ("python", f"exec {sys.executable} -c '{TRAINER}' $*")):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_without_it_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Absent, match="install it on a machine with a GPU"):
        program()


async def test_its_model_is_a_configuration_made_by_the_python_beside_it(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    a_vllm_on_path(tmp_path / "bin", monkeypatch)
    await make_llama(tmp_path / "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert {name: config[name] for name in SHAPE} == SHAPE
