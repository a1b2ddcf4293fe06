"""Programs that nobody here wrote, each in a virtual environment of its own.

They pin packages against each other and against us. What they are is said once, in
pyproject.toml's groups `bench-NAME`; a group `bench-NAME-alone` is installed without what its
packages say they need.
"""

import hashlib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.processes import Absent, output_of

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
INSTALL_WITHIN_S = 600.0
VERSION_WITHIN_S = 30.0
MODEL_WITHIN_S = 120.0
_STAMP = "installed"


def groups(name: str, project: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """The requirements of a program by group, those that stand alone first."""
    known = project["dependency-groups"]
    names = (f"bench-{name}-alone", f"bench-{name}")
    return {group: list(known[group]) for group in names if group in known}


def digest(wanted: Mapping[str, Sequence[str]]) -> str:
    """Of what an environment was made from."""
    return hashlib.sha256(repr(sorted(wanted.items())).encode()).hexdigest()


async def installed(name: str, environments: Path) -> Path:
    """The folder of the program's environment with its commands. Raises Absent."""
    wanted = groups(name, tomllib.loads(PYPROJECT.read_text()))
    home = environments / name
    programs, stamp = home / "bin", home / _STAMP
    if stamp.is_file() and stamp.read_text() == digest(wanted):
        return programs
    await _run(sys.executable, "-m", "venv", "--clear", str(home))
    for group, requirements in wanted.items():
        alone = ("--no-deps",) if group.endswith("-alone") else ()
        pip = (str(programs / "python"), "-m", "pip", "install", "--quiet")
        await _run(*pip, *alone, *requirements)
    stamp.write_text(digest(wanted))
    return programs


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
    said = await output_of(command, within_s=VERSION_WITHIN_S)
    return f"{package} {said.decode().strip()}"


async def _run(*command: str) -> None:
    try:
        await output_of(command, within_s=INSTALL_WITHIN_S)
    except Absent as problem:
        raise Absent(f"can't be installed: {problem}") from None
