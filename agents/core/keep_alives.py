"""Keep-alives of routers, and losses of the bus: what the agent does about them.

Reads: replica.
Writes: acks, fence, pace, routers.
"""

from agents.core.answers import orphan
from agents.core.effects import LogOwnerChange, ResyncRouter
from agents.core.events import AliveArrived, BusDisconnected, BusReconnected, RouterKey
from agents.core.state import AgentState


def alive(state: AgentState, event: AliveArrived, now: float) -> None:
    """A router's keep-alive; its region may claim the replica with it."""
    router, fence = RouterKey(event.region, event.router), state.fence
    if event.term is not None:
        owner = fence.owner(now)
        fence.claim(event.region, event.term, now)
        if fence.owner(now) != owner:
            state.emit(LogOwnerChange(router, event.term))
    within_s = event.next_within_s
    change = state.routers.alive(router, event.epoch, now, event.order, within_s)
    state.pace.alive(now, reads=within_s > 0.0)
    if any(change):  # it may have received no heartbeat yet, or none for a while
        state.pace.hasten()
    if change.resync:
        state.emit(ResyncRouter(router))
    if change.restarted:
        abroad = event.region != state.replica.region
        state.acks.forget(event.router, event.region if abroad else None)
        orphan(state, router, "the requesting router restarted")


def bus_lost(state: AgentState, event: BusDisconnected, now: float) -> None:
    """No keep-alive can arrive."""
    state.routers.bus_lost(now)


def bus_returned(state: AgentState, event: BusReconnected, now: float) -> None:
    """They can again."""
    state.routers.bus_returned(now)
    state.pace.hasten()
