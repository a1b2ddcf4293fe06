"""Run `make test` with every supported Python that this machine has: python tests/pythons.py

Which are supported is said by pyproject.toml's classifiers. Each gets a virtual environment of its
own, `.venv-3.12` for 3.12. Fails if any run fails, or if the machine has none of them; a Python
that the machine lacks is listed and is no failure. Needs the standard library only: it runs
before anything is installed.
"""

import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLASSIFIER = re.compile(r"Programming Language :: Python :: (3\.\d+)")
ASK = "import platform; print(platform.python_version())"
ANSWER_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter that this machine has."""

    minor: str  # 3.12
    version: str  # 3.12.1
    program: str


def supported(project: Path = ROOT / "pyproject.toml") -> list[str]:
    """The versions that the project says it is tested with, oldest first."""
    classifiers = tomllib.loads(project.read_text())["project"]["classifiers"]
    found = [match[1] for line in classifiers if (match := CLASSIFIER.fullmatch(line))]
    return sorted(found, key=lambda minor: int(minor.split(".")[1]))


def find(minor: str) -> Python | None:
    """An interpreter of that version on PATH or among pyenv's, if one runs."""
    for program in _candidates(minor):
        version = _output(program, "-c", ASK)
        if version.startswith(f"{minor}."):
            return Python(minor, version, program)
    return None


def _candidates(minor: str) -> Iterator[str]:
    for name in (f"python{minor}", "python3"):
        if program := shutil.which(name):
            yield program
    # pyenv puts a name on PATH that only runs for versions that it was told to use.
    if shutil.which("pyenv"):
        yield from reversed(_output("pyenv", "whence", "--path", f"python{minor}").split())


def _output(*command: str) -> str:
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip()


def make_test(python: Python) -> int:
    """`make test` with that Python; the status it ended with."""
    venv = f"VENV=.venv-{python.minor}"
    command = ("make", "--no-print-directory", "test", f"PYTHON={python.program}", venv)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def run(minors: list[str], test: Callable[[Python], int], say: Callable[[str], None]) -> int:
    """Test with each of them that is found, and say how it went. The status to exit with."""
    found = {minor: find(minor) for minor in minors}
    for minor, python in found.items():
        say(f"Python {python.version}: {python.program}" if python else f"Python {minor}: not here")
    lines, failed = [], False
    for minor, python in found.items():
        if python is None:
            lines.append(f"Python {minor}: not tested, this machine has none")
            continue
        say(f"\n=== Python {python.version} ===")
        began = time.monotonic()
        status = test(python)
        failed |= status != 0
        end = "passed" if status == 0 else f"FAILED with status {status}"
        lines.append(f"Python {python.version}: {end} after {time.monotonic() - began:.0f} s")
    say("\n" + "\n".join(lines))
    if not any(found.values()):
        say("no supported Python was found: put one on the PATH")
        return 1
    return int(failed)


def _say(line: str) -> None:
    print(line, flush=True)  # before what `make` prints


if __name__ == "__main__":
    sys.exit(run(supported(), make_test, _say))
