"""Peers' lines: placed at once on a replica with room for offline work, or refused.

None waits here: a refused line waits in its own region, which may find another place for it. A line
goes to the replica that was given the longest part of its prompt's beginning, if that has room,
else to the one with the most room.
"""

from mesh.core.model import effects as fx
from mesh.core.model.request import Request
from mesh.core.offline.attempts import Attempts
from mesh.core.offline.effects import OfflineEffect
from mesh.core.offline.events import ANSWER_TOKENS_DEFAULT
from mesh.core.offline.prefixes import PrefixMemory
from mesh.core.offline.room import OfflineRoom
from mesh.core.placement.residency import Residency
from mesh.core.view.replica_table import ReplicaTable
from schemas.exchange import Refusal
from schemas.ids import ModelId, ReplicaId


class PeerLines:
    """Places or refuses lines that peers' runners send."""

    def __init__(
        self,
        *,
        takes_peers: bool,
        replicas: ReplicaTable,
        room: OfflineRoom,
        residency: Residency,
        memory: PrefixMemory,
        attempts: Attempts,
        effects: list[OfflineEffect],
    ) -> None:
        self._takes_peers = takes_peers
        self._replicas = replicas
        self._room = room
        self._residency = residency
        self._memory = memory
        self._attempts = attempts
        self._effects = effects
        # Since the last look: tokens placed, and whether some were refused for want of room.
        self.placed_tokens: dict[ModelId, int] = {}
        self.lacked_room: dict[ModelId, None] = {}

    def arrived(self, request: Request, inbox: str, now: float, *, draining: bool) -> None:
        """Place a peer's line, or refuse it."""
        most = request.answer_tokens
        tokens = request.prompt.tokens + (ANSWER_TOKENS_DEFAULT if most is None else most)
        place = Refusal.DRAINING if draining else self._place(request, tokens, now)
        if isinstance(place, Refusal):
            self._attempts.counts.peer_lines_refused += 1
            self._effects.append(fx.RefusePeer(request.key, inbox, place))
            return
        self._attempts.counts.peer_lines += 1
        held = self._memory.held_blocks(place, request.prompt.hashes)
        if held == len(request.prompt.hashes):
            held = 0  # the same prompt again: only its own region knows whether it was computed
        prefill_tokens = request.prompt.uncached_tokens(held)
        handoff = self._replicas.hand_off(place, tokens, prefill_tokens, now)
        self._replicas.relay(place, inbox, request.deadline)
        self._memory.given(place, request.prompt.hashes)
        computed = self.placed_tokens.get(request.model, 0) + tokens
        self.placed_tokens[request.model] = computed
        self._effects.append(
            fx.Dispatch(
                request.key,
                1,
                place,
                handoff,
                inbox,
                prefill_tokens,
                term=self._room.term(now),
            )
        )

    def replica_lost(self, replica: ReplicaId) -> None:
        """Another process runs there now, with nothing in its cache, or none."""
        self._memory.lost(replica)

    def _place(self, request: Request, tokens: int, now: float) -> ReplicaId | Refusal:
        if not (request.offline and self._takes_peers):
            return Refusal.NO_OFFLINE_ROOM
        if (why := self._residency.refuses_here(request, self._replicas)) is not None:
            return why
        if not self._replicas.serving(request.model):
            return Refusal.NO_REPLICA
        wanted = self._residency.wanted(request)
        room_of = {
            replica.heartbeat.replica: room
            for replica, room in self._room.serving(request.model, wanted, now)
            if room >= tokens
        }
        if not room_of:
            self.lacked_room[request.model] = None
            return Refusal.NO_OFFLINE_ROOM
        for holder in self._memory.holders(request.prompt.hashes):
            if holder in room_of:
                return holder
        return max(room_of, key=lambda name: (room_of[name], name))
