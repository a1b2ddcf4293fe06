"""Every program that the Makefile starts can be imported and prints its help.

`make test-benchmarks` plays them, in short forms, and runs their own tests.
"""

import importlib
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[1]


def programs() -> list[str]:
    """The modules behind `python -m` in the Makefile, which names two folders by a variable."""
    text = (ROOT / "Makefile").read_text()
    folders = dict(re.findall(r"^(\w+) = .* -m (tests\.[\w.]+)$", text, re.MULTILINE))
    named = re.findall(r"^\t.* -m (tests\.[\w.]+)", text, re.MULTILINE)
    named += [
        f"{folders[name]}.{module}" for name, module in re.findall(r"\$\((\w+)\)\.(\w+)", text)
    ]
    return sorted({name for name in named if name.startswith("tests.programs.")})


@pytest.mark.parametrize("program", programs())
def test_it_starts(program: str):
    is_package = (ROOT / program.replace(".", "/")).is_dir()
    module = importlib.import_module(f"{program}.__main__" if is_package else program)
    result = CliRunner().invoke(module.main, ["--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Usage: ")
