"""The name of a policy on a command line, with its options if it has any."""

import click

from mesh.core.policies import POLICIES, find_maker

HELP = f"One of {', '.join(POLICIES)}; options follow a colon, as in cache-aware:0.3/64/1.5."


def known_policy(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The name as it was given; a usage error says what else it could be."""
    if value is not None:
        try:
            find_maker(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return value
