"""The policies by name. A dict of functions is our registry.

A name may carry options behind a colon, `llm-d:1/1/2`, if the policy has any (`options.py`).
"""

from collections.abc import Callable, Mapping
from random import Random

from mesh.core.policies.base import Policy
from mesh.core.policies.batch_aware import BatchAware, BatchAwareOptions
from mesh.core.policies.cache_aware import CacheAware, CacheAwareOptions
from mesh.core.policies.consistent_hash import ConsistentHash, ConsistentHashOptions
from mesh.core.policies.e2 import E2
from mesh.core.policies.gorgo import Gorgo
from mesh.core.policies.gorgo_weights import TunedWeights
from mesh.core.policies.least_load import LeastLoad
from mesh.core.policies.llm_d import LlmD, LlmDOptions
from mesh.core.policies.mesh import Mesh
from mesh.core.policies.options import Tunable
from mesh.core.policies.power_of_two import PowerOfTwo
from mesh.core.policies.region_local import RegionLocal
from mesh.core.policies.round_robin import RoundRobin
from mesh.core.policies.skywalker import SkyWalker
from mesh.core.policies.skywalker_ch import SkyWalkerCH, SkyWalkerCHOptions
from mesh.core.settings import RouterSettings
from schemas.near_words import did_you_mean

Maker = Callable[[RouterSettings, Random], Policy]
Makers = Mapping[str, Maker]


def _skywalker(settings: RouterSettings, dice: Random) -> Policy:
    return SkyWalker(dice, settings.index_blocks_max, settings.explore_below)


def _gorgo(settings: RouterSettings, dice: Random) -> Policy:
    return Gorgo(dice, blocks_max=settings.index_blocks_max)


POLICIES: Makers = {
    "round-robin": lambda settings, dice: RoundRobin(),
    "least-load": lambda settings, dice: LeastLoad(dice),
    "mesh": Mesh,
    "power-of-two": lambda settings, dice: PowerOfTwo(dice),
    "consistent-hash": Tunable(
        ConsistentHashOptions(), lambda settings, dice, options: ConsistentHash(dice, options)
    ),
    "cache-aware": Tunable(
        CacheAwareOptions(),
        lambda settings, dice, options: CacheAware(dice, settings.index_blocks_max, options),
    ),
    "skywalker": _skywalker,
    "prefix-tree": _skywalker,  # its name before there were others
    "skywalker-ch": Tunable(
        SkyWalkerCHOptions(), lambda settings, dice, options: SkyWalkerCH(dice, options)
    ),
    "region-local": lambda settings, dice: RegionLocal(
        dice, settings.index_blocks_max, settings.explore_below
    ),
    "llm-d": Tunable(
        LlmDOptions(),
        lambda settings, dice, options: LlmD(dice, settings.index_blocks_max, options),
    ),
    "batch-aware": Tunable(
        BatchAwareOptions(),
        lambda settings, dice, options: BatchAware(dice, settings.index_blocks_max, options),
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


def find_maker(name: str, makers: Makers = POLICIES) -> Maker:
    """What makes the policy of that name, options and all.

    Raises ValueError that names the nearest or all known ones, or says which options fit.
    """
    plain, colon, options = name.partition(":")
    maker = makers.get(plain)
    if maker is None:
        raise ValueError(f"unknown policy {plain!r}{did_you_mean(plain, makers)}")
    if not colon:
        return maker
    if not isinstance(maker, Tunable):
        raise ValueError(f"policy {plain!r} has no options")
    try:
        return maker.tuned(options)
    except ValueError as error:
        raise ValueError(f"policy {plain!r}: {error}") from error


def make_policy(
    name: str, settings: RouterSettings, dice: Random, makers: Makers = POLICIES
) -> Policy:
    """A new instance of that policy. Raises ValueError as `find_maker` does."""
    return find_maker(name, makers)(settings, dice)
