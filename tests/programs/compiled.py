"""Runs Python with the twin's pure modules compiled by mypyc: the same results for less CPU.

    make study-scale COMPILED=1
    .venv/bin/python -m tests.programs.compiled .venv/bin/mesh sim --workload chat

What follows the name is given to Python, which imports the packages from a copy in
build/compiled-DIGEST, where those of COMPILED are extension modules. The digest is that of all
files that go into the copy, of this file, and of Python's and mypy's versions: a change of any of
them makes another copy (some minutes, once; needs gcc and Python's headers; 37 MB, until `make
clean`), so a stale one can't be run. The checkout and its virtual environment stay as they are.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "infra", "agents", "mesh")
COMPILED = (
    *("agents/core/*.py", "agents/sim/*.py", "mesh/core/*.py", "mesh/session/*.py"),
    *(f"mesh/core/{floor}/*.py" for floor in ("gossip", "lifecycle", "membership", "placement")),
    *("mesh/core/prefixes/*.py", "mesh/core/view/*.py", "mesh/core/policies/mesh*.py"),
    *("mesh/sim/*.py", "mesh/sim/offline/runner.py"),
)
# Of those, what mypyc makes wrongly or not at all: it keeps no annotations that pydantic could
# read, no protocol that is checked at run time, and no class that inherits from a built-in one.
INTERPRETED = {
    "pydantic reads it": (
        *("agents/core/engine_curves.py", "agents/core/known_speed.py"),
        *("agents/core/offline_profile.py", "agents/sim/profiles.py"),
        *("agents/sim/profile_files.py", "mesh/core/recording.py"),
        *("mesh/sim/config.py", "mesh/sim/rtt.py"),
    ),
    "inherits from a built-in class": ("mesh/core/requests/record.py",),
    "reads its own __slots__": ("mesh/sim/recording_replay.py",),
    "loops over 64-bit keys, which are no faster compiled": (
        *("agents/sim/kv_cache.py", "mesh/core/gossip/remote_prefixes.py"),
        *("mesh/core/prefixes/prefix_index.py", "mesh/sim/workload.py"),
    ),
    "seldom runs": (
        *("agents/core/engine_cache.py", "agents/core/held_log.py", "agents/core/kv_events.py"),
        *("agents/core/iteration_samples.py", "agents/core/kv_stages.py"),
        *("agents/core/latency_predictor.py", "agents/core/slo_profile.py"),
        *("agents/sim/measured_profile.py", "agents/sim/profiling_run.py", "agents/sim/text.py"),
        *("mesh/session/headers.py", "mesh/sim/agent_config.py", "mesh/sim/cache_copies.py"),
        *("mesh/sim/dynamo_kv.py", "mesh/sim/llm_d_precise.py", "mesh/sim/oracle.py"),
        *("mesh/sim/sglang_router.py", "mesh/sim/twin_policies.py"),
    ),
}

SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup
modules = mypycify(sys.argv[1:], opt_level="2", debug_level="0", multi_file=True)
setup(name="compiled", packages=[], ext_modules=modules, script_args=["-q", "build_ext", "-i"])
"""


class BuildFailed(SystemExit):
    """The modules were not compiled."""


def modules(root: Path) -> list[str]:
    """The modules that are compiled, as paths below the root."""
    found = (path for pattern in COMPILED for path in root.glob(pattern) if path.stat().st_size)
    names = {path.relative_to(root).as_posix() for path in found}
    return sorted(names.difference(*INTERPRETED.values()))


def digest(root: Path) -> str:
    """Of all that the copy is made of."""
    found = hashlib.sha256(f"{sys.version} {version('mypy')}".encode())
    found.update(Path(__file__).read_bytes())
    for path in _files(root):
        data = path.read_bytes()
        found.update(f"{path.relative_to(root)} {len(data)}\n".encode() + data)
    return found.hexdigest()[:16]


def compiled(root: Path) -> Path:
    """The folder of the copy, which is built if it isn't there."""
    folder = _folder(root, root)
    if folder.exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    building = Path(mkdtemp(dir=folder.parent))
    try:
        for path in _files(root):
            copy = building / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        folder = _folder(root, building)  # of what was copied: a source may have changed meanwhile
        _compile(building)
        _publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _publish(building: Path, folder: Path) -> None:
    """Make all of it the copy, unless another process was quicker."""
    try:
        building.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _folder(root: Path, copied: Path) -> Path:
    return root / "build" / f"compiled-{digest(copied)}"


def _files(root: Path) -> Iterator[Path]:
    for package in PACKAGES:
        found = (path for path in (root / package).rglob("*") if path.is_file())
        yield from sorted(path for path in found if "__pycache__" not in path.parts)


def _compile(copy: Path) -> None:
    names = modules(copy)
    print(f"compiling {len(names)} modules, which takes some minutes", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-c", SETUP, *names],
        cwd=copy,
        capture_output=True,
        text=True,
        env={**os.environ, "CFLAGS": "-w"},
        check=False,
    )
    if done.returncode:
        said = f"{done.stdout}{done.stderr}".rstrip()
        raise BuildFailed(f"{said}\nnot compiled: gcc and Python's headers are needed")
    shutil.rmtree(copy / "build")


def main() -> None:
    """Run Python with the arguments of this program."""
    paths = f"{compiled(ROOT)}{os.pathsep}{ROOT}"
    # -P: else the checkout, as the folder of work, would come before the copy.
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
