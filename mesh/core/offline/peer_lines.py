"""Peers' lines: placed at once on a replica with room for offline work, or refused.

None waits here: a refused line waits in its own region, which may find another place for it. A line
goes to the replica that was given the longest part of its prompt's beginning, if that has room,
else to the one with the most room.

Reads: counts, draining, lacked_room, peer_memory, peer_tokens, replicas, residency, settings.
Writes: counts, lacked_room, peer_memory, peer_tokens, replicas.
"""

from mesh.core.model import effects as fx
from mesh.core.model.request import Request
from mesh.core.offline.events import ANSWER_TOKENS_DEFAULT
from mesh.core.offline.room import term, with_room
from mesh.core.offline.state import RunnerState
from schemas.exchange import Refusal
from schemas.ids import ReplicaId


def peer_line_arrived(state: RunnerState, request: Request, inbox: str, now: float) -> None:
    """Place a peer's line, or refuse it; `inbox`: of the peer's runner."""
    most = request.answer_tokens
    tokens = request.prompt.tokens + (ANSWER_TOKENS_DEFAULT if most is None else most)
    place = Refusal.DRAINING if state.draining else _place(state, request, tokens, now)
    if isinstance(place, Refusal):
        state.emit(fx.RefusePeer(request.key, inbox, place))
        return
    state.counts.peer_lines += 1
    held = state.peer_memory.held_blocks(place, request.prompt.hashes)
    if held == len(request.prompt.hashes):
        held = 0  # the same prompt again: only its own region knows whether it was computed
    prefill_tokens = request.prompt.uncached_tokens(held)
    handoff = state.replicas.hand_off(place, tokens, prefill_tokens, now)
    state.replicas.relay(place, inbox, request.deadline)
    state.peer_memory.given(place, request.prompt.hashes)
    computed = state.peer_tokens.get(request.model, 0) + tokens
    state.peer_tokens[request.model] = computed
    state.emit(
        fx.Dispatch(
            request.key,
            1,
            place,
            handoff,
            inbox,
            prefill_tokens,
            term=term(state, now),
        )
    )


def _place(state: RunnerState, request: Request, tokens: int, now: float) -> ReplicaId | Refusal:
    if not (request.offline and state.settings.takes_peers):
        return Refusal.NO_OFFLINE_ROOM
    if (why := state.residency.refuses_here(request, state.replicas)) is not None:
        return why
    if not state.replicas.serving(request.model):
        return Refusal.NO_REPLICA
    wanted = state.residency.wanted(request)
    room_of = {
        replica.heartbeat.replica: room
        for replica, room in with_room(state, request.model, wanted, now)
        if room >= tokens
    }
    if not room_of:
        state.lacked_room[request.model] = None
        return Refusal.NO_OFFLINE_ROOM
    for holder in state.peer_memory.holders(request.prompt.hashes):
        if holder in room_of:
            return holder
    return max(room_of, key=lambda name: (room_of[name], name))
