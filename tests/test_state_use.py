"""What each rule's module says that it reads and writes of its core's state, against its code.

A core is a state with tables, and modules of functions over it. The docstring of such a module has

    Reads: replica, requests.
    Writes: engine, speed.

Without that held true a state would only hide who depends on what. What is assigned or deleted, or
anything inside it, is written; whether a method of a table writes, the docstring has to say. What
is written may be read as well. Effects may be emitted anywhere.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each core's folder and the class of its state.
STATES = {"agents/core": "AgentState"}
STATED = re.compile(r"^Reads: ([^.]*)\.\s+Writes: ([^.]*)\.", re.MULTILINE)
NOTHING = "nothing"
MODULES = [
    pytest.param(path, kind, id=str(path.relative_to(ROOT)))
    for folder, kind in STATES.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "state.py" and re.search(rf"\bimport .*\b{kind}\b", path.read_text())
]

Tables = dict[str, str]  # of each variable that stands for a table, or a part of one: its name


@pytest.mark.parametrize(("path", "kind"), MODULES)
def test_a_rule_says_what_it_reads_and_writes_of_the_state(path: Path, kind: str) -> None:
    tree = ast.parse(path.read_text())
    stated = STATED.search(ast.get_docstring(tree) or "")
    assert stated is not None, "its docstring has 'Reads: ….' and 'Writes: ….'"
    reads, writes = (_names(text) for text in stated.groups())
    touched, written = use(tree, kind)
    unstated, unused = sorted(touched - reads - writes), sorted((reads | writes) - touched)
    assert (unstated, unused) == ([], []), "unstated, stated and not used"
    assert sorted(written - writes) == [], "written, and not stated as such"
    assert sorted(reads & writes) == [], "what is written may be read as well"


def _names(text: str) -> set[str]:
    names = [name.strip() for name in text.replace("\n", " ").split(",")]
    assert names == sorted(names), "in order"
    return set(names) - {NOTHING}


def use(tree: ast.Module, kind: str) -> tuple[set[str], set[str]]:
    """Tables of the state that functions of the module name, and those that they surely write."""
    touched, written = set[str](), set[str]()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        states = _states(function, kind)
        nodes = list(ast.walk(function))
        touched |= {node.attr for node in nodes if _is_table(node, states)}
        tables = dict(_variables(nodes, states))
        changed = [target for target, _ in _assigned(nodes) if not isinstance(target, ast.Name)]
        tables_of = (_table(target, states, tables) for target in changed)
        written |= {table for table in tables_of if table is not None}
    return touched - {"emit"}, written


def _states(function: ast.FunctionDef, kind: str) -> set[str]:
    """What the state is called in there."""
    given = function.args
    arguments = (*given.posonlyargs, *given.args, *given.kwonlyargs)
    named = {one.arg for one in arguments if one.annotation and ast.unparse(one.annotation) == kind}
    own = {"self.state", "self._state"}
    variables = {
        target.id
        for target, value in _assigned(ast.walk(function))
        if isinstance(target, ast.Name) and value is not None and ast.unparse(value) in own
    }
    return named | own | variables


def _assigned(
    nodes: Iterator[ast.AST] | list[ast.AST],
) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What is assigned or deleted, each with its value where it has one of its own."""
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    match target, value:
                        case ast.Tuple(elts=several), ast.Tuple(elts=values):
                            yield from zip(several, values, strict=False)
                        case ast.Tuple(elts=several), _:
                            yield from ((one, None) for one in several)
                        case _:
                            yield target, value
            case ast.NamedExpr(target=target, value=value):
                yield target, value
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                yield target, None
            case ast.Delete(targets=targets):
                yield from ((target, None) for target in targets)


def _variables(nodes: list[ast.AST], states: set[str]) -> Iterator[tuple[str, str]]:
    for target, value in _assigned(nodes):
        table = None if value is None else _table(value, states, {})
        if isinstance(target, ast.Name) and table is not None:
            yield target.id, table


def _is_table(node: ast.AST, states: set[str]) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in states


def _table(node: ast.expr, states: set[str], tables: Tables) -> str | None:
    """The table that this is, or is a part of."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and _is_table(node, states):
            return node.attr
        node = node.value
    return tables.get(node.id) if isinstance(node, ast.Name) else None


def test_what_a_rule_writes_is_seen() -> None:
    tree = ast.parse(
        "def f(state: AgentState, now: float) -> None:\n"
        "    table, engine = state.adapters, state.engine\n"
        "    table.used_at[1] = now\n"
        "    state.seq += 1\n"
        "    state.emit(engine.models)\n"
        "    del state.speed.prompt\n"
    )
    touched, written = use(tree, "AgentState")
    assert touched == {"adapters", "engine", "seq", "speed"}
    assert written == touched - {"engine"}
