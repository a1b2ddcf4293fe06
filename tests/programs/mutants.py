"""Small faults are put into the code, one at a time, and the tests run: do they notice?

    make mutants [COUNT=80] [SEED=1] [ONLY=mesh/session] [KEEP=FILE]

A mutant is one change: another comparison, a constant beside its own, a condition negated, a
statement dropped. Mutants are drawn over the router's and the agent's decisions and the HTTP that
they are asked by. The draw is by what stands in the code, not by its place, so that the same seed
draws the same mutants where a file has moved or has grown: two runs can be compared line by line.

For each, the tests that are nearest are played first; one that they all pass has survived.
Survivors are listed: each is a rule without a test, or a change that changes nothing. All is done
in a copy of the tree.
"""

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
AREAS = ("mesh/core", "mesh/session", "mesh/http", "agents/core")
# The HTTP of the clients' port, where it is no package of its own.
HTTP = (
    "answer_writer", "batches_api", "client_connection", "files_api", "form_parts", "http_api",
    "http_server", "large_bodies", "read_request", "request_body",
)  # fmt: skip
# After the tests that name a module and those of its own folder: what plays it among others.
TESTS = {
    "mesh/core": (
        "tests/mesh/core/lifecycle",
        "tests/mesh/core/test_scenarios.py",
        "tests/mesh/session",
    ),
    "mesh/session": ("tests/mesh/session", "tests/mesh/adapters/test_bus.py"),
    "mesh/http": ("tests/mesh/http", "tests/mesh/adapters"),
    "mesh/adapters": ("tests/mesh/adapters",),
    "agents/core": ("tests/agents/core", "tests/mesh/session"),
}
TESTS_S = 900.0  # of one stage: a mutant that waits for ever is noticed too
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
EXCHANGED = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/")}


@dataclass(frozen=True)
class Mutant:
    """Lines and columns as in `ast`; columns are bytes."""

    path: str  # from the root
    where: str  # class and function
    begin: tuple[int, int]
    end: tuple[int, int]
    old: str
    new: str
    line: str  # of the code, as it was

    @property
    def is_about(self) -> str:
        """What it is drawn by: equal in every version of the code that has this line there."""
        return "|".join((self.where, self.line, self.old, self.new))

    def __str__(self) -> str:
        old, new = (" ".join(text.split())[:60] for text in (self.old, self.new))
        return f"{self.path}:{self.begin[0]} {self.where}: {old}  →  {new}"

    def applied(self, text: str) -> str:
        """The file's text with this change."""
        lines = text.encode().splitlines(keepends=True)
        first, last = self.begin[0] - 1, self.end[0] - 1
        head, tail = lines[first][: self.begin[1]], lines[last][self.end[1] :]
        lines[first : last + 1] = [head + self.new.encode() + tail]
        return b"".join(lines).decode()


class Sites(ast.NodeVisitor):
    """Every mutant of one file."""

    def __init__(self, path: str, text: str) -> None:
        self.found: list[Mutant] = []
        self._path, self._text = path, text
        self._lines = text.splitlines()
        self._where: list[str] = []

    def _add(self, begin: tuple[int, int], end: tuple[int, int], new: str) -> None:
        lines = self._text.encode().splitlines(keepends=True)[begin[0] - 1 : end[0]]
        lines[-1] = lines[-1][: end[1]]
        old = b"".join(lines)[begin[1] :].decode()
        line = self._lines[begin[0] - 1].strip()
        mutant = Mutant(self._path, ".".join(self._where), begin, end, old, new, line)
        if old != new:
            self.found.append(mutant)

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        self._add(begin, end, new)

    def _operator(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Between two operands on one line."""
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return
        between = self._lines[right.lineno - 1].encode()[left.end_col_offset : right.col_offset]
        if (at := between.decode().find(old)) >= 0:
            begin = left.end_col_offset + at
            self._add((right.lineno, begin), (right.lineno, begin + len(old)), new)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._where.append(node.name)
        for child in node.body:
            self.visit(child)
        self._where.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _inside  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """What must hold is no rule."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Words of errors."""

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            self._operator(left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        swapped = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._operator(left, right, *swapped)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if (swapped := EXCHANGED.get(type(node.op))) is not None:
            self._operator(node.left, node.right, *swapped)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1))
        elif isinstance(node.value, float):
            self._replace(node, repr(node.value * 2 or 1.0))

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        assert node.test.end_lineno is not None
        text = ast.get_source_segment(self._text, node.test)
        self._replace(node.test, f"(not ({text}))")
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If  # noqa: N815

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._replace(node, "pass")
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        in_function = bool(self._where) and self._where[-1] != "__init__"
        if in_function and all(isinstance(each, ast.Attribute | ast.Subscript) for each in targets):
            self._replace(node, "pass")
        self.generic_visit(node)

    visit_AugAssign = visit_Assign  # noqa: N815


