"""The policies by name, with their options.

A name may carry options behind a colon, `cache-aware:0.3/64/1.5`. A policy that has any declares a
frozen dataclass of numbers with defaults; the values fill its fields in order, separated by `/`,
and an empty or missing one keeps the default. So one text, which fits into a command line, a log
and a receipt, names all of what was run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, Generic, TypeVar

from mesh.core.model.settings import RouterSettings
from mesh.core.policies.base import Policy
from mesh.core.policies.batch_aware import BatchAware, BatchAwareOptions
from mesh.core.policies.cache_aware import CacheAware, CacheAwareOptions
from mesh.core.policies.consistent_hash import ConsistentHash, ConsistentHashOptions
from mesh.core.policies.e2 import E2, E2Options
from mesh.core.policies.gorgo import Gorgo, GorgoOptions, TunedWeights
from mesh.core.policies.llm_d import LlmD, LlmDOptions
from mesh.core.policies.mesh import AS_MEASURED, MeshPolicy
from mesh.core.policies.power_of_two import LeastLoad, PowerOfTwo, RoundRobin
from mesh.core.policies.skywalker import (
    RegionLocal,
    SkyWalker,
    SkyWalkerCH,
    SkyWalkerCHOptions,
    SkyWalkerOptions,
)
from mesh.core.policies.smg import Smg, SmgOptions
from schemas.problems import did_you_mean

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class Tunable(Generic[OptionsT]):
    """Makes a policy that has options."""

    options: OptionsT
    make: Callable[[RouterSettings, Random, OptionsT], Policy]

    def __call__(self, settings: RouterSettings, dice: Random) -> Policy:
        """A new instance with these options."""
        return self.make(settings, dice, self.options)

    def tuned(self, text: str) -> "Tunable[OptionsT]":
        """The same with the options in `text`. Raises ValueError that names what fits."""
        return Tunable(read_options(self.options, text), self.make)


def read_options(default: OptionsT, text: str) -> OptionsT:
    """`default` with the values in `text`. Raises ValueError that names what fits."""
    known: Any = default  # a dataclass, which has no type of its own
    names = [field.name for field in fields(known)]
    values = text.split("/")
    if len(values) > len(names):
        raise ValueError(f"{len(values)} options in {text[:80]!r}, at most {'/'.join(names)}")
    changes = {
        name: _number(name, value, type(getattr(known, name)))
        for name, value in zip(names, values, strict=False)
        if value
    }
    changed: OptionsT = replace(known, **changes)
    return changed


def _number(name: str, text: str, kind: type[float]) -> float:
    """The number in `text`, whole where the default is."""
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} must be {wanted}, not {text[:40]!r}") from None


PolicyMaker = Callable[[RouterSettings, Random], Policy]
PolicyMakers = Mapping[str, PolicyMaker]


def _indexed(
    options: OptionsT, make: Callable[[Random, int, OptionsT], Policy]
) -> Tunable[OptionsT]:
    """Of one that remembers which prompts it gave to whom, up to the settings' number of blocks."""
    return Tunable(
        options, lambda settings, dice, tuned: make(dice, settings.index_blocks_max, tuned)
    )


_SKYWALKER = _indexed(SkyWalkerOptions(), SkyWalker)
_GORGO = _indexed(
    GorgoOptions(),
    lambda dice, blocks, options: Gorgo(dice, blocks_max=blocks, weights=options.weights()),
)

POLICIES: PolicyMakers = {
    "round-robin": lambda settings, dice: RoundRobin(),
    "least-load": lambda settings, dice: LeastLoad(dice),
    "mesh": Tunable(AS_MEASURED, MeshPolicy),
    "power-of-two": lambda settings, dice: PowerOfTwo(dice),
    "consistent-hash": Tunable(
        ConsistentHashOptions(), lambda settings, dice, options: ConsistentHash(dice, options)
    ),
    "cache-aware": _indexed(CacheAwareOptions(), CacheAware),
    "smg": _indexed(SmgOptions(), Smg),
    "skywalker": _SKYWALKER,
    "prefix-tree": _SKYWALKER,  # its name before there were others
    "skywalker-ch": Tunable(
        SkyWalkerCHOptions(), lambda settings, dice, options: SkyWalkerCH(dice, options)
    ),
    "region-local": _indexed(SkyWalkerOptions(), RegionLocal),
    "llm-d": _indexed(LlmDOptions(), LlmD),
    "batch-aware": _indexed(BatchAwareOptions(), BatchAware),
    "e2": _indexed(
        E2Options(),
        lambda dice, blocks, options: E2(
            dice, blocks_max=blocks, window_s=options.window_s, warm=options.warm
        ),
    ),
    "gorgo": _GORGO,
    "gorgo-proxy": _GORGO,  # the same, named for a router that serves all regions
    "gorgo-tuned": lambda settings, dice: Gorgo(
        dice, blocks_max=settings.index_blocks_max, weights=TunedWeights()
    ),
}


def find_maker(name: str, makers: PolicyMakers = POLICIES) -> PolicyMaker:
    """What makes the policy of that name, options and all.

    Raises ValueError that names the nearest or all known ones, or which options fit.
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
    name: str, settings: RouterSettings, dice: Random, makers: PolicyMakers = POLICIES
) -> Policy:
    """A new instance of that policy. Raises ValueError as `find_maker` does."""
    return find_maker(name, makers)(settings, dice)
