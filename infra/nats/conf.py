"""nats-server's configuration format, written so that a person can review it.

The format (docs.nats.io, "Configuration") is nearly a superset of JSON: keys need no quotes, a
list reads best one item a line, but it lacks JSON's unicode escapes. Strings are quoted always:
bare ones may turn into numbers, sizes or variables.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = "str | int | bool | Sequence[Value] | Mapping[str, Value]"

INDENT = "  "
_ESCAPES = str.maketrans(
    {code: f"\\x{code:02X}" for code in range(0x20)}
    | {ord(char): escape for char, escape in {'"': '\\"', "\\": "\\\\"}.items()}
)


def to_text(settings: Mapping[str, Value]) -> str:
    """The configuration file that says `settings`, in their order."""
    return "".join(f"{key}: {_value(value, '')}\n" for key, value in settings.items())


def _value(value: Value, indent: str) -> str:
    inner = indent + INDENT
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        lines = [f"{inner}{key}: {_value(item, inner)}" for key, item in value.items()]
        return _block("{", lines, indent, "}")
    return _block("[", [f"{inner}{_value(item, inner)}" for item in value], indent, "]")


def _quoted(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'


def _block(opening: str, lines: list[str], indent: str, closing: str) -> str:
    return "\n".join([opening, *lines, f"{indent}{closing}"]) if lines else opening + closing
