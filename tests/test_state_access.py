"""What a module of a core says it reads and writes of the state is what it does.

A state that is handed to every function hides who touches what; the docstring of each module shows
it again:

    Reads: held, inflight, replicas.
    Writes: held.

Reads: every name of the state in the module. Writes: those of them that it assigns or changes, by
itself or by a call of theirs; the test sees assignments and changes of plain dicts, sets and lists.
"""

import ast
import re

from tests.test_tidy import files_that_spell, parsed, relative

CORES = ("mesh/core", "agents/core")
STATES = ("RouterState", "RunnerState", "AgentState")
WHOLE = "Reads and writes: all of the state."
CHANGES = {"add", "append", "clear", "discard", "extend", "pop", "setdefault", "update"}
NOT_NAMED = {"effects", "emit"}  # what every function may do


def takes_state(tree: ast.Module) -> bool:
    """Whether a function of it is given the state."""
    names = (arg.annotation for node in ast.walk(tree) if isinstance(node, ast.arguments)
             for arg in node.args)  # fmt: skip
    return any(isinstance(name, ast.Name) and name.id in STATES for name in names)


def field_of(node: ast.AST) -> str | None:
    """X of `state.X`, `self.state.X` and `self._state.X`."""
    if not isinstance(node, ast.Attribute):
        return None
    owner = node.value
    name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
    return node.attr if name in ("state", "_state") else None


def accessed(tree: ast.Module) -> set[str]:
    return {name for node in ast.walk(tree) if (name := field_of(node))} - NOT_NAMED


def changed(tree: ast.Module) -> set[str]:
    """What is assigned or deleted, it or a part of it, or changed as a plain collection."""
    found = set()
    for node in ast.walk(tree):
        part: ast.AST | None = None
        if isinstance(node, ast.Attribute | ast.Subscript):
            part = node if isinstance(node.ctx, ast.Store | ast.Del) else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            part = node.func.value if node.func.attr in CHANGES else None
        if isinstance(part, ast.Subscript) or (part is not None and field_of(part) is None):
            part = getattr(part, "value", None)
        if part is not None and (name := field_of(part)):
            found.add(name)
    return found - NOT_NAMED


def told(text: str, reads: set[str] = frozenset()) -> set[str]:
    """The names after `Reads:` or `Writes:`."""
    if text == "nothing":
        return set()
    if text.startswith("all of these"):
        return reads - set(re.findall(r"\w+", text.removeprefix("all of these but ")))
    return set(re.findall(r"\w+", text))


def words(document: str, kind: str, module: str) -> str:
    found = re.search(rf"^{kind}: (.*?)\.$", document, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{module} lacks the line `{kind}: …`"
    return " ".join(found[1].split())


def test_each_module_says_what_it_reads_and_writes_of_the_state() -> None:
    for path in files_that_spell("|".join(STATES), *CORES):
        tree = parsed(path)
        document = ast.get_docstring(tree) or ""
        if takes_state(tree) and WHOLE not in document:
            name = relative(path)
            reads = told(words(document, "Reads", name))
            writes = told(words(document, "Writes", name), reads)
            assert sorted(reads | writes) == sorted(accessed(tree)), name
            assert changed(tree) <= writes, name


def test_the_test_sees_reads_and_changes() -> None:
    tree = ast.parse(
        "def f(state: RouterState):\n"
        "    state.a = state.b.c\n"
        "    state.d[1] = 2\n"
        "    state.e.add(3)\n"
        "    del state.g.h\n"
        "    state.i[1].pop()\n"
        "    state.emit(4)\n"
    )
    assert takes_state(tree)
    assert accessed(tree) == set("abdegi")
    assert changed(tree) == set("adegi")
