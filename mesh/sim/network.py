"""Messages between processes: how long they take, which are lost, which links are cut.

Inside a region a message takes half a round trip over the bus. Between regions it takes half
the pair's round trip and some jitter; one link joins two regions, and it is a TCP connection,
so a message never overtakes an earlier one of its direction. A cut link drops messages silently,
which is harder than a closed connection: both ends have to notice the silence.

State messages (heartbeats, digests, pings) can be lost one by one, as core NATS drops them for a
slow reader. Requests and answers are lost by cuts and crashes only.
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

RegionPair = tuple[RegionId, RegionId]


class Network:
    """Delivers calls instead of messages: the callable is what the receiver would do."""

    def __init__(
        self, queue: EventQueue, rtt: RttTable, dice: Random, *, jitter_s: float, loss: float
    ) -> None:
        """`jitter_s`: mean of the exponential extra delay between regions. `loss`: a share."""
        self._queue = queue
        self._rtt = rtt
        self._dice = dice
        self._jitter_s = jitter_s
        self._loss = loss
        self._one_way_s: dict[RegionPair, float] = {}
        self._last_at: dict[RegionPair, float] = {}
        self._cuts: dict[RegionPair, int] = {}  # how many cuts are in force
        # Called with each message between regions, whether it arrives or not.
        self.on_send: Callable[[RegionPair, Callable[..., object], tuple[Any, ...]], None] | None
        self.on_send = None

    def send(self, source: RegionId, to: RegionId, call: Callable[..., object], *args: Any) -> None:
        """Make the call at the other end when the message arrives, unless the link is cut."""
        if source == to:
            self._queue.at(self._queue.now + BUS_S, call, *args)
            return
        if self.on_send is not None:
            self.on_send((source, to), call, args)
        if (arrives_at := self._arrival(source, to)) is not None:
            self._queue.at(arrives_at, call, *args)

    def send_state(
        self, source: RegionId, to: RegionId, call: Callable[..., object], *args: Any
    ) -> None:
        """The same for messages that may be lost."""
        if not self._loss or self._dice.random() >= self._loss:
            self.send(source, to, call, *args)

    def send_http(
        self, source: RegionId, to: RegionId, call: Callable[..., object], *args: Any
    ) -> None:
        """Between a client and its router: the wide area, if any, and the HTTP connection."""
        arrives_at = self._queue.now if source == to else self._arrival(source, to)
        if arrives_at is not None:
            self._queue.at(arrives_at + HTTP_S, call, *args)

    def cut(self, one: RegionId, other: RegionId) -> None:
        """Nothing passes between the two from now on. Messages under way still arrive."""
        for pair in ((one, other), (other, one)):
            self._cuts[pair] = self._cuts.get(pair, 0) + 1

    def heal(self, one: RegionId, other: RegionId) -> None:
        for pair in ((one, other), (other, one)):
            self._cuts[pair] -= 1

    def _arrival(self, source: RegionId, to: RegionId) -> float | None:
        pair = (source, to)
        if self._cuts.get(pair):
            return None
        one_way_s = self._one_way_s.get(pair)
        if one_way_s is None:
            one_way_s = self._one_way_s[pair] = self._rtt.rtt_s(source, to) / 2
        arrives_at = self._queue.now + one_way_s
        if self._jitter_s:
            arrives_at += self._dice.expovariate(1.0 / self._jitter_s)
            arrives_at = max(arrives_at, self._last_at.get(pair, 0.0))
            self._last_at[pair] = arrives_at
        return arrives_at
