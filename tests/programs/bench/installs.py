"""Programs of others, each in a virtual environment of its own.

They pin packages against each other and against us. They are listed once, in
pyproject.toml's groups `bench-NAME`, `engine-NAME` and `client-NAME`; a group `…-alone`
is installed first, and without the dependencies of its packages.
"""

import hashlib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs.bench.processes import Absent, output_of

ROOT = Path(__file__).parents[3]
PYPROJECT = ROOT / "pyproject.toml"
ENVIRONMENTS = ROOT / "build" / "environments"
FAMILIES = ("bench", "engine", "client")
INSTALL_WITHIN_S = 1800.0  # torch alone is a download of gigabytes
VERSION_WITHIN_S = 30.0
MODEL_WITHIN_S = 120.0
_STAMP = "installed"


def groups(name: str, project: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """The requirements of a program by group, those without dependencies first."""
    known = project["dependency-groups"]
    names = [f"{family}-{name}{end}" for family in FAMILIES for end in ("-alone", "")]
    return {group: list(known[group]) for group in names if group in known}


def digest(wanted: Mapping[str, Sequence[str]], script: Path | None = None) -> str:
    """Of what an environment was made from."""
    text = script.read_text() if script else ""
    return hashlib.sha256((repr(sorted(wanted.items())) + text).encode()).hexdigest()


async def installed(name: str, environments: Path, script: Path | None = None) -> Path:
    """The folder of the program's environment with its commands. Raises Absent.

    `script`: run by the environment's Python once the group without dependencies is there; the
    requirements that it prints, one a line, are installed with the other group.
    """
    programs = environments / name / "bin"
    if is_installed(name, environments, script):
        return programs
    await _run(sys.executable, "-m", "venv", "--clear", str(environments / name))
    python = str(programs / "python")
    wanted = _wanted(name)
    for group, requirements in wanted.items():
        alone = group.endswith("-alone")
        more = () if alone or script is None else await _run(python, str(script))
        options = ("--quiet", "--no-deps") if alone else ("--quiet",)
        await _run(python, "-m", "pip", "install", *options, *requirements, *more)
    (environments / name / _STAMP).write_text(digest(wanted, script))
    return programs


def is_installed(name: str, environments: Path, script: Path | None = None) -> bool:
    """Whether the program's environment is there, made from what is wanted now."""
    stamp = environments / name / _STAMP
    return stamp.is_file() and stamp.read_text() == digest(_wanted(name), script)


async def tiny_model(programs: Path, folder: Path) -> Path:
    """A folder that passes for a model, made by the environment's tokenizers. Raises Absent."""
    texts = [str(path) for path in sorted(PYPROJECT.parent.glob("*.md"))]
    command = (str(programs / "python"), str(Path(__file__).with_name("tiny_model.py")))
    await output_of((*command, str(folder), *texts), within_s=MODEL_WITHIN_S)
    return folder


async def version_of(package: str, programs: Path) -> str:
    """What is installed, as `name 1.2.3`."""
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    command = (str(programs / "python"), "-c", ask)
    output = await output_of(command, within_s=VERSION_WITHIN_S)
    return f"{package} {output.decode().strip()}"


def _wanted(name: str) -> dict[str, list[str]]:
    return groups(name, tomllib.loads(PYPROJECT.read_text()))


async def _run(*command: str) -> list[str]:
    """The lines that it printed."""
    try:
        return (await output_of(command, within_s=INSTALL_WITHIN_S)).decode().splitlines()
    except Absent as problem:
        raise Absent(f"can't be installed: {problem}") from None
