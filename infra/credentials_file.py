"""`--credentials FILE`: the options' environment variables, from a file as it is rendered.

A process's environment is read by more people than its files are, and systemd's LoadCredential=
gives a service files.
"""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import click

CREDENTIALS = "credentials"  # the folder of such files, of one region
_VALUES = f"{__name__}.values"


def read_environment(path: Path) -> Mapping[str, str]:
    """The variables in a file of `NAME=value` lines; a value may stand in quotes.

    Raises ValueError, which names the line.
    """
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(("#", ";")):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not name.isidentifier():
            raise ValueError(f"line {number} is not NAME=value")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name] = value
    return found


def credentials_option(*, also: Collection[str] = ()) -> Callable[[Any], Any]:
    """The option. `also`: variables that the command reads without an option of their own.

    The command line counts before the environment, and both before the file.
    """

    def load(ctx: click.Context, param: click.Parameter, paths: tuple[Path, ...]) -> None:
        options = {str(other.envvar): other for other in ctx.command.params if other.envvar}
        values: dict[str, str] = ctx.meta.setdefault(_VALUES, {})
        defaults: dict[str, Any] = {}
        for path in paths:
            try:
                values.update(read_environment(path))
            except (OSError, ValueError) as error:
                raise click.BadParameter(f"{path}: {error}", ctx, param) from None
        if unknown := sorted(values.keys() - options.keys() - set(also)):
            known = ", ".join(sorted({*options, *also}))
            raise click.BadParameter(f"no {unknown[0]} is read here; known: {known}", ctx, param)
        for name, value in values.items():
            if (option := options.get(name)) is not None and option.name:
                words = option.type.split_envvar_value(value) if option.multiple else value
                defaults[option.name] = words
        ctx.default_map = {**(ctx.default_map or {}), **defaults}

    return click.option(
        "--credentials",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        multiple=True,
        is_eager=True,
        expose_value=False,
        callback=load,
        metavar="FILE",
        help="A file of NAME=value lines, as rendered, with environment variables of this command; "
        "repeat it for more.",
    )


def environment() -> Mapping[str, str]:
    """The environment of the command that runs, with what its credentials files add to it."""
    values: Mapping[str, str] = click.get_current_context().meta.get(_VALUES, {})
    return {**values, **os.environ}
