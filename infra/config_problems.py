"""What is wrong with a configuration file, as lines a person can act on: `key: what to do`.

pydantic knows what is wrong; its own text speaks of types and URLs. Here each problem becomes one
line, an unknown key comes with the nearest known one, and what is wrong only because of something
already said is left out.
"""

from collections.abc import Callable, Collection, Iterator

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from schemas.near_words import did_you_mean
from schemas.plain_words import what_it_must_be

Location = tuple[int | str, ...]
KnownKeys = Callable[[Location], Collection[str]]


def problem_lines(error: ValidationError, known_keys: KnownKeys) -> list[str]:
    """One line a problem; `known_keys` gives the keys allowed beside the one at a location."""
    return [
        line for details in _told_once(error.errors()) for line in _explain(details, known_keys)
    ]


def _told_once(errors: list[ErrorDetails]) -> Iterator[ErrorDetails]:
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


def _explain(details: ErrorDetails, known_keys: KnownKeys) -> Iterator[str]:
    loc, kind, found = details["loc"], details["type"], details["input"]
    key = ".".join(str(part) for part in loc if part != "[key]")
    message = what_it_must_be(details)
    if kind == "extra_forbidden":
        yield f"{key}: unknown key{did_you_mean(str(loc[-1]), known_keys(loc))}"
    elif kind == "missing":
        yield f"{key}: missing; add it"
    elif not key:  # a check across tables, which names its keys itself
        yield from message.splitlines()
    elif isinstance(found, dict) or "key_sha256" in loc:  # maybe the key itself
        yield f"{key}: {message}"
    else:
        yield f"{key}: {message[:1].lower()}{message[1:]} (there is {found!r:.60})"
