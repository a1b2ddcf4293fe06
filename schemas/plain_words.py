"""What is said to people in words of theirs.

Most of it is what pydantic finds wrong with a value that a person gave: what it must be.

Its own speak of inputs, types and parsers; who gave an option or a key of a file wants to read
"must be more than 0".
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

_WHOLE, _NUMBER, _TRUTH = "must be a whole number", "must be a number", "must be true or false"
_WORDS = {
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "int_type": _WHOLE,
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "bool_parsing": _TRUTH,
    "bool_type": _TRUTH,
    "string_type": "must be a text",
}
_SIZES = {  # what was given says no more about these
    "too_short": "must have at least {min_length}",
    "too_long": "must have at most {max_length}",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} character(s)",
}
_GIVEN_CHARS_MAX = 60


def what_it_must_be(details: ErrorDetails) -> str:
    """One problem; our own ValueErrors in their own words, without pydantic's prefix."""
    words = _WORDS.get(details["type"]) or _SIZES.get(details["type"])
    if words is not None:
        return words.format(**_short(details.get("ctx", {})))
    message = details["msg"].removeprefix("Value error, ")
    return message.replace("Input should be", "must be", 1)


def what_it_must_be_instead(details: ErrorDetails) -> str:
    """The same, with what was given where the words don't say."""
    words = what_it_must_be(details)
    return f"{words}, not {details['input']!s:.{_GIVEN_CHARS_MAX}}" if _is_known(details) else words


def counted(number: int, noun: str) -> str:
    """How many of them: `1 replica`, `2 replicas`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _is_known(details: ErrorDetails) -> bool:
    return details["type"] in _WORDS


def _short(bounds: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: f"{value:g}" if isinstance(value, float) else value for name, value in bounds.items()
    }
