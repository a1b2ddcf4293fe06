"""The options by which a command is pointed at an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from pydantic import SecretStr, ValidationError

from agents.config import EngineConfig, EngineKeyInvalid, EngineKindName, engine_key
from infra.credentials_file import environment
from schemas.problems import what_it_must_be_instead

Config = TypeVar("Config", bound=EngineConfig)

_OPTIONS = (
    click.option(
        "--engine-url",
        envvar="ENGINE_URL",
        required=True,
        help="The engine's API, http://host:port. [ENGINE_URL]",
    ),
    click.option(
        "--metrics-url",
        envvar="METRICS_URL",
        default="",
        help="Its metrics page. [METRICS_URL]",
        show_default="engine-url + /metrics",
    ),
    click.option(
        "--engine-kind",
        envvar="ENGINE_KIND",
        type=click.Choice(get_args(EngineKindName)),
        default="vllm",
        help="[ENGINE_KIND]",
    ),
    click.option(
        "--batch-max",
        type=int,
        envvar="MESH_BATCH_MAX",
        help="Most requests the engine runs at once (vLLM: --max-num-seqs; 1 if one after the "
        "other). [MESH_BATCH_MAX]",
        show_default="what llama.cpp and SGLang show; unknown for others",
    ),
    click.option(
        "--model",
        "models",
        multiple=True,
        envvar="MESH_ENGINE_MODELS",
        metavar="NAME",
        help="What the engine serves, for one that can't list it; repeat it for more, or separate "
        "them by spaces in the environment. [MESH_ENGINE_MODELS]",
        show_default="what its /v1/models lists",
    ),
    click.option(
        "--engine-key-file",
        envvar="MESH_ENGINE_KEY_FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with the engine's API key; or set MESH_ENGINE_KEY. [MESH_ENGINE_KEY_FILE]",
    ),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; it takes `engine_key_file` and the fields of EngineConfig."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_engine_key(file: Path | None) -> SecretStr | None:
    """The engine's API key, from the file or the environment. Raises click.UsageError."""
    try:
        return engine_key(file, environment())
    except EngineKeyInvalid as error:
        raise click.UsageError(str(error)) from error


def checked(
    kind: type[Config], options: dict[str, Any], parameters: list[click.Parameter]
) -> Config:
    """The configuration from a command's options. Raises click.UsageError that names the option."""
    try:
        return kind(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        flags = {str(parameter.name): parameter.opts[0] for parameter in parameters}
        field = str(first["loc"][0]) if first["loc"] else ""
        message = what_it_must_be_instead(first)
        raise click.UsageError(f"{flags.get(field, field)}: {message}".lstrip(": ")) from error
