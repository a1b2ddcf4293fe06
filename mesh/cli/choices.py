"""The operator's choices of routing as options of a command line."""

import click

from mesh.cli.modelled import checked_option
from mesh.core.policies import POLICIES, find_maker
from schemas.settings import RoutingTable

POLICIES_HELP = (
    f"One of {', '.join(POLICIES)}; options follow a colon, as in cache-aware:0.3/64/1.5."
)


def known_policy(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The name as it was given; a usage error lists the known ones."""
    if value is not None:
        try:
            find_maker(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return value


# Each without a default: what is not given is left to mesh.toml.
POLICY_OPTION = checked_option(RoutingTable, "policy", help=POLICIES_HELP, callback=known_policy)
PUSHING_OPTION = checked_option(RoutingTable, "pushing")
HOLD_ORDER_OPTION = checked_option(RoutingTable, "hold_order")
