"""What the core wants done, done: bus messages, woken handlers, spans, counters."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from mesh.adapters import receipts
from mesh.adapters.answer import Answer
from mesh.adapters.bus import RouterBus
from mesh.adapters.large_bodies import LARGE_BYTES
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.ticket import Failure, Ticket
from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.runtime.config import RouterConfig
from mesh.runtime.ingress import Ingress
from mesh.runtime.leases import Leases
from mesh.runtime.regions import Regions
from mesh.runtime.tickets import Tickets
from mesh.runtime.trie_gossip import TrieGossip
from mesh.runtime.warm_ups import WarmUps
from mesh.runtime.work import (
    handoff_headers,
    ingress_subject,
    request_headers,
    sketch,
    way_headers,
)
from schemas import exchange, state, subjects
from schemas.decision import Placement
from schemas.http import Fault

log = logging.getLogger(__name__)


class Performer:
    """Performs effects at once and in order; it never waits and never chooses."""

    def __init__(
        self,
        config: RouterConfig,
        bus: RouterBus,
        tickets: Tickets,
        ingress: Ingress,
        trie: TrieGossip,
        regions: Regions,
        leases: Leases,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        feed: Callable[[ev.Event], None],
    ) -> None:
        self._config = config
        self._bus = bus
        self._tickets = tickets
        self._ingress = ingress
        self._regions = regions
        self._metrics = metrics
        self._clock = clock
        self._feed = feed
        self._performers: dict[type, Callable[[Any], None]] = {
            fx.Dispatch: self._dispatch,
            fx.Forward: self._forward,
            fx.CancelAttempt: self._cancel,
            fx.RefusePeer: ingress.refuse,
            fx.TellHeld: ingress.tell_held,
            fx.TellLost: ingress.tell_lost,
            fx.Fail: self._fail,
            fx.PassEngineError: self._pass_engine_error,
            fx.Decided: self._decided,
            fx.PublishDigest: self._publish_digest,
            fx.PublishTrie: trie.publish,
            fx.PublishToSiblings: trie.publish_to_siblings,
            fx.AskTrie: trie.ask,
            fx.AnswerTrie: trie.answer,
            fx.ClaimLease: leases.claim,
            fx.OwnershipChanged: leases.changed,
            fx.HearReplicas: leases.hear_replicas,
            **WarmUps(config.region, bus, tickets, feed).performers(),
        }

    def perform(self, effect: fx.Effect) -> None:
        """Do one thing."""
        self._performers[type(effect)](effect)

    def _dispatch(self, effect: fx.Dispatch) -> None:
        if effect.answer_inbox is not None:
            self._ingress.dispatch(effect, effect.answer_inbox, self._clock())
            return
        ticket, answer = self._tickets.begin(effect.key, effect.attempt)
        region = effect.region or self._config.region
        answer.region, answer.replica = region, effect.replica
        headers = request_headers(ticket, effect.attempt, self._clock())
        headers |= handoff_headers(self._config.region, self._config.router, effect)
        ticket.spans.dispatched(effect.replica, effect.attempt, headers)
        subject = subjects.work(region, effect.replica)
        most = self._bus.payload_bytes_max
        self._send(ticket, answer, subject, headers, most, lambda: b"")

    def _forward(self, effect: fx.Forward) -> None:
        if effect.answer_inbox is not None:
            self._ingress.send_on(effect, effect.answer_inbox, self._clock())
            return
        ticket, answer = self._tickets.begin(effect.key, effect.attempt)
        answer.asked = effect.peer
        now = self._clock()
        headers = request_headers(ticket, effect.attempt, now)
        headers |= way_headers(ticket, self._config.region, effect.held_s, now)
        ticket.spans.dispatched(effect.peer, effect.attempt, headers)
        prompt = self._tickets.request(effect.key).prompt
        ground, labels = self._config.settings.ground, ticket.ask.residency
        subject = ingress_subject(ground, self._config.region, effect.peer, labels)
        self._send(ticket, answer, subject, headers, LARGE_BYTES, lambda: sketch(prompt))

    def _cancel(self, effect: fx.CancelAttempt) -> None:
        ticket = self._tickets.get(effect.key)
        if ticket is None or ticket.answer is None:
            return
        # A replica that is not known yet is told when its first frame comes.
        self._tickets.stop_listening(ticket)
        if effect.replica is not None:
            message = exchange.Cancel(ticket.answer.inbox)
            # A peer may have placed it on a replica of a region that it has adopted.
            region = ticket.answer.region or effect.region
            self._bus.send_cancel(region, effect.replica, message)

    def _fail(self, effect: fx.Fail) -> None:
        if effect.fault is Fault.RESIDENCY:
            self._metrics.residency_refused.labels("client").inc()
        ticket = self._tickets.get(effect.key)
        if ticket is not None:
            ticket.failure = Failure(effect.fault, effect.message, effect.retry_after_s)
            ticket.wake()

    def _pass_engine_error(self, effect: fx.PassEngineError) -> None:
        ticket = self._tickets.get(effect.key)
        if ticket is not None:
            ticket.pass_engine_error = True
            ticket.wake()

    def _decided(self, effect: fx.Decided) -> None:
        decision = effect.decision
        if log.isEnabledFor(logging.INFO):
            log.info("%s", receipts.line(decision))
        ticket = self._tickets.get(effect.key)
        if ticket is None:
            self._ingress.decided(effect)
            return
        ticket.decision = decision
        ticket.spans.decided(decision)
        if ticket.ask.warm:
            return
        self._metrics.placements_by_kind(decision.placement.value).inc()
        if decision.placement in (Placement.LOCAL, Placement.PEER):
            self._metrics.hold.observe(decision.held_s)

    def _publish_digest(self, effect: fx.PublishDigest) -> None:
        self._regions.tells(effect.digest)
        self._bus.publish(subjects.digest(self._config.region), state.encode_state(effect.digest))

    def _send(
        self,
        ticket: Ticket,
        answer: Answer,
        subject: str,
        headers: dict[str, str],
        payload_bytes_max: int,
        stand_in: Callable[[], bytes],
    ) -> None:
        """Publish a request; `stand_in` makes what goes in the place of too large a body.

        A peer's loop is not to read large bodies either, so they go to no peer but in parts.
        """
        payload = ticket.ask.body
        if len(payload) > payload_bytes_max:
            headers[exchange.H_BODY_BYTES] = str(len(payload))
            payload = stand_in()
        if not self._bus.publish(subject, payload, reply=answer.inbox, headers=headers):
            failed = ev.AttemptFailed(answer.key, answer.attempt, "the bus does not take it")
            asyncio.get_running_loop().call_soon(self._feed, failed)  # after this effect's event
