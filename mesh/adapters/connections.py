"""How many connections a port may have open: who comes beyond that is told so and let go.

Each is a descriptor, a task and some 20 KB. Without a limit, descriptors run out, and then a
process can't even say that it is full: nobody's connection is accepted, and monitoring's neither.

The last places are for probes. Whoever gets one may ask for `/health`, `/ready` and the like, and
must do so at once; for everything else it is told that the router is full.
"""

from enum import Enum

CONNECTIONS_MAX = 32_768  # one process; at 20 KB each that is two thirds of a gigabyte
PROBES = 64
RESERVED = (
    192  # descriptors of all else: probes, refusals on their way out, bus, files, large bodies
)
REFUSALS = 64  # that are being told at one time; others are cut without a word
PAGE_CONNECTIONS = 256  # of a page of metrics and the like
DESCRIPTORS_KEPT = RESERVED + PROBES + REFUSALS + PAGE_CONNECTIONS


class Place(Enum):
    """What a new connection may do."""

    ANY = "any"
    PROBE = "probe"
    NONE = "none"


def connections_max(descriptors: int) -> int:
    """How many a router may have that may open so many descriptors, for `Connections`."""
    return min(CONNECTIONS_MAX, max(descriptors // 4, descriptors - DESCRIPTORS_KEPT))


class Connections:
    """Counts the connections of one port."""

    def __init__(self, most: int = CONNECTIONS_MAX, probes: int = PROBES) -> None:
        """`probes`: places beyond `most`."""
        self.most, self._probes = most, probes
        self.open = 0

    def enter(self) -> Place:
        """The place of a connection that was accepted. `leave` any but NONE."""
        if self.open < self.most:
            self.open += 1
            return Place.ANY
        if self.has_probes:
            self.open += 1
            return Place.PROBE
        return Place.NONE

    def leave(self) -> None:
        """A connection is closed."""
        self.open -= 1
        assert self.open >= 0, "more connections left than came"

    @property
    def is_full(self) -> bool:
        """Whether the next one may ask for probes at most."""
        return self.open >= self.most

    @property
    def has_probes(self) -> bool:
        """Whether it may ask for those."""
        return self.open < self.most + self._probes
