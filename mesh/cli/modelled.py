"""Commands whose options are the fields of a pydantic model: one place says what is right.

An option that is not given is left to the model's default, so the command knows which were.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click
from pydantic import BaseModel, ValidationError

from mesh.cli.unusable import Unusable
from schemas.plain_words import what_it_must_be_instead

Model = TypeVar("Model", bound=BaseModel)
Command = TypeVar("Command", bound=Callable[..., Any])


def option(name: str, help: str, *, default: str = "", **kwargs: Any) -> Callable[..., Any]:
    """An option that may be left out; `default` tells people what then holds."""
    return click.option(name, help=f"{help}  [default: {default}]" if default else help, **kwargs)


def with_options(options: Iterable[Callable[..., Any]]) -> Callable[[Command], Command]:
    """Decorate a command with these, in their order."""
    listed = tuple(options)

    def decorate(function: Command) -> Command:
        for each in reversed(listed):
            function = each(function)
        return function

    return decorate


def given(options: Mapping[str, object]) -> dict[str, object]:
    """Those options that were given."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def validated(model: type[Model], options: Mapping[str, object]) -> Model:
    """The model of these options. Raises Unusable that names the option to change."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        message = what_it_must_be_instead(first)
        option = "--" + str(first["loc"][0]).replace("_", "-") + ": " if first["loc"] else ""
        raise Unusable(f"{option}{message}") from error
