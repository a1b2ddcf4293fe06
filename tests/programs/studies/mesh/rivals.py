"""Whom `mesh` is compared with, and which settings of each were tried.

A rival is named once, with its settings in the order in which they were listed by whoever wrote
it: the first is its authors' own. All cells are played with one of them, `chosen`, as `mesh` has
one set of constants for all cells. `make study-mesh SEARCH=1` plays every setting on a sample of
cells with seeds that are not reported, and its table says which one to enter here.
"""

from dataclasses import dataclass

from tests.programs.studies.tables.case import System

CENTRAL = "central:us"
REGIONS = "mesh"
REGION_LOCAL = "region-local"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a policy.

    `policy`: with its options, as `mesh sim --policy` takes it. `router`: settings of the router,
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
    to each other) or REGION_LOCAL. `chosen`: which of the settings plays the reported cells.
    `everywhere`: whether it is played in every cell, or only at OTHERS_LOAD.
    """

    name: str
    topology: str
    settings: tuple[Setting, ...]
    chosen: int = 0
    everywhere: bool = True

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
            setting=one.router,
        )


RIVALS = (
    Rival(name="consistent-hash", topology=CENTRAL, settings=(Setting("consistent-hash"),)),
    Rival(
        name="cache-aware",
        topology=CENTRAL,
        settings=(Setting("cache-aware:0.5/32/1.1"), Setting("cache-aware:0.3/64/1.5")),
    ),
    Rival(name="llm-d", topology=CENTRAL, settings=(Setting("llm-d"), Setting("llm-d:1/1/3"))),
    Rival(name="skywalker", topology=REGIONS, settings=(Setting("skywalker", "pending"),)),
    Rival(name="gorgo", topology=REGIONS, settings=(Setting("gorgo", "pending"),)),
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
        everywhere=False,
    ),
    Rival(name="e2", topology=CENTRAL, settings=(Setting("e2"),), everywhere=False),
    Rival(
        name="gorgo-proxy",
        topology=CENTRAL,
        settings=(Setting("gorgo-proxy", "pending"),),
        everywhere=False,
    ),
    Rival(
        name="batch-aware", topology=CENTRAL, settings=(Setting("batch-aware"),), everywhere=False
    ),
    Rival(
        name="region-local",
        topology=REGION_LOCAL,
        settings=(Setting("region-local", "pending"),),
        everywhere=False,
    ),
)
