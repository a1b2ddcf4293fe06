import subprocess
import sys

import pytest

from tests.engines import install, tiny_llama
from tests.programs.bench import tiny_model


def test_an_engine_that_is_not_there_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "ENVIRONMENTS", tmp_path)
    with pytest.raises(AssertionError, match="make test-engines installs dynamo"):
        install.programs(install.DYNAMO)


def test_a_model_is_made_again_when_what_makes_it_changes(tmp_path, monkeypatch):
    made_by = tmp_path / "maker.py"
    monkeypatch.setattr(install, "_MADE_BY", (str(made_by),))
    made_by.write_text("SEED = 1")
    before = install.llama()
    made_by.write_text("SEED = 2")
    assert install.llama() != before


@pytest.mark.parametrize("module", [tiny_llama.__name__, tiny_model.__name__])
def test_a_model_made_of_what_is_no_file_says_how_it_is_made(tmp_path, module):
    command = (sys.executable, "-m", module, str(tmp_path / "model"), "Some text to learn.")
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "FOLDER FILE…" in said.stderr and "Traceback" not in said.stderr
