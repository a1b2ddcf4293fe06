"""The policies by name. A dict of functions is our registry."""

from collections.abc import Callable, Mapping
from random import Random

from mesh.core.policies.base import Policy
from mesh.core.policies.e2 import E2
from mesh.core.policies.gorgo import Gorgo
from mesh.core.policies.gorgo_weights import TunedWeights
from mesh.core.policies.least_load import LeastLoad
from mesh.core.policies.prefix_tree import PrefixTree
from mesh.core.policies.round_robin import RoundRobin
from mesh.core.settings import RouterSettings

Makers = Mapping[str, Callable[[RouterSettings, Random], Policy]]


def _gorgo(settings: RouterSettings, dice: Random) -> Policy:
    return Gorgo(dice, blocks_max=settings.index_blocks_max)


POLICIES: Makers = {
    "round-robin": lambda settings, dice: RoundRobin(),
    "least-load": lambda settings, dice: LeastLoad(dice),
    "prefix-tree": lambda settings, dice: PrefixTree(
        dice, blocks_max=settings.index_blocks_max, explore_below=settings.explore_below
    ),
    "e2": lambda settings, dice: E2(
        dice, blocks_max=settings.index_blocks_max, window_s=settings.e2_window_s
    ),
    "gorgo": _gorgo,
    "gorgo-proxy": _gorgo,  # the same, named for a router that serves all regions
    "gorgo-tuned": lambda settings, dice: Gorgo(
        dice, blocks_max=settings.index_blocks_max, weights=TunedWeights()
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
