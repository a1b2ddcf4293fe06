"""NATS subject patterns: which one includes another.

`*` stands for one token, a last `>` for one or more. Lists of permissions are made from several
rows of the channel table, and read best when no pattern in them is covered by another. A pattern
may have a queue group behind a space, as in permissions to subscribe: without one it is any.
"""

from collections.abc import Iterable


def covers(wide: str, narrow: str) -> bool:
    """Whether every subject that `narrow` matches is matched by `wide` too."""
    wide, _, wide_group = wide.partition(" ")
    narrow, _, narrow_group = narrow.partition(" ")
    if wide_group and wide_group != narrow_group:
        return False
    wide_tokens, narrow_tokens = wide.split("."), narrow.split(".")
    for number, token in enumerate(wide_tokens):
        if token == ">":
            return number < len(narrow_tokens)
        if number == len(narrow_tokens) or narrow_tokens[number] == ">":
            return False
        if token not in ("*", narrow_tokens[number]):
            return False
    return len(wide_tokens) == len(narrow_tokens)


def widest(patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns without those that another one covers, sorted: the same set, said once."""
    distinct = sorted(set(patterns))
    return tuple(
        pattern
        for pattern in distinct
        if not any(other != pattern and covers(other, pattern) for other in distinct)
    )
