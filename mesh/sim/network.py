"""Messages between processes: how long they take, which are lost, which links are cut.

Inside a region a message takes half a round trip over the bus. Between regions it takes half
the pair's round trip and some jitter; one link joins two regions, and it is a TCP connection,
so a message never overtakes an earlier one of its direction: a late one holds up those behind
it. A cut link swallows messages without a word, which is harder than a connection that breaks:
both ends have to notice the silence.

State messages (heartbeats, digests, pings) can be lost one by one, as core NATS drops them for a
slow reader. Requests and answers are not: their losses are cuts and crashes.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from mesh.sim.event_queue import EventQueue
from mesh.sim.rtt import RttTable
from schemas.ids import RegionId

# One way over a region's bus: half of 0.3 ms, the median request-reply between two processes
# beside one nats-server (nats-py on uvloop, two shared cores).
BUS_S = 0.000_15
# One way over HTTP between a client and the router of its region: of the same order.
HTTP_S = 0.000_15

Link = tuple[RegionId, RegionId]


class Network:
    """Carries calls instead of messages: what is called is what the receiver would do."""

    def __init__(
        self, queue: EventQueue, rtt: RttTable, dice: Random, *, jitter_s: float, loss: float
    ) -> None:
        """`jitter_s`: mean of the exponential extra delay between regions. `loss`: a share."""
        self._queue = queue
        self._rtt = rtt
        self._dice = dice
        self._jitter_s = jitter_s
        self._loss = loss
        self._one_way_s: dict[Link, float] = {}
        self._last_at: dict[Link, float] = {}
        self._cuts: dict[Link, int] = {}  # how many cuts are in force
        # Told of each message between regions, whether it arrives or not, for whoever counts them.
        self.overheard: Callable[[Link, Callable[..., None], tuple[Any, ...]], None] | None = None

    def send(self, source: RegionId, to: RegionId, call: Callable[..., None], *args: Any) -> None:
        """Let it happen at the other end, if the way there is not cut."""
        if source == to:
            self._queue.at(self._queue.now + BUS_S, call, *args)
            return
        if self.overheard is not None:
            self.overheard((source, to), call, args)
        if (arrives_at := self._arrival(source, to)) is not None:
            self._queue.at(arrives_at, call, *args)

    def send_state(
        self, source: RegionId, to: RegionId, call: Callable[..., None], *args: Any
    ) -> None:
        """The same for messages that may be lost."""
        if not self._loss or self._dice.random() >= self._loss:
            self.send(source, to, call, *args)

    def send_http(
        self, source: RegionId, to: RegionId, call: Callable[..., None], *args: Any
    ) -> None:
        """Between a client and its router: the wide area, if any, and then the last steps."""
        arrives_at = self._queue.now if source == to else self._arrival(source, to)
        if arrives_at is not None:
            self._queue.at(arrives_at + HTTP_S, call, *args)

    def cut(self, one: RegionId, other: RegionId) -> None:
        """Nothing passes between the two any more. What is on its way still arrives."""
        for link in ((one, other), (other, one)):
            self._cuts[link] = self._cuts.get(link, 0) + 1

    def heal(self, one: RegionId, other: RegionId) -> None:
        """Take one cut back."""
        for link in ((one, other), (other, one)):
            self._cuts[link] -= 1

    def _arrival(self, source: RegionId, to: RegionId) -> float | None:
        link = (source, to)
        if self._cuts.get(link):
            return None
        one_way_s = self._one_way_s.get(link)
        if one_way_s is None:
            one_way_s = self._one_way_s[link] = self._rtt.rtt_s(source, to) / 2
        arrives_at = self._queue.now + one_way_s
        if self._jitter_s:
            arrives_at += self._dice.expovariate(1.0 / self._jitter_s)
            arrives_at = max(arrives_at, self._last_at.get(link, 0.0))
            self._last_at[link] = arrives_at
        return arrives_at
