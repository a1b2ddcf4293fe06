"""Prints the modules and functions that are unusually long, for `make lint`. Nothing fails by it.

A length is no reason to split or to merge. A part in this list may do two things; then it is two.
"""

import ast
from collections.abc import Iterator

from tests.test_tidy import CODE, functions, parsed, python_files, relative, text

MODULE_LINES = 600
FUNCTION_LINES = 80


def long_parts() -> Iterator[tuple[int, str]]:
    """Lines, and the module or the function that has them, of the product and its tests."""
    for path in python_files(*CODE, "tests"):
        if (lines := len(text(path).splitlines())) > MODULE_LINES:
            yield lines, relative(path)
        for function in functions(parsed(path)):
            if (lines := _lines(function)) > FUNCTION_LINES:
                yield lines, f"{relative(path)}:{function.lineno} {function.name}"


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


if __name__ == "__main__":
    for lines, part in sorted(long_parts(), reverse=True):
        print(f"unusually long, {lines} lines: {part}")
