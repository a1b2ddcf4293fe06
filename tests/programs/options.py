"""What the benchmarks' commands ask of their options, before anything is started."""

from pathlib import Path

import click

from mesh.cli.choices import known_policy
from mesh.replay.trace import TraceError
from mesh.replay.trace_formats import load_trace


def known_policies(
    ctx: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...]:
    """The names as they were given; a usage error names the others."""
    for name in value:
        known_policy(ctx, param, name)
    return value


def mooncake_trace(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """The path as it was given; a usage error has the reason why no requests can be read there."""
    if value is not None:
        try:
            load_trace(value, "mooncake")
        except TraceError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return value


def two_or_more(
    ctx: click.Context, param: click.Parameter, value: tuple[int, ...]
) -> tuple[int, ...]:
    """The numbers, if any; a usage error for one alone, which fits no line."""
    if len(set(value)) == 1:
        raise click.BadParameter("a line is fitted: give two numbers or more", ctx, param)
    return value
