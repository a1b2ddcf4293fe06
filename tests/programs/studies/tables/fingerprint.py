"""Which code a result depends on: a hash over the modules that a run imports.

The closure of imports is read from the sources, beginning with the module that plays a case.
Registries of policies are not followed, or every result would depend on every policy: of the
policies only the case's own module counts, with what that imports. A policy whose name is not its
module's depends on all of them, which is safe and rarely wrong by much.
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[4]
OURS = ("mesh", "agents", "schemas", "tests")
PLAYS = "tests.programs.studies.tables.plays"
POLICIES = "mesh.core.policies"
REGISTRIES = (POLICIES, "mesh.sim.twin_policies", "tests.programs.studies.tables.ablation")


@cache
def code_of(policy: str) -> str:
    """A hash of the code that a run with this policy consists of."""
    own = f"{POLICIES}.{policy.partition(':')[0].replace('-', '_')}"
    if _source(own) is not None:
        modules = _closure(PLAYS) | _closure(own)
    else:
        modules = _closure(PLAYS).union(
            *(_closure(module) for name in REGISTRIES for module in _imports(name))
        )
    digest = hashlib.blake2b(digest_size=16)
    for module in sorted(modules):
        path = _source(module)
        assert path is not None
        digest.update(f"{module}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _closure(module: str) -> frozenset[str]:
    seen = {module}
    line = [module]
    for name in line:
        for imported in () if name in REGISTRIES else _imports(name):
            if imported not in seen:
                seen.add(imported)
                line.append(imported)
    return frozenset(seen)


@cache
def _imports(module: str) -> tuple[str, ...]:
    path = _source(module)
    assert path is not None, module
    return tuple(dict.fromkeys(_named(ast.parse(path.read_bytes()))))


def _named(tree: ast.AST) -> Iterator[str]:
    """Our own modules that the code imports. Packages around them hold no code but prose."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.split(".")[0] in OURS and _source(name) is not None:
                yield name


@cache
def _source(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None
