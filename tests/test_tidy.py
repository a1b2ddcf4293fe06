"""The house rules that no linter knows, as tests. CONTRIBUTING says why each is there."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ("mesh", "agents", "schemas", "infra")
CONSTRUCTOR_ARGUMENTS_MAX = 7

# Words are written in two halves where this file would otherwise break its own rules.
LEFTOVERS = re.compile(
    "|".join(rf"\b{a}{b}\b" for a, b in (("TO", "DO"), ("FIX", "ME"), ("X", "XX")))
)
MACHINE_PATHS = re.compile(r"/(?<![\w.]/)(home|root|Users|work)/")
SKIPS = {"skip", "skipif", "xfail", "importorskip"}
# A subject in a string, or its beginning in an f-string whose region follows.
SUBJECT = re.compile(
    r"\bmesh\.(?!cli\.)([*>]|[^.\s]+\.(heartbeat|replica|router\.|ingress|gossip|ping|pool|lease|batch)\b)"
    r"|^mesh\.$|\b_INBOX\b"
)
SUBJECTS_HOME = "schemas/subjects.py"


@cache
def text(path: Path) -> str:
    return path.read_text()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(text(path))


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def files_that_spell(pattern: str, *folders: str) -> list[Path]:
    """Those that may hold what a test looks for: to parse all takes ten seconds."""
    return [path for path in python_files(*folders) if re.search(pattern, text(path))]


def text_files() -> list[Path]:
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".service", ".conf", ".txt"}
    top = [path for path in ROOT.iterdir() if path.is_file()]
    below = [
        p for f in (*CODE, "tests", "dashboards", "docs", ".ci") for p in (ROOT / f).rglob("*")
    ]
    return sorted(
        path
        for path in (*top, *below)
        if path.is_file() and (path.suffix in kinds or path.name == "Makefile" or path.suffix == "")
        if "__pycache__" not in path.parts and ".egg-info" not in str(path)
        if path.name != ".git" and "data" not in path.parts
    )


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Every string of the code but docstrings and the texts under fields."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node


def test_constructors_take_few_arguments():
    found = {
        f"{relative(path)} {owner.name}": len(arguments)
        for path in files_that_spell(r"\bdef __init__\(", *CODE)
        for owner in ast.walk(parsed(path))
        if isinstance(owner, ast.ClassDef)
        for function in owner.body
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        if len(arguments := _arguments(function)) > CONSTRUCTOR_ARGUMENTS_MAX
    }
    assert found == {}


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs][1:]


def test_no_call_hides_its_arguments_in_literal_tuples():
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in files_that_spell(r"(?m)(?:^|[(,])\s*\*\s*\(", *CODE)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        if any(isinstance(a, ast.Starred) and isinstance(a.value, ast.Tuple) for a in node.args)
    ]
    assert found == []


def test_nothing_is_left_for_later():
    found = [
        f"{relative(path)}:{number}"
        for path in text_files()
        if LEFTOVERS.search(text(path))
        for number, line in enumerate(text(path).splitlines(), 1)
        if LEFTOVERS.search(line)
    ]
    assert found == []


def test_no_test_is_skipped_or_expected_to_fail():
    found = [
        f"{relative(path)}:{node.lineno} {node.attr}"
        for path in files_that_spell(rf"\.\s*({'|'.join(SKIPS)})\b", "tests")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in SKIPS
    ]
    assert found == []


def test_subjects_are_spelled_in_one_module():
    found = [
        f"{relative(path)}:{node.lineno} {node.value!r}"
        for path in files_that_spell(r"(?m)^(?!\s*(?:from|import) ).*\bmesh\.|_INBOX", *CODE)
        if relative(path) != SUBJECTS_HOME
        for node in strings(parsed(path))
        if SUBJECT.search(node.value)
    ]
    assert found == [], f"build them with {SUBJECTS_HOME}"


def test_texts_name_no_place_on_somebodys_machine():
    found = [
        f"{relative(path)}:{number}"
        for path in text_files()
        if MACHINE_PATHS.search(text(path))
        for number, line in enumerate(text(path).splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert found == []


def test_modules_that_code_names_exist():
    modules = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    names = {path.name for path in modules}
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in modules
        for name in re.findall(r"`(?:\w+/)*(\w+\.py)`", path.read_text())
    }
    assert sorted((path, name) for path, name in named if name not in names) == []


def test_every_module_says_what_it_is_for():
    found = [
        relative(path)
        for path in python_files(*CODE)
        if text(path).strip() and not re.match(r'r?"""\s*[^\s"]', text(path))
    ]
    assert found == []
