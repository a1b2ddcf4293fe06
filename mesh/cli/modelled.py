"""Options of command lines, made of the fields of pydantic models: limits and texts are there once.

An option that is not given is left to the model's default.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import click
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mesh.cli.unusable import Unusable
from schemas.problems import problem_of, what_it_must_be_instead
from schemas.settings import Option, number_in

M = TypeVar("M", bound=BaseModel)
Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Any], Any]


class FieldText(click.ParamType[Any]):
    """A text that becomes the value of a model's field, or a usage error that says what fits."""

    name = "value"

    def __init__(self, field: FieldInfo) -> None:
        self._field = field

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            kind: Any = Annotated[self._field.annotation, *self._field.metadata]
            try:
                return TypeAdapter(kind).validate_python(value)
            except ValidationError:  # of a number's text, or of a wrong one
                return TypeAdapter(kind).validate_python(number_in(value))
        except ValidationError as error:
            self.fail(problem_of(error), param, ctx)


def fields_of(model: type[Any]) -> Mapping[str, FieldInfo]:
    """The fields of a pydantic model or dataclass by name."""
    found: Mapping[str, FieldInfo] = (
        getattr(model, "model_fields", None) or model.__pydantic_fields__
    )
    return found


def option_of(
    model: type[Any], name: str, flag: str = "", *, help: str = "", **kwargs: Any
) -> Decorator:
    """The option of a field that has an `Option`; `help` in the place of the field's text."""
    field = fields_of(model)[name]
    [about] = [part for part in field.metadata if isinstance(part, Option)]
    own = field.get_default()
    default = about.default or ("" if own in (None, "", (), {}, PydanticUndefined) else f"{own}")
    text = help or about.help
    if default and not field.is_required() and not kwargs.get("required"):
        text = f"{text}  [default: {default.removesuffix('.0')}]"
    return click.option(
        flag or f"--{name.replace('_', '-')}",
        name,
        help=text,
        metavar=about.metavar,
        multiple=about.repeats,
        **kwargs,
    )


def options_of(model: type[Any]) -> tuple[Decorator, ...]:
    """The options of all fields that have an `Option`, as texts; the class's own fields first."""
    fields = fields_of(model)
    return tuple(
        option_of(model, name, required=fields[name].is_required())
        for name in sorted(fields, key=lambda name: name not in model.__annotations__)
        if any(isinstance(part, Option) for part in fields[name].metadata)
    )


def checked_option(model: type[Any], name: str, flag: str = "", **kwargs: Any) -> Decorator:
    """The same as `option_of`; click itself reads the value, as the field's type."""
    return option_of(model, name, flag, type=FieldText(fields_of(model)[name]), **kwargs)


def with_options(options: Iterable[Decorator]) -> Callable[[Command], Command]:
    """Decorate a command with these, in their order."""
    listed = tuple(options)

    def decorate(function: Command) -> Command:
        for each in reversed(listed):
            function = each(function)
        return function

    return decorate


def given(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if value not in (None, ())}


def validated(model: type[M], options: Mapping[str, object]) -> M:
    """The model of these options. Raises Unusable that names the option to change."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        message = what_it_must_be_instead(first)
        option = "--" + str(first["loc"][0]).replace("_", "-") + ": " if first["loc"] else ""
        raise Unusable(f"{option}{message}") from error
