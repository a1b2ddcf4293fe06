"""NATS subject patterns: which one includes another, and which two can meet.

`*` stands for one token, a last `>` for one or more. Permissions are lists of patterns, so "may
this user ever hear that?" is a question about two patterns, answered here and not by eye.
"""

from collections.abc import Iterable


def covers(wide: str, narrow: str) -> bool:
    """Whether every subject that `narrow` matches is matched by `wide` too."""
    wide_tokens, narrow_tokens = wide.split("."), narrow.split(".")
    for number, token in enumerate(wide_tokens):
        if token == ">":
            return number < len(narrow_tokens)
        if number == len(narrow_tokens) or narrow_tokens[number] == ">":
            return False
        if token not in ("*", narrow_tokens[number]):
            return False
    return len(wide_tokens) == len(narrow_tokens)


def overlaps(a: str, b: str) -> bool:
    """Whether some subject is matched by both."""
    a_tokens, b_tokens = a.split("."), b.split(".")
    for left, right in zip(a_tokens, b_tokens, strict=False):
        if ">" in (left, right):
            return True
        if left != right and "*" not in (left, right):
            return False
    return len(a_tokens) == len(b_tokens)


def widest(patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns without those that another one covers, sorted: the same set, said once."""
    distinct = sorted(set(patterns))
    return tuple(
        pattern
        for pattern in distinct
        if not any(other != pattern and covers(other, pattern) for other in distinct)
    )
