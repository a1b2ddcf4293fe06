"""Makes inputs of good ones: changed where their grammar has places, and then, rarely, as bytes."""

from collections.abc import Callable
from random import Random
from typing import Any

STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 255, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63)),
    *(2**64 - 1, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf")),
    *(float("-inf"), "", " ", "a", "0", "-1", "1e999", "nan", "true", "\x00", "\n", "\ud800"),
    *("é", "\u0663", "😀", "./", "a" * 300, "9" * 5000, "*", ">", "a.b", "=FF", "=C3", b""),
    *(b"\xff\xfe", [], {}, [[]], {"": 0}),
)
BYTES: tuple[bytes, ...] = (
    *(b"", b"\x00", b"\xff", b"\n", b"\r\n", b"\r\n\r\n", b"{", b"[", b'"', b"}", b"]", b",", b":"),
    *(b" ", b"-", b"=", b"9" * 5000, b"1e309", b"\xed\xa0\x80", b"\xc3", b"NaN", b"null"),
)
DEEP = 300


def deep(value: Any) -> Any:
    for _ in range(DEEP):
        value = [value]
    return value


def changed(dice: Random, tree: Any) -> Any:
    """The tree with one change somewhere in it."""
    if isinstance(tree, dict) and tree and dice.random() < 0.85:
        key = dice.choice(list(tree))
        fields = dict(tree)
        what = dice.random()
        if what < 0.15:
            del fields[key]
        elif what < 0.25:
            fields[dice.choice(("", "x", *map(str, tree)))] = dice.choice((fields[key], *STRANGE))
        else:
            fields[key] = changed(dice, fields[key])
        return fields
    if isinstance(tree, list | tuple) and tree and dice.random() < 0.85:
        items, at = list(tree), dice.randrange(len(tree))
        what = dice.random()
        if what < 0.1:
            del items[at]
        elif what < 0.2:
            items.insert(at, dice.choice((items[at], *STRANGE)))
        elif what < 0.24:
            items *= dice.choice((2, 50))
        else:
            items[at] = changed(dice, items[at])
        return items
    return _leaf(dice, tree)


def _leaf(dice: Random, value: Any) -> Any:
    what = dice.random()
    if what < 0.03:
        return deep(value)
    if isinstance(value, str) and value and what < 0.4:
        at = dice.randrange(len(value))
        return value[:at] + dice.choice(("", "\x00", ".", value, "é", "-", "9")) + value[at + 1 :]
    if isinstance(value, int | float) and not isinstance(value, bool) and what < 0.4:
        return dice.choice((-value, value + 1, value * 1e300, value / 3, str(value)))
    return dice.choice(STRANGE)


def torn(dice: Random, data: bytes) -> bytes:
    """The bytes with one change."""
    at, what = dice.randint(0, len(data)), dice.random()
    to = min(len(data), at + dice.choice((1, 1, 4, 40)))
    if what < 0.2:
        return data[:at]
    if what < 0.35:
        return data[:at] + data[to:]
    if what < 0.5:
        return data[:to] + data[at:]
    if what < 0.75:
        return data[:at] + dice.choice(BYTES) + data[at:]
    return data[:at] + bytes(dice.randrange(256) for _ in range(to - at)) + data[to:]


def of_tree(dice: Random, tree: Any, write: Callable[[Any], bytes]) -> bytes:
    """Up to four changes; written, and sometimes torn."""
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        tree = changed(dice, tree)
    try:
        data = write(tree)
    except (TypeError, ValueError, OverflowError):  # no such value in that form
        return b""
    return torn(dice, data) if dice.random() < 0.1 else data


def of_text(dice: Random, data: bytes) -> bytes:
    """Lines and words moved, or bytes torn."""
    for _ in range(dice.choice((1, 1, 2, 4))):
        lines = data.split(b"\n")
        at, what = dice.randrange(len(lines)), dice.random()
        if what < 0.15:
            del lines[at]
        elif what < 0.3:
            lines.insert(at, dice.choice(lines))
        elif what < 0.7:
            words = lines[at].split(b" ")
            words[dice.randrange(len(words))] = dice.choice((*BYTES, *words, b"-1", b"1e308"))
            lines[at] = b" ".join(words)
        else:
            data = torn(dice, data)
            continue
        data = b"\n".join(lines)
    return data
