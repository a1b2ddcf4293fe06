"""Where each key and each item of a TOML text is: `tomllib` reads values, and keeps no places.

The text has been read by `tomllib` before, so it is valid TOML: what is looked for here is only
where strings and comments end, and how deep brackets are. Keys are decoded by `tomllib` itself.
"""

import json
import re
import tomllib
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'  # up to two quotes more belong to the text
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|(?P<comment>\#[^\n]*)"
    r"|[\[\]{},=\n]"
    r"""|[^\s\[\]{},=\#"']+""",
    re.DOTALL,
)
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[^".:]+')
_ENDS_OF_VALUES = ("\n", ",", "]", "}")

Names = tuple[str, ...]  # of tables, a key and numbers of items: ("links", "0", "between", "1")


def key_text(*names: str) -> str:
    """A key as TOML writes it: names that are not plain in quotes."""
    return ".".join(name if _BARE.fullmatch(name) else json.dumps(name) for name in names)


def key_path(line: str) -> Names:
    """The names of the key that a line, `key: what to do` or the key alone, begins with."""
    names, at = [], 0
    while (part := _PART.match(line, at)) is not None:
        names.append(json.loads(part[0]) if part[0].startswith('"') else part[0])
        at = part.end()
        if line[at : at + 1] != ".":
            break
        at += 1
    return tuple(names)


class Position(NamedTuple):
    """Of a text's character, both counted from 1."""

    line: int
    column: int


class TomlPositions:
    """The positions of every key, table and item of an array in a valid TOML text."""

    def __init__(self, text: str) -> None:
        self._line_ends = [match.start() for match in re.finditer("\n", text)]
        self._found: dict[Names, Position] = {}
        self._tables: dict[Names, int] = {}  # of arrays of tables: how many there were so far
        found = (match for match in _TOKEN.finditer(text) if match["comment"] is None)
        self._tokens = deque((match[0], match.start()) for match in found)
        self._read()

    def of(self, names: Names) -> Position | None:
        """Where that is, or else the innermost table around it that is written somewhere."""
        for length in range(len(names), 0, -1):
            if (position := self._found.get(names[:length])) is not None:
                return position
        return None

    def _read(self) -> None:
        table: Names = ()
        while self._tokens:
            token, start = self._tokens[0]
            if token == "\n":
                self._tokens.popleft()
            elif token == "[":
                table = self._header(start)
            else:
                self._pair(table)

    def _header(self, start: int) -> Names:
        """Read `[a.b]` or `[[a.b]]`; return the names of the table that it opens."""
        self._tokens.popleft()
        is_array = self._tokens[0][0] == "["
        if is_array:
            self._tokens.popleft()
        *outer, last = self._key("]")
        if is_array:
            self._tokens.popleft()  # its second bracket
        table = (*self._current(outer), last)
        if is_array:
            number = self._tables.get(table, 0)
            self._tables[table] = number + 1
            table += (str(number),)
        self._keep(table, start)
        return table

    def _current(self, names: Iterable[str]) -> Names:
        """The names with the number of the last table of each array of tables."""
        found: Names = ()
        for name in names:
            found += (name,)
            if found in self._tables:
                found += (str(self._tables[found] - 1),)
        return found

    def _pair(self, table: Names) -> None:
        start = self._tokens[0][1]
        names = (*table, *self._key("="))
        self._keep(names, start)
        self._value(names)

    def _key(self, end: str) -> Names:
        """Read a key up to `end`, that one too."""
        parts = []
        while (token := self._tokens.popleft()[0]) != end:
            parts.append(token)
        return tuple(_names_of(tomllib.loads("".join(parts) + " = 0")))

    def _value(self, names: Names) -> None:
        opening = self._tokens.popleft()[0]
        if opening == "[":
            self._array(names)
        elif opening == "{":
            while (token := self._tokens[0][0]) != "}":
                if token in ("\n", ","):
                    self._tokens.popleft()
                else:
                    self._pair(names)
            self._tokens.popleft()
        else:
            while self._tokens and self._tokens[0][0] not in _ENDS_OF_VALUES:
                self._tokens.popleft()  # a date and its time

    def _array(self, names: Names) -> None:
        number = 0
        while (token := self._tokens[0][0]) != "]":
            if token == "\n":
                self._tokens.popleft()
            elif token == ",":
                self._tokens.popleft()
                number += 1
            else:
                item = (*names, str(number))
                self._keep(item, self._tokens[0][1])
                self._value(item)
        self._tokens.popleft()

    def _keep(self, names: Names, start: int) -> None:
        """Note the first place of these names, and of tables that have no header of their own."""
        line = bisect_left(self._line_ends, start)
        position = Position(line + 1, start - (self._line_ends[line - 1] if line else -1))
        for length in range(1, len(names) + 1):
            self._found.setdefault(names[:length], position)


def _names_of(table: object) -> Iterator[str]:
    while isinstance(table, dict):
        [(name, table)] = table.items()
        yield name
