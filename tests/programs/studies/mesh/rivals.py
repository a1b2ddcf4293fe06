"""Whom `mesh` is compared with, and which settings of each were tried.

A rival is named once, with its settings in the order in which they were listed by whoever wrote
it: the first is its authors' own. All cells are played with one of them, `chosen`, as `mesh` has
one set of constants for all cells. `make study-mesh SEARCH=1` plays every setting in the places and
with the seeds of `search`, none of which is reported, and its table says which one to enter here.

Those entered now are the best of its short form (QUICK=1: four places, one seed). Not played in it:
the last setting of "region-local prefix", and e2, skywalker and the two gorgo, whose settings an
earlier search chose (seed 21; chat, toolbench and programming on L4s at full load, diurnal on L4s
at 1.3, mixed-tree on a mixed fleet).
"""

from dataclasses import dataclass

from tests.programs.studies.tables.case import System

# What these projects' routers hold, they hold until it can be placed or its client hangs up; only
# GORGO's has a limit, of 60 s (`pkg/config/constants.go`), which is also ours.
WAITS = ("hold_s_max=600", "hold_max=100000")
CENTRAL = "central:us"
REGIONS = "mesh"
REGION_LOCAL = "region-local"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a policy.

    `policy`: with its options, as in `cache-aware:0.3/64/1.5`. `router`: settings of the router,
    `name=value`. `pushing`: blind, pending or outstanding:N.
    """

    policy: str
    pushing: str = "blind"
    router: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """As the page names it."""
        pushing = () if self.pushing == "blind" else (self.pushing,)
        return " ".join((self.policy, *pushing, *self.router))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A policy that somebody could run instead of `mesh`.

    `topology`: CENTRAL (one router for all regions), REGIONS (routers in every region that forward
    to each other) or REGION_LOCAL. `waits`: it refuses no request that waits long. `chosen`: which
    of the settings plays the reported cells. `everywhere`: whether it is played in every cell, or
    only at OTHERS_LOAD.
    """

    name: str
    topology: str
    settings: tuple[Setting, ...]
    chosen: int = 0
    everywhere: bool = True
    waits: bool = True

    @property
    def is_central(self) -> bool:
        """Whether it counts as a central router."""
        return self.topology.startswith("central:")

    def system(self, setting: int | None = None) -> System:
        """How a cell is played, with the chosen setting or with this one."""
        one = self.settings[self.chosen if setting is None else setting]
        return System(
            name=self.name,
            policy=one.policy,
            topology=self.topology,
            pushing=one.pushing,
            setting=(*(WAITS if self.waits else ()), *one.router),
        )


def settings(*policies: str, pushing: str = "blind") -> tuple[Setting, ...]:
    """One setting for each of these policies."""
    return tuple(Setting(policy, pushing) for policy in policies)


RIVALS = (
    Rival(
        name="consistent-hash",
        topology=CENTRAL,
        settings=settings("consistent-hash", "consistent-hash:4/1.25"),
        everywhere=False,
    ),
    Rival(
        name="cache-aware",  # SGLang's library, its command line, and two tighter ones
        topology=CENTRAL,
        chosen=2,
        settings=settings(
            "cache-aware:0.5/32/1.1",
            "cache-aware:0.3/64/1.5",
            "cache-aware:0.3/16/1.5",
            "cache-aware:0.5/4/1.1",
        ),
    ),
    Rival(
        name="smg",  # its command line's, tighter ones, and its first state
        topology=CENTRAL,
        chosen=2,
        settings=settings("smg:0.3/64/1.5", "smg:0.3/8/1.5", "smg:0.3/2/1.25", "smg:0.3/8/1.5/0"),
    ),
    Rival(
        name="llm-d",  # the chart's weights, the precise configuration's, more for the prefix
        topology=CENTRAL,
        settings=settings("llm-d:2/2/3", "llm-d:1/1/2", "llm-d:1/1/4"),
    ),
    Rival(
        name="llm-d precise",  # its own, the chart's weights, the earlier scorer, speculation
        topology=CENTRAL,
        chosen=5,
        settings=settings(
            "llm-d-precise:1/1/2",
            "llm-d-precise:2/2/3",
            "llm-d-precise:1/1/4",
            "llm-d-precise:1/1/2/1",
            "llm-d-precise:1/1/4//2",
            "llm-d-precise:2/2/3//2",
        ),
    ),
    Rival(
        name="dynamo",  # its defaults, more weight of prompts, a draw, what it sent is cached,
        topology=CENTRAL,  # and the two thresholds of its queue that were defaults once
        chosen=4,
        settings=settings(
            *("dynamo", "dynamo:4", "dynamo:16", "dynamo:4/0.1", "dynamo:4///5"),
            *("dynamo:4///5/16", "dynamo:4///5/4"),
        ),
    ),
    Rival(
        name="e2",  # Preble's code, loads compared sooner, over a third of the time
        topology=CENTRAL,
        settings=settings("e2:180/50", "e2:180/5", "e2:60/5"),
    ),
    Rival(
        name="region-local prefix",  # each region's own router, with rules of the central ones
        topology=REGION_LOCAL,
        chosen=5,
        settings=settings(
            *("cache-aware:0.3/64/1.5", "smg:0.3/64/1.5", "llm-d-precise:1/1/4", "dynamo:4"),
            *("cache-aware:0.3/16/1.5", "smg:0.3/2/1.25", "llm-d-precise:1/1/4//2", "dynamo:4///5"),
            "llm-d-precise:2/2/3//2",
        ),
    ),
    Rival(
        name="skywalker",  # its authors' code, the paper's rule, a lower threshold
        topology=REGIONS,
        settings=settings("skywalker", "skywalker:0.5/0", "skywalker:0.25", pushing="pending"),
    ),
    Rival(
        name="gorgo",  # the authors' code, the paper's examples, weights that are learned
        topology=REGIONS,
        chosen=2,
        settings=settings("gorgo:1", "gorgo:0.5", "gorgo-tuned", pushing="pending"),
        waits=False,
    ),
    Rival(
        name="round-robin",
        topology=CENTRAL,
        settings=(Setting("round-robin"),),
        everywhere=False,
    ),
    Rival(name="least-load", topology=CENTRAL, settings=(Setting("least-load"),), everywhere=False),
    Rival(
        name="power-of-two",
        topology=CENTRAL,
        settings=(Setting("power-of-two"),),
        everywhere=False,
    ),
    Rival(
        name="skywalker-ch",
        topology=REGIONS,
        settings=(Setting("skywalker-ch", "pending"),),
    ),
    Rival(
        name="gorgo-proxy",
        topology=CENTRAL,
        chosen=1,
        settings=(Setting("gorgo-proxy:1", "pending"), Setting("gorgo-proxy:0.5")),
        waits=False,
        everywhere=False,
    ),
    Rival(
        name="batch-aware", topology=CENTRAL, settings=(Setting("batch-aware"),), everywhere=False
    ),
    Rival(
        name="region-local",
        topology=REGION_LOCAL,
        settings=(Setting("region-local", "pending"),),
    ),
)
