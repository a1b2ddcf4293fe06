"""The compiled twin gives what the twin gives, and is made of the sources that are there."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import compiled
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
    program = ("-m", "tests.programs.compiled")
    router, schemas = printed(*program, "-c", WHERE).split()
    assert router.endswith(".so") and schemas.endswith(".py")
    assert f"compiled-{digest(ROOT)}/" in router
    assert printed(*program, "-c", DIGEST) == printed("-c", DIGEST)


def test_make_compiles_on_demand_alone() -> None:
    for study, given, is_compiled in (
        ("study-scale", (), False),
        ("study-scale", ("COMPILED=1",), True),
        ("study-ablation", ("COMPILED=1",), False),
        ("study-lora", ("COMPILED=1",), False),
    ):
        shown = subprocess.run(
            ["make", "-n", study, *given],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("-m tests.programs.compiled -m tests" in shown.stdout) is is_compiled


def test_no_other_study_has_classes_that_inherit_from_compiled_ones() -> None:
    """Such classes are refused once they are called."""
    names = {name.removesuffix(".py").replace("/", ".") for name in modules(ROOT)}
    found = set()
    for path in (ROOT / "tests/programs/studies").rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in names
            for alias in node.names
        }
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        bases = {base.id for one in classes for base in one.bases if isinstance(base, ast.Name)}
        if bases & imported:
            found.add(path.name)
    assert found == {"ablation.py", "lora.py"}


def test_of_two_that_compile_at_once_both_have_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas/a.py").write_text("a = 1")
    folder = tmp_path / "build" / f"compiled-{digest(tmp_path)}"

    def another_is_quicker(copy: Path) -> None:
        shutil.copytree(copy, folder)

    monkeypatch.setattr(compiled, "_compile", another_is_quicker)
    assert compiled.compiled(tmp_path) == folder
    assert (folder / "schemas/a.py").exists()
    assert list(folder.parent.iterdir()) == [folder], "nothing else is left"


def test_what_was_not_compiled_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(copy: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiled, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiled.compiled(tmp_path)
    assert list((tmp_path / "build").iterdir()) == []


def test_without_a_compiler_the_last_line_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mesh/core").mkdir(parents=True)
    (tmp_path / "mesh/core/a.py").write_text("def one() -> int:\n    return 1\n")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(compiled.BuildFailed) as failed:
        compiled.compiled(tmp_path)
    *_, cause, last = str(failed.value).splitlines()
    assert "no-such-compiler" in cause and "gcc" in last
    assert list((tmp_path / "build").iterdir()) == []


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
