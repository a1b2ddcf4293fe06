"""The policies by name. A dict of functions is our registry."""

from collections.abc import Callable, Mapping
from random import Random

from mesh.core.policies.base import Policy
from mesh.core.policies.least_load import LeastLoad
from mesh.core.policies.prefix_tree import PrefixTree
from mesh.core.policies.round_robin import RoundRobin
from mesh.core.settings import RouterSettings

Makers = Mapping[str, Callable[[RouterSettings, Random], Policy]]

POLICIES: Makers = {
    "round-robin": lambda settings, dice: RoundRobin(),
    "least-load": lambda settings, dice: LeastLoad(dice),
    "prefix-tree": lambda settings, dice: PrefixTree(
        dice, blocks_max=settings.index_blocks_max, explore_below=settings.explore_below
    ),
}


def make_policy(
    name: str, settings: RouterSettings, dice: Random, makers: Makers = POLICIES
) -> Policy:
    """A new instance of that policy. Raises ValueError and names the known ones."""
    maker = makers.get(name)
    if maker is None:
        raise ValueError(f"unknown policy {name!r}; one of {', '.join(makers)}")
    return maker(settings, dice)
