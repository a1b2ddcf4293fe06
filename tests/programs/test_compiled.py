"""The compiled twin gives what the twin gives, and is made of the sources that are there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.compiled import COMPILED, INTERPRETED, ROOT, digest, modules

WHERE = "import mesh.core.router, schemas; print(mesh.core.router.__file__, schemas.__file__)"
DIGEST = "from tests.mesh.sim.test_same_seed import digest; print(digest(7))"


def printed(*command: str) -> str:
    """By Python with these arguments."""
    ran = [sys.executable, *command]
    done = subprocess.run(ran, cwd=ROOT, capture_output=True, text=True, check=True, timeout=900)
    return done.stdout


@pytest.mark.timeout(1000)  # gcc takes minutes
def test_results_are_equal_to_the_last_bit() -> None:
    compiled = ("-m", "tests.programs.compiled")
    router, schemas = printed(*compiled, "-c", WHERE).split()
    assert router.endswith(".so") and schemas.endswith(".py")
    assert f"compiled-{digest(ROOT)}/" in router
    assert printed(*compiled, "-c", DIGEST) == printed("-c", DIGEST)


def test_make_compiles_on_demand_alone() -> None:
    for study, given, is_compiled in (
        ("study-scale", (), False),
        ("study-scale", ("COMPILED=1",), True),
        ("study-ablation", ("COMPILED=1",), False),
    ):
        shown = subprocess.run(
            ["make", "-n", study, *given],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("-m tests.programs.compiled -m tests" in shown.stdout) is is_compiled


def test_each_pattern_and_each_exception_names_a_module() -> None:
    assert [pattern for pattern in COMPILED if not list(ROOT.glob(pattern))] == []
    for names in INTERPRETED.values():
        assert [name for name in names if not (ROOT / name).is_file()] == []
    assert not set(modules(ROOT)) & {name for names in INTERPRETED.values() for name in names}


def test_a_change_of_any_file_makes_another_copy(tmp_path: Path) -> None:
    made = set()
    for text in ("a = 1", "a = 2"):
        for name in ("schemas/a.py", "mesh/core/b.py", "infra/mesh.toml"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            made.add(digest(tmp_path))
    assert len(made) == 6