def modules(root: Path) -> Iterator[str]:
    """The files that mutants are drawn over."""
    for area in AREAS:
        yield from (str(path.relative_to(root)) for path in sorted((root / area).rglob("*.py")))
    http = (f"mesh/adapters/{name}.py" for name in HTTP)
    yield from (path for path in http if (root / path).exists())


def drawn(root: Path, seed: int, count: int, only: str) -> list[Mutant]:
    """As many as are asked for, the same for the same code."""
    found: dict[str, Mutant] = {}
    for path in modules(root):
        if only in path:
            text = (root / path).read_text()
            sites = Sites(path, text)
            sites.visit(ast.parse(text))
            for mutant in sites.found:
                found.setdefault(mutant.is_about, mutant)

    def rank(about: str) -> bytes:
        return hashlib.sha256(f"{seed}|{about}".encode()).digest()

    return [found[about] for about in sorted(found, key=rank)[:count]]


def copied(into: Path) -> Path:
    """The tree as it is, with what git does not know yet."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    for name in names.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    return into


def stages(root: Path, path: str, also: Iterable[str]) -> Iterator[list[str]]:
    """Tests that can see a module: files that name it, its own folder, then wider ones."""
    area = next(area for area in TESTS if path.startswith(area))
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    files = sorted((root / "tests" / area).rglob("test_*.py"))
    if naming := [str(file.relative_to(root)) for file in files if name in file.read_text()]:
        yield naming
    own = str(Path("tests") / Path(path).parent)
    wider = [place for place in (own, *TESTS[area], *also) if (root / place).exists()]
    yield from ([place] for place in dict.fromkeys(wider) if place != "tests/mesh/core")


def noticed_by(root: Path, mutant: Mutant, also: Iterable[str]) -> str:
    """The tests that failed with the mutant in place; empty if it survived them all."""
    file = root / mutant.path
    text = file.read_text()
    environment = {**os.environ, "PYTHONPATH": str(root)}
    try:
        _write(file, mutant.applied(text))
        for tests in stages(root, mutant.path, also):
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
            try:
                played = subprocess.run(
                    command,
                    cwd=root,
                    env=environment,
                    capture_output=True,
                    timeout=TESTS_S,
                    text=True,
                )
            except subprocess.TimeoutExpired:
                return f"{tests[0]} (no end in {TESTS_S:.0f} s)"
            if played.returncode not in (0, 5):  # 5: no test there
                failed = [
                    line
                    for line in played.stdout.splitlines()
                    if line.startswith(("FAILED", "ERROR"))
                ]
                return failed[0].split(" ")[1] if failed else tests[0]
    finally:
        _write(file, text)
    return ""


def check_tests() -> None:
    """Tests that can't even be collected would notice everything."""
    places = {place for places in TESTS.values() for place in places if (ROOT / place).exists()}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *sorted(places)]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if collected.returncode:
        raise click.ClickException(collected.stdout[-2000:])


def _write(file: Path, text: str) -> None:
    """With a time of its own: compiled files are told apart by size and whole seconds."""
    before = file.stat().st_mtime
    file.write_text(text)
    os.utime(file, (before + 2, before + 2))


@click.command()
@click.option("--count", type=click.IntRange(1), default=80, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--only", default="", help="Of files with this in their path.")
@click.option("--minutes", type=float, default=60.0, show_default=True, help="Begin no more then.")
@click.option(
    "--also", multiple=True, help="Tests that survivors of the nearer ones must pass too."
)
@click.option("--keep", type=click.Path(path_type=Path), help="Append each mutant's end to a file.")
def main(
    count: int, seed: int, only: str, minutes: float, also: tuple[str, ...], keep: Path | None
) -> None:
    """Put faults into a copy of the code, and list those that no test notices."""
    end_at = time.monotonic() + 60 * minutes
    check_tests()
    survivors, played = [], 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = copied(Path(folder))
        for mutant in drawn(root, seed, count, only):
            if time.monotonic() > end_at:
                break
            by = noticed_by(root, mutant, also)
            played += 1
            survivors += [] if by else [mutant]
            line = f"{'killed' if by else 'SURVIVED'}  {mutant}  {by}".rstrip()
            click.echo(line)
            if keep is not None:
                with keep.open("a") as lines:
                    lines.write(line + "\n")
    click.echo(f"\nseed {seed}: {played - len(survivors)} of {played} were noticed")
    for mutant in survivors:
        click.echo(f"survived: {mutant}")


if __name__ == "__main__":
    main()
