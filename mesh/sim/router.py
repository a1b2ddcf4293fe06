"""A router of the twin: the real RouterCore, with the world in the place of bus and HTTP.

What `mesh.runtime` does is done here in the same order: frames of an attempt that is no longer
under way are strays and their sender is told to stop, an answer's first bytes start it, and a
peer's request is placed, held or refused. What happens by the clock is in `pulse`, gossip in
`trie_links`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from agents.core.reading import Usage
from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.core.gossip.told import Origin
from mesh.core.requests.request import Request, Served
from mesh.core.router import RouterCore
from mesh.replay.tally import Outcome
from mesh.sim.ask import Answered, Ask
from mesh.sim.event_queue import EventQueue
from mesh.sim.last_heartbeats import LastHeartbeats
from mesh.sim.network import BUS_S, Network
from mesh.sim.place import STATUS_OK, Asker, End, Worker
from mesh.sim.surroundings import Surroundings
from mesh.sim.tickets import ROUTER, Guest, Ticket, Tickets
from mesh.sim.warm_ups import WarmUps
from mesh.sim.work import (
    MODEL,
    deadline_header,
    handoff_headers,
    onward_headers,
    path_of,
    request_headers,
    way_headers,
)
from schemas import exchange, subjects
from schemas.exchange import Priority, Refused
from schemas.http import Fault
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.state import Digest, Heartbeat, decode_digest, encode_state

SHED = (Fault.SATURATED, Fault.NO_REPLICA, Fault.DRAINING)
NOBODY_LISTENS = "nobody_listens"
NO_CONNECTION, CONNECTION_LOST = "no_connection", "connection_lost"
READ_LAST_S = 2 * BUS_S  # from a router's start: a question to the stream, and its answers
STATUS_TRY_AGAIN, STATUS_SERVER_ERROR = 429, 500


class SimRouter:
    """`open` it with a core; `crash` and `open` again for a fault. `hear_…` is what comes in."""

    def __init__(
        self,
        site: RegionId,
        queue: EventQueue,
        network: Network,
        around: Surroundings,
        name: RouterId = ROUTER,
    ) -> None:
        self.site = site
        self.name = name
        origin = Origin(site, name)
        self.core: RouterCore | None = None
        self._queue = queue
        self._network = network
        self._around = around
        self._tickets = Tickets(site, name)
        self._guests: dict[int, Guest] = {}  # by key
        self._last_heartbeats = LastHeartbeats()
        self._warm_ups = WarmUps(site, queue, network, around, self._tickets, self.feed)
        self._performers: dict[type, Callable[[Any], None]] = {
            fx.Dispatch: self._dispatch,
            fx.Forward: self._forward,
            fx.CancelAttempt: self._cancel,
            fx.RefusePeer: self._refuse_peer,
            fx.TellHeld: self._tell_held,
            fx.TellLost: self._tell_lost,
            fx.Fail: self._fail,
            fx.PassEngineError: self._pass_engine_error,
            fx.Decided: lambda effect: None,
            fx.PublishDigest: lambda effect: around.publish(origin, effect.digest),
            **around.gossip(origin),
            **self._warm_ups.performers(),
        }

    @property
    def is_up(self) -> bool:
        """Whether its process runs."""
        return self.core is not None

    @property
    def open_requests(self) -> int:
        """Clients that wait for an answer."""
        return len(self._tickets)

    def open(self, core: RouterCore) -> None:
        """Serve with this core, which soon knows what was last heard of its replicas."""
        self.core = core
        self._queue.after(READ_LAST_S, self._read_last, core)

    def _read_last(self, core: RouterCore) -> None:
        if self.core is core:
            for beat in self._last_heartbeats:
                self.feed(ev.HeartbeatSeen(beat))

    def crash(self) -> None:
        """The process is gone, and its clients' connections with it."""
        self.core = None
        self._guests.clear()
        self._warm_ups.clear()
        for ticket in self._tickets:
            self._tell(ticket.ask, Answered(Outcome.FAILED, CONNECTION_LOST))
        self._tickets.clear()

    def feed(self, event: ev.Event) -> None:
        """Let the core decide, and do what it says. A crashed router hears nothing."""
        if self.core is not None:
            for effect in self.core.handle(event, self._queue.now):
                self._performers[type(effect)](effect)

    # What clients say.

    def hear_client(self, ask: Ask) -> None:
        """A request comes in."""
        if self.core is None:
            self._tell(ask, Answered(Outcome.FAILED, NO_CONNECTION))
        elif MODEL not in self.core.known_models():
            self._tell(ask, Answered(Outcome.FAILED, f"http_{Fault.MODEL_UNKNOWN.value.status}"))
        else:
            self._admit(ask)

    def _admit(self, ask: Ask) -> None:
        now = self._queue.now
        ticket = self._tickets.open(ask, now, now + self._around.request_s)
        request = Request(
            key=ticket.key,
            request_id=ask.request_id,
            model=MODEL,
            prompt=ask.prompt,
            session=ask.session,
            arrived_at=now,
            deadline=ticket.deadline,
            hops=0,
            origin=self.site,
            priority=Priority(ask.node.priority),
            slo_ttft_s=ask.node.slo_ttft_s,
        )
        self._decide(request)

    def hear_hang_up(self, ask: Ask) -> None:
        """A client is gone."""
        ticket = self._tickets.of(ask)
        if ticket is not None:
            self.feed(ev.ClientGone(ticket.key))
            self._tickets.close(ticket)

    # What peers say.

    def hear_ingress(self, inbox: str, headers: dict[str, str], ask: Ask, asker: Asker) -> None:
        """A peer's request, to be placed, held, sent on or refused."""
        path = path_of(headers)
        assert self.site not in path, "no request comes back"
        if self.core is None:
            if len(path) == 1:  # the bus tells only whoever published it
                self._network.send(self.site, asker.site, asker.hear_nobody, inbox)
            return
        now = self._queue.now
        key = self._tickets.new_key()
        request = Request(
            key=key,
            request_id=ask.request_id,
            model=MODEL,
            prompt=ask.prompt,
            session=ask.session,
            arrived_at=now - int(headers[exchange.H_WAITED_MS]) / 1000,
            held_before_s=int(headers[exchange.H_HELD_MS]) / 1000,
            deadline=now + int(headers[exchange.H_DEADLINE_MS]) / 1000,
            hops=len(path),
            origin=path[0],
            path=path,
            answer_inbox=inbox,
            priority=Priority(ask.node.priority),
            slo_ttft_s=ask.node.slo_ttft_s,
            warm=exchange.H_WARM in headers,
        )
        self._guests[key] = Guest(headers, ask, asker, request)
        self._decide(request)

    def hear_digest(self, digest: Digest) -> None:
        """A peer region's state."""
        self.feed(ev.DigestSeen(digest))

    # What the bus brings of replicas and answers.

    def hear_heartbeat(self, beat: Heartbeat) -> None:
        """A replica's state; of a region that this one has adopted, too."""
        if beat.region == self.site:
            self._last_heartbeats.keep(beat)
        self.feed(ev.HeartbeatSeen(beat))

    def hear_nobody(self, inbox: str) -> None:
        """Nothing was begun: whoever was asked rests until it speaks."""
        if (ticket := self._tickets.stop_listening(inbox)) is not None:
            replica = None if ticket.replica is None else ticket.replica.name
            region = ticket.peer or self.site
            self._refused(ticket, Refused(NOBODY_LISTENS, region, replica or "", -1, -1))

    def hear_refused(self, inbox: str, refused: Refused) -> None:
        """A replica, or a peer for all of its region, does not take it."""
        if (ticket := self._tickets.stop_listening(inbox)) is not None:
            if refused.digest:
                self.feed(ev.DigestSeen(decode_digest(refused.digest.encode())))
            self._refused(ticket, refused)

    def _refused(self, ticket: Ticket, refused: Refused) -> None:
        self.feed(
            ev.AttemptRefused(
                ticket.key,
                ticket.attempt,
                refused.reason,
                RegionId(refused.region),
                ReplicaId(refused.replica) if refused.replica else None,
                refused.pending,
                refused.running,
            )
        )

    def hear_placed(self, inbox: str, replica: Worker) -> None:
        """A peer found who will answer."""
        if (ticket := self._wanted(inbox, replica)) is not None:
            self.feed(ev.PlacedByPeer(ticket.key, ticket.attempt, replica.name))

    def hear_held(self, inbox: str, hops: int) -> None:
        """A peer has it in its line."""
        if (ticket := self._tickets.answering(inbox)) is not None:
            self.feed(ev.AttemptProgressed(ticket.key, ticket.attempt, hops))

    def hear_lost(self, inbox: str, replica: ReplicaId) -> None:
        """A peer lost who was answering."""
        if (ticket := self._tickets.stop_listening(inbox)) is not None:
            self._failed(ticket, f"replica {replica} was lost")

    def hear_first(self, inbox: str, replica: Worker, status: int) -> None:
        """The answer begins. What is no stream is complete before its client sees of it."""
        ticket = self._wanted(inbox, replica)
        if ticket is None:
            return
        self.feed(ev.AttemptProgressed(ticket.key, ticket.attempt))
        if status == STATUS_OK:
            self._http(ticket.ask, self._around.first_byte, ticket.ask)
            self.feed(ev.AnswerStarted(ticket.key, ticket.attempt))

    def hear_progress(self, inboxes: Sequence[str]) -> None:
        """Frames of these answers keep coming."""
        for inbox in inboxes:
            if (ticket := self._tickets.answering(inbox)) is not None:
                self.feed(ev.AttemptProgressed(ticket.key, ticket.attempt))

    def hear_end(self, inbox: str, end: End) -> None:
        """The answer is over, well or badly."""
        ticket = self._tickets.stop_listening(inbox)
        if ticket is None:
            return
        if end.outcome != exchange.Outcome.DONE:
            self._failed(ticket, end.detail or end.outcome)
        elif end.status >= STATUS_SERVER_ERROR or end.status == STATUS_TRY_AGAIN:
            self._failed(ticket, f"the engine answered {end.status}", end.status)
        else:
            self.feed(ev.AnswerEnded(ticket.key, ticket.attempt, _served(end.usage)))
            if ticket.key > 0:  # a warm-up was closed by the core
                self._tickets.close(ticket)
                self._tell(ticket.ask, ticket.answered(end))

    def _failed(self, ticket: Ticket, detail: str, status: int | None = None) -> None:
        self.feed(ev.AttemptFailed(ticket.key, ticket.attempt, detail, status))

    def _decide(self, request: Request) -> None:
        """Feed a request, by the meter's clock."""
        meter, core = self._around.meter, self.core
        assert core is not None
        began = meter.clock() if meter.clock else 0.0
        effects = core.handle(ev.RequestArrived(request), self._queue.now)
        meter.seconds += meter.clock() - began if meter.clock else 0.0
        meter.decisions += 1
        for effect in effects:
            self._performers[type(effect)](effect)

    def _wanted(self, inbox: str, replica: Worker) -> Ticket | None:
        """Whose attempt this is; a stray's sender is told to stop."""
        ticket = self._tickets.answering(inbox)
        if ticket is None:
            self._network.send(self.site, replica.site, replica.hear_cancel, inbox)
        else:
            ticket.replica = replica
        return ticket

    def _http(self, ask: Ask, call: Callable[..., None], *args: Any) -> None:
        self._network.send_http(self.site, ask.region, call, *args)

    def _tell(self, ask: Ask, answered: Answered) -> None:
        self._http(ask, self._around.answered, ask, answered)

    # What the core wants done.

    def _dispatch(self, effect: fx.Dispatch) -> None:
        replica = self._around.replicas[effect.replica]
        handoff = handoff_headers(self.site, self.name, effect)
        if effect.answer_inbox is not None:
            self._dispatch_for_peer(effect.key, effect.answer_inbox, replica, handoff)
            return
        ticket = self._tickets.begin(effect.key, effect.attempt)
        ticket.replica = replica
        headers = self._headers(ticket) | handoff
        self._send(replica.site, replica.hear_work, ticket.inbox, headers, ticket.ask, self)

    def _dispatch_for_peer(
        self, key: int, inbox: str, replica: Worker, handoff: dict[str, str]
    ) -> None:
        said, ask, asker, request = self._guests.pop(key)
        headers = said | deadline_header(request.deadline - self._queue.now) | handoff
        self._send(replica.site, replica.hear_work, inbox, headers, ask, asker)
        self._send(asker.site, asker.hear_placed, inbox, replica)

    def _forward(self, effect: fx.Forward) -> None:
        crew = self._around.routers[effect.peer]
        living = [router for router in crew if router.is_up] or crew
        peer = living[self._around.pick(len(living))]
        if (inbox := effect.answer_inbox) is not None:
            said, ask, asker, request = self._guests.pop(effect.key)
            headers = said | onward_headers(request, self.site, effect.held_s, self._queue.now)
            self._send(peer.site, peer.hear_ingress, inbox, headers, ask, asker)
            return
        ticket = self._tickets.begin(effect.key, effect.attempt)
        waited_s = self._queue.now - ticket.arrived_at
        way = way_headers(self.site, waited_s, effect.held_s)
        ticket.peer, headers = effect.peer, self._headers(ticket) | way
        self._send(peer.site, peer.hear_ingress, ticket.inbox, headers, ticket.ask, self)

    def _headers(self, ticket: Ticket) -> dict[str, str]:
        remaining_s = ticket.deadline - self._queue.now
        warm = {exchange.H_WARM: "1"} if ticket.key < 0 else {}
        return warm | request_headers(ticket.ask.request_id, ticket.attempt, remaining_s)

    def _send(self, to: RegionId, call: Callable[..., None], *args: Any) -> None:
        self._network.send(self.site, to, call, *args)

    def _cancel(self, effect: fx.CancelAttempt) -> None:
        ticket = self._tickets.get(effect.key)
        if ticket is None or not ticket.inbox:
            return
        # A replica that is not known yet is told when its first frame comes.
        self._tickets.stop_listening(ticket.inbox)
        if effect.replica is not None:
            replica = self._around.replicas[effect.replica]
            self._send(replica.site, replica.hear_cancel, ticket.inbox)

    def _refuse_peer(self, effect: fx.RefusePeer) -> None:
        asker = self._guests.pop(effect.key).asker
        fresh = encode_state(effect.fresh).decode()
        refused = Refused(effect.reason, self.site, "", -1, -1, fresh)
        self._send(asker.site, asker.hear_refused, effect.answer_inbox, refused)

    def _tell_held(self, effect: fx.TellHeld) -> None:
        asker = self._asker(effect.answer_inbox)
        self._send(asker.site, asker.hear_held, effect.answer_inbox, effect.hops)

    def _tell_lost(self, effect: fx.TellLost) -> None:
        asker = self._asker(effect.answer_inbox)
        self._send(asker.site, asker.hear_lost, effect.answer_inbox, effect.replica)

    def _asker(self, inbox: str) -> Asker:
        address = subjects.parse_inbox(inbox)
        assert address is not None, "our own routers' inboxes"
        crew = self._around.routers[address.region]
        [asker] = [router for router in crew if router.name == address.router]
        return asker

    def _fail(self, effect: fx.Fail) -> None:
        ticket = self._tickets.get(effect.key)
        if ticket is not None:
            outcome = Outcome.SHED if effect.fault in SHED else Outcome.FAILED
            code = effect.fault.value.code
            self._end_badly(ticket, Answered(outcome, code, effect.retry_after_s))

    def _pass_engine_error(self, effect: fx.PassEngineError) -> None:
        ticket = self._tickets.get(effect.key)
        if ticket is not None:
            self._end_badly(ticket, Answered(Outcome.FAILED, "engine_error"))

    def _end_badly(self, ticket: Ticket, answered: Answered) -> None:
        self._tickets.close(ticket)
        self._tell(ticket.ask, answered)


def _served(usage: Usage) -> Served:
    counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    return Served(*(None if count < 0 else count for count in counts))
