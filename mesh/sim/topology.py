"""Who routes for whom: a mesh of regions, regions on their own, or one router for all.

`mesh`: every region has a router, and they are peers. `region-local`: the same without peers.
`central:us`: one router, in region us, that hears all replicas and whose clients come from
everywhere; requests of other regions pay the wide area to it, its work pays it again to far
replicas, and every token passes through it. In the names of the bus all replicas are then of
that one region; where they stand only the network knows.
"""

from collections.abc import Collection
from dataclasses import dataclass

from schemas.ids import RegionId

MESH, REGION_LOCAL, CENTRAL = "mesh", "region-local", "central"


class TopologyInvalid(ValueError):
    """No topology of that name, or none that these regions can have."""


@dataclass(frozen=True, slots=True)
class Topology:
    """One of the three. `centre` is set for the central one."""

    kind: str
    centre: RegionId | None = None

    def router_of(self, region: RegionId) -> RegionId:
        """Where the router of a region's clients and replicas stands."""
        return self.centre or region

    def peers_of(self, region: RegionId, regions: Collection[RegionId]) -> tuple[RegionId, ...]:
        """Which regions' routers are peers of this one's."""
        if self.kind != MESH:
            return ()
        return tuple(other for other in regions if other != region)

    def check(self, regions: Collection[RegionId]) -> None:
        """Raises TopologyInvalid if the centre is no region of this world."""
        if self.centre is not None and self.centre not in regions:
            raise TopologyInvalid(f"topology: {self.centre} is none of {', '.join(regions)}")


def parse_topology(text: str) -> Topology:
    """The topology of that name. Raises TopologyInvalid and names the known ones."""
    if text in (MESH, REGION_LOCAL):
        return Topology(text)
    kind, _, centre = text.partition(":")
    if kind != CENTRAL or not centre:
        raise TopologyInvalid(f"topology {text!r}: use mesh, region-local or central:REGION")
    return Topology(CENTRAL, RegionId(centre))
