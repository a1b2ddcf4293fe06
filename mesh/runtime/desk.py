"""The desk between clients, core and bus: everything that happens passes through `feed`.

The HTTP face calls the desk (`admit` to `finished`, `failed` or `leave`), the bus is heard by
`Hearing`, and what the core answers is done by `Performer`. Nothing here waits or chooses. Whom
`feed` asks is given as `decide`: the core, or a recorder that asks the core.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from nats.aio.msg import Msg
from opentelemetry.context import Context

from mesh.adapters.adopted_beats import AdoptedBeats
from mesh.adapters.body_budget import BodyBudget
from mesh.adapters.bus import RouterBus
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.problem import Problem
from mesh.adapters.recorder import Decide
from mesh.adapters.reply_guard import ReplyGuard
from mesh.adapters.spans import RequestSpans
from mesh.adapters.tenants import Tenants
from mesh.adapters.ticket import Ask, Ticket
from mesh.core import events as ev
from mesh.core.own_bus import UNREACHABLE
from mesh.core.requests.request import Request
from mesh.core.router import RouterCore
from mesh.runtime.config import RouterConfig
from mesh.runtime.hearing import Hearing
from mesh.runtime.ingress import Ingress
from mesh.runtime.leases import Leases
from mesh.runtime.performer import Performer
from mesh.runtime.prompts import PromptReader
from mesh.runtime.regions import Regions
from mesh.runtime.tickets import Tickets
from mesh.runtime.trie_gossip import TrieGossip
from schemas import subjects
from schemas.exchange import Outcome
from schemas.http import Fault, Readiness
from schemas.ids import ModelId
from schemas.residency import Labels
from schemas.state import ModelCard

log = logging.getLogger(__name__)

SHED = (Fault.SATURATED, Fault.NO_REPLICA, Fault.DRAINING)
ENGINE_FAILED = Outcome.ENGINE_FAILED.value
END_S = 1.0  # from the last event of an answer to its end
STATUS_CLIENT_GONE = 499  # nobody receives it; traces and logs show it


class Desk:
    """One router's requests. It is the HTTP face's front door: mesh.adapters.http_api.FrontDoor."""

    def __init__(
        self,
        config: RouterConfig,
        core: RouterCore,
        bus: RouterBus,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        decide: Decide,
        guard: ReplyGuard,
    ) -> None:
        self._config = config
        self._core = core
        self._bus = bus
        self._metrics = metrics
        self._clock = clock
        self._decide = decide
        self._last_key = 0
        self._tenants = Tenants(config.region, config.settings.ground, config.keys)
        self._prompts = PromptReader(config.hash_key)
        self._tickets = Tickets(lambda token: subjects.inbox(config.region, config.router, token))
        ingress = Ingress(config, bus, metrics, self._prompts, self._tickets.bodies, guard)
        self.trie = TrieGossip(config, bus, metrics, self.feed, guard)
        regions = Regions(config, core.peers, bus, clock)
        self.regions = regions.seen
        self.beats = AdoptedBeats(lambda: bus.client, lambda msg: self.hear_heartbeat(msg))
        self.leases = Leases(config, bus, metrics, self.feed, core.ownership, self.beats)
        self._performer = Performer(
            config,
            bus,
            self._tickets,
            ingress,
            self.trie,
            regions,
            self.leases,
            metrics,
            clock,
            self.feed,
        )
        self._hearing = Hearing(
            config, bus, self._tickets, ingress, self._prompts, metrics, clock, self.feed
        )
        metrics.buffered.set_function(self.buffered_bytes)
        metrics.bodies.set_function(lambda: self.bodies.taken_bytes)
        self.hear_heartbeat = self._hearing.hear_heartbeat
        self.read_heartbeat = self._hearing.read_heartbeat
        self.hear_digest = self._hearing.hear_digest
        self.hear_answer = self._hearing.hear_answer
        self.hear_parcel = self._hearing.hear_parcel
        self.ask_for_missing = self._hearing.ask_for_missing
        self.ask_for_the_rest = self._hearing.ask_for_the_rest

    @property
    def open_requests(self) -> int:
        """Clients that have not been answered to the end."""
        return len(self._tickets)

    @property
    def bodies(self) -> BodyBudget:
        """What requests may keep in memory together."""
        return self._tickets.bodies

    def buffered_bytes(self) -> int:
        """Bytes of answers that wait for their clients."""
        return self._tickets.buffered_bytes()

    def feed(self, event: ev.Event) -> None:
        """Let the core decide about one event, and do what it says."""
        for effect in self._decide(event, self._clock()):
            self._performer.perform(effect)

    def awaits(self, inbox: str) -> bool:
        """Whether an answer under way streams to that inbox."""
        return self._tickets.answering(inbox) is not None

    def hear_ingress(self, msg: Msg) -> None:
        """A peer asks this region to place a request."""
        self._hearing.hear_ingress(msg, self._new_key())

    def models(self) -> tuple[ModelId, ...]:
        """Models that some ready replica serves."""
        return self._core.models()

    def model_card(self, model: ModelId) -> ModelCard:
        """What an engine says of it."""
        return self._core.model_card(model)

    def known_models(self) -> tuple[ModelId, ...]:
        """Models that can be asked for, if only to wait for a replica's return."""
        return self._core.known_models()

    def not_ready_because(self) -> tuple[Fault, str] | None:
        """Why requests can't be placed at present."""
        if self._core.draining:
            return Fault.DRAINING, "this router is shutting down"
        if not self._bus.is_connected:
            return Fault.NO_REPLICA, UNREACHABLE
        if not self._core.models():
            return Fault.NO_REPLICA, "no replica of any region is ready"
        return None

    def residency(self, wanted: Labels, headers: Mapping[str, str]) -> Labels:
        """Where a client's request may go. Raises Problem if that is nowhere."""
        try:
            return self._tenants.residency(wanted, headers)
        except Problem as problem:
            if problem.fault is Fault.RESIDENCY:
                self._metrics.residency_refused.labels("client").inc()
            raise

    def tenant(self, headers: Mapping[str, str]) -> str | None:
        """Whose request it is; empty for nobody's, None where tenants are not told apart."""
        return self._tenants.tenant(headers)

    def readiness(self) -> Readiness:
        """Whether it is known what replicas hold, and since when."""
        warmth = self._core.gossip.siblings.warmth
        if warmth.warm_at is None:
            return Readiness(warm=False)
        warm_for_s = round(self._clock() - warmth.warm_at, 3)
        return Readiness(warm=True, warm_for_s=warm_for_s, warmed_by=warmth.source)

    def admit(self, ask: Ask, taken: int, parent: Context | None) -> Ticket:
        """Take a client's request in and place it; `taken`: what `bodies` set aside for it."""
        now = self._clock()
        key = self._new_key()
        deadline = now + (ask.timeout_s or self._config.settings.request_s_max)
        spans = RequestSpans(ask.request_id, ask.model, parent)
        ticket = Ticket(
            key=key,
            ask=ask,
            deadline=deadline,
            arrived_at=now,
            spans=spans,
            size=ask.text.size,
        )
        request = Request(
            key=key,
            request_id=ask.request_id,
            model=ask.model,
            prompt=self._prompts.read(ask.model, ask.text, ask.wishes.salt, ask.tenant or ""),
            arrived_at=now,
            deadline=deadline,
            hops=0,
            origin=self._config.region,
            priority=ask.wishes.priority,
            slo_ttft_s=ask.wishes.slo_ttft_s,
            session=ask.wishes.session,
            residency=ask.residency,
        )
        self._tickets.open(ticket, request, taken)
        self.feed(ev.RequestArrived(request))
        return ticket

    def started(self, ticket: Ticket) -> None:
        """Its client is being sent a first byte."""
        ticket.first_byte_at = self._clock()
        ticket.spans.first_byte()
        assert ticket.answer is not None
        here = ticket.answer.region == self._config.region
        self._metrics.ttft_by_server("local" if here else "peer").observe(
            ticket.first_byte_at - ticket.arrived_at
        )
        self.feed(ev.AnswerStarted(ticket.key, ticket.answer.attempt))
        self._tickets.drop_body(ticket)

    def passed(self, ticket: Ticket) -> None:
        """Bytes have left for the client: the agent may send more."""
        if ticket.answer is not None:
            self._bus.give_credit(ticket.answer)

    def finished(self, ticket: Ticket) -> None:
        """Its client has the whole answer, which may end with the engine's own error."""
        assert ticket.answer is not None and ticket.answer.head is not None
        failure = ticket.answer.engine_failure
        if not self._close(ticket, "ok" if failure is None else ENGINE_FAILED):
            return
        if failure is not None:
            log.warning("%s: %s: %s", ticket.ask.request_id, ENGINE_FAILED, failure)
            failure = f"{ENGINE_FAILED}: {failure}"
        ticket.spans.end(ticket.answer.head.status, failure)

    def failed(self, ticket: Ticket) -> None:
        """Its client has been told of the failure."""
        if ticket.failure is None:
            assert ticket.engine_error is not None
            status, message = ticket.engine_error.status, "the engine's own error"
            outcome = "failed"
        else:
            status, message = ticket.failure.fault.value.status, ticket.failure.message
            is_shed = ticket.failure.fault in SHED and ticket.first_byte_at is None
            outcome = "shed" if is_shed else "failed"
        if self._close(ticket, outcome):
            level = logging.INFO if outcome == "shed" else logging.WARNING
            log.log(level, "%s: %d: %s", ticket.ask.request_id, status, message)
            ticket.spans.end(status, message)

    def leave(self, ticket: Ticket) -> None:
        """Its client is gone, unless it had its answer already."""
        answer = ticket.answer
        if self._tickets.get(ticket.key) is not ticket:
            return
        if answer is None or not answer.has_said_all:
            self.feed(ev.ClientGone(ticket.key))
            self._close(ticket, "client_gone")
            ticket.spans.end(STATUS_CLIENT_GONE, "the client hung up")
        elif answer.is_complete or ticket.failure is not None:
            self.finished(ticket)
        else:
            # OpenAI's clients hang up on [DONE]. The end of the answer, with its counts of tokens,
            # is still on its way, and a cancel would cost what is learned from it.
            asyncio.get_running_loop().call_later(END_S, self._said_all, ticket)

    def _said_all(self, ticket: Ticket) -> None:
        self.feed(ev.ClientGone(ticket.key))  # without effect if the end came
        self.finished(ticket)

    def _new_key(self) -> int:
        self._last_key += 1
        return self._last_key

    def _close(self, ticket: Ticket, outcome: str) -> bool:
        if not self._tickets.close(ticket):
            return False
        self._metrics.ended(outcome, ticket.arrived_at, self._clock())
        return True
