"""What is wrong with a value or a file that a person wrote, in lines that name the remedy.

pydantic finds most of it; its own texts are about inputs, types and parsers.
"""

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from schemas.ids import NAME_ADVICE, NAME_PATTERN

_WHOLE, _NUMBER, _TRUTH = "must be a whole number", "must be a number", "must be true or false"
_TEXTS = {
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
_SIZES = {  # the value itself adds nothing to these
    "too_short": "must have at least {min_length}",
    "too_long": "must have at most {max_length}",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} character(s)",
}
_GIVEN_CHARS_MAX = 60

KeyPath = tuple[int | str, ...]  # as pydantic's `loc`


def did_you_mean(wrong: str, known: Collection[str], *, prefix: str = "") -> str:
    """The end of an error line: the known word nearest to `wrong`, or all there are.

    All begin with `prefix`, which is not compared: it would make any two of them alike.
    """
    ends = [word.removeprefix(prefix) for word in known]
    near = difflib.get_close_matches(wrong.removeprefix(prefix), ends, n=1)
    if near:
        return f'; did you mean "{prefix}{near[0]}"?'
    return f"; there are {', '.join(known) or 'none'}"


def checked_choice(kind: str, name: str, known: Collection[str]) -> str:
    """The name, if it is known. Raises ValueError that names those that are."""
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}: use one of {', '.join(known)}")
    return name


def counted(number: int, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def what_it_must_be(details: ErrorDetails) -> str:
    """One problem; our own ValueErrors without pydantic's prefix."""
    text = _TEXTS.get(details["type"]) or _SIZES.get(details["type"])
    bounds: Mapping[str, Any] = details.get("ctx", {})
    if text is not None:
        shown = {k: f"{v:g}" if isinstance(v, float) else v for k, v in bounds.items()}
        return text.format(**shown)
    if bounds.get("pattern") == NAME_PATTERN:
        return NAME_ADVICE
    message = details["msg"].removeprefix("Value error, ")
    return message.replace("Input should be", "must be", 1)


def what_it_must_be_instead(details: ErrorDetails) -> str:
    """The same, with the value where the text does not have it."""
    text = what_it_must_be(details)
    is_known = details["type"] in _TEXTS or details["type"] == "string_pattern_mismatch"
    return f"{text}, not {details['input']!s:.{_GIVEN_CHARS_MAX}}" if is_known else text


def problem_of(error: ValidationError) -> str:
    """The first problem in one line, with its key."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    text = what_it_must_be_instead(first)
    return f"{key}: {text}" if key else text


def problem_lines(
    error: ValidationError, known_keys: Callable[[KeyPath], Collection[str]]
) -> list[str]:
    """A file's problems as lines `key: what to do`. `known_keys`: those allowed beside a key."""
    return [line for _, line in problems(error, known_keys)]


def problems(
    error: ValidationError, known_keys: Callable[[KeyPath], Collection[str]]
) -> list[tuple[KeyPath, str]]:
    """The same lines, each with its key's path."""
    return [
        (details["loc"], line)
        for details in _causes(error.errors())
        for line in _explain(details, known_keys)
    ]


def _causes(errors: list[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Leave out what follows from another: in a table of a wrong name, of a list's wrong items."""
    wrong_names = {details["loc"][:-1] for details in errors if _is_name(details)}
    lists_of_wrong = {details["loc"][:-1] for details in errors}
    for details in errors:
        loc = details["loc"]
        if details["type"] == "too_short" and loc in lists_of_wrong:  # it counts the right ones
            continue
        if _is_name(details) or not any(loc[: len(name)] == name for name in wrong_names):
            yield details


def _is_name(details: ErrorDetails) -> bool:
    """Whether the problem is the key of a table of tables, which pydantic marks so."""
    return details["loc"][-1:] == ("[key]",)


def _explain(
    details: ErrorDetails, known_keys: Callable[[KeyPath], Collection[str]]
) -> Iterator[str]:
    loc, kind, found = details["loc"], details["type"], details["input"]
    key = ".".join(str(part) for part in loc if part != "[key]")
    message = what_it_must_be(details)
    if kind == "extra_forbidden":
        yield f"{key}: unknown key{did_you_mean(str(loc[-1]), known_keys(loc))}"
    elif kind == "missing":
        yield f"{key}: missing; add it"
    elif not key:  # a check across tables, which names its keys itself
        yield from message.splitlines()
    elif isinstance(found, dict) or "key_sha256" in loc:  # it may be the API key itself
        yield f"{key}: {message}"
    else:
        yield f"{key}: {message[:1].lower()}{message[1:]} (there is {found!r:.60})"
