"""The operator's choices of routing as options of a command line."""

import click

from mesh.core.policies import POLICIES, find_maker
from mesh.core.region.pushing import Pushing, parse_pushing
from mesh.core.waiting.hold_order import HoldOrder

POLICIES_HELP = (
    f"One of {', '.join(POLICIES)}; options follow a colon, as in cache-aware:0.3/64/1.5."
)
PUSHING_HELP = "When a replica may be given more work: blind, pending or outstanding:N."
HOLD_ORDERS = [order.value for order in HoldOrder]
HOLD_ORDER_HELP = "Whose turn it is among the held: the oldest's, or by what is cached."


def known_policy(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The name as it was given; a usage error says what else it could be."""
    if value is not None:
        try:
            find_maker(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return value


def known_pushing(ctx: click.Context, param: click.Parameter, value: str | None) -> Pushing | None:
    """The rule; a usage error says which there are."""
    try:
        return None if value is None else parse_pushing(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error
