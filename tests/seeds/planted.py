"""Faults put into the product by name, each of which breaks a promise: does the judge see it?

Each patches one thing, here and never in the product. `every` makes one that strikes
every so often.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import agents.core.agent as agent_core
import mesh.core.lifecycle.ends as ends
import mesh.core.placement.residency as residency
import mesh.http.answer_writer as answer_writer
import mesh.runtime.request_manager as request_manager
import mesh.session.continuation as continuation
import mesh.session.said as said
from agents.adapters import relay
from agents.core import events, keep_alives
from agents.core.engine_load import EngineLoad
from agents.core.routers import OperatorOrders as AgentOrders
from agents.core.routers import RouterLiveness
from agents.runtime.agent import Agent
from mesh.adapters import bus
from mesh.batch.queues import Results
from mesh.core.lifecycle import admission, attempts
from mesh.core.requests.limit_account import Exceeded
from mesh.core.requests.limits import Held, LimitKeeper
from mesh.core.router import RouterCore
from mesh.core.view.peers import Peer, PeerTable
from mesh.core.view.replica_table import NO_CHANGE, ReplicaTable
from mesh.http.callers import Callers
from mesh.http.connection import ClientConnection
from mesh.runtime import control_plane
from mesh.runtime.request_messages import RequestMessages
from mesh.runtime.router import Router
from mesh.session.answer import AnswerReceiver
from mesh.session.bus_receiver import BusReceiver
from mesh.session.session import Session
from schemas import exchange as wire_exchange
from schemas.residency import NOTHING, Ground
from schemas.state import decode_digest

Patch = tuple[Any, str, Callable[[Any], Any]]  # what, of which the attribute, and what it becomes


def nothing(*_: Any, **__: Any) -> None:
    """Instead of what should be done."""


def every(times: int) -> Callable[[], bool]:
    numbers = count(1)
    return lambda: next(numbers) % times == 0


def _data_twice(real: Any) -> Any:
    strikes = every(40)

    def data(self: AnswerReceiver, payload: bytes, now: float) -> Any:
        return real(
            self, payload * 2 if strikes() and payload.startswith(b"data") else payload, now
        )

    return data


def _data_lost(real: Any) -> Any:
    strikes = every(40)

    def data(self: AnswerReceiver, payload: bytes, now: float) -> Any:
        is_lost = strikes() and payload.count(b"\n\n") == 1
        return None if is_lost else real(self, payload, now)

    return data


def _unnumbered(real: Any) -> Any:
    def out_of_order(self: AnswerReceiver, number: int) -> Any:
        self.next_number = number + 1
        return None

    return out_of_order


def _sometimes(times: int, instead: Any) -> Callable[[Any], Any]:
    def patch(real: Any) -> Any:
        strikes = every(times)

        def called(*args: Any, **named: Any) -> Any:
            return instead(*args, **named) if strikes() else real(*args, **named)

        return called

    return patch


def _grows(real: Any) -> Any:
    def fed(self: Session, event: Any) -> Any:
        self.__dict__.setdefault("seen", []).append(event)
        return real(self, event)

    return fed


def _keeps_records(real: Any) -> Any:
    def admit(self: Session, record: Any) -> Any:
        self.__dict__.setdefault("kept", {})[record.request.key] = record
        return real(self, record)

    return admit


def _first_epoch_only(real: Any) -> Any:
    def see(self: ReplicaTable, beat: Any, now: float) -> Any:
        known = self.__dict__.setdefault("epochs", {})
        if known.setdefault(beat.replica, beat.epoch) != beat.epoch:
            return NO_CHANGE
        return real(self, beat, now)

    return see


def _never_again(real: Any) -> Any:
    """An engine whose pages failed once is down for good."""

    def scraped(state: Any, event: Any, now: float) -> None:
        if not hasattr(state, "was_down"):
            real(state, event, now)

    return scraped


def _marks_down(real: Any) -> Any:
    def failed(state: Any, event: Any, now: float) -> None:
        state.was_down = True
        real(state, event, now)

    return failed


def _handler(kind: type, patch: Callable[[Any], Any]) -> Patch:
    return agent_core.HANDLERS, kind, patch  # type: ignore[return-value]


def _long_deadline(real: Any) -> Any:
    def made(**fields: Any) -> Any:
        return real(**{**fields, "deadline": fields["deadline"] + 600.0})

    return made


def _no_error_event(real: Any) -> Any:
    def end_failed(self: Any, request: Any, answer: Any) -> None:
        self._request = None
        self._door.failed(request)
        self._transport.abort()
        self._end()

    return end_failed


def _cut_after_event(real: Any) -> Any:
    def end_failed(self: Any, request: Any, answer: Any) -> None:
        self._transport.write(self._chunk(b"data: [DONE]\n\n"))
        real(self, request, answer)

    return end_failed


def _says_done(real: Any) -> Any:
    strikes = every(15)

    def send(self: Any, request: Any) -> None:
        if strikes():
            self._transport.write(self._chunk(b"data: [DONE]\n\n"))
        real(self, request)

    return send


def _too_long(real: Any) -> Any:
    strikes = every(12)

    def too_long(state: Any, record: Any, place: Any, now: float) -> Any:
        return admission.LongWait(9.0, 1.0) if strikes() else real(state, record, place, now)

    return too_long


def _of_all_models(real: Any) -> Any:
    def scraped(state: Any, event: Any, now: float) -> None:
        models = event.models and ("a", "b", "c")
        real(state, replace(event, models=models), now)

    return scraped


def _anothers(real: Any) -> Any:
    made = [b""]

    def handed_out(answer: bytes, kind: Any) -> bytes:
        made.append(real(answer, kind))
        return made[-2] or made[-1]

    return handed_out


def _exceeds(self: LimitKeeper, limited: Any, *_: Any, **__: Any) -> Any:
    return (limited[0][0], Exceeded("requests_per_minute", 1.0, 1.0, 1.0)) if limited else Held()


async def _stored_nowhere(self: Results, result: Any) -> bool:
    return True


def _read_twice(real: Any) -> Any:
    async def read(self: Results, job: str, total: int) -> AsyncIterator[Any]:
        async for result in real(self, job, total):
            yield result
            yield result

    return read


def _without_labels(real: Any) -> Any:
    def because(self: PeerTable, *args: Any, **named: Any) -> Any:
        return real(self, *args, **{**named, "labels": None})

    return because


def _first_digests_only(real: Any) -> Any:
    def receive(self: RequestMessages, msg: Any) -> None:
        digest = decode_digest(msg.data)
        known = self.__dict__.setdefault("epochs", {})
        if known.setdefault((digest.region, digest.router), digest.epoch) == digest.epoch:
            real(self, msg)

    return receive


PLANTED: dict[str, tuple[Patch, ...]] = {
    "a router sends no cancel": ((Session, "_cancel", lambda real: nothing),),
    "an agent ignores cancels": (_handler(events.CancelArrived, lambda real: nothing),),
    "a hang-up is not noticed": ((ClientConnection, "connection_lost", lambda real: nothing),),
    "an agent never gives up on a silent router": (
        (RouterLiveness, "silent", lambda real: lambda self, now: []),
    ),
    "a restarted router's answers go on": (
        (keep_alives, "orphan", lambda real: nothing),
        (RouterLiveness, "silent", lambda real: lambda self, now: []),
        (BusReceiver, "receive_stray", lambda real: nothing),
    ),
    "a piece of an answer comes twice": ((AnswerReceiver, "_data", _data_twice),),
    "a piece of an answer is lost": ((AnswerReceiver, "_data", _data_lost),),
    "gaps in answers are ignored": ((AnswerReceiver, "_out_of_order", _unnumbered),),
    "whatever broke goes on": ((continuation, "_check", lambda real: nothing),),
    "what was said is not told": ((continuation, "_append", lambda real: nothing),),
    "what was said is told short": (
        (said.Said, "_read", lambda real: lambda self, event: real(self, event)[:-1]),
    ),
    "a stream breaks without a word": (
        (answer_writer.AnswerWriter, "_end_failed", _no_error_event),
    ),
    "an error comes after the end": (
        (answer_writer.AnswerWriter, "_end_failed", _cut_after_event),
    ),
    "an answer ends too soon": ((answer_writer.AnswerWriter, "_send", _says_done),),
    "replicas carry any label": (
        (residency.Residency, "takes_replica", lambda real: lambda *_: True),
    ),
    "peers carry any label": (
        (residency.Residency, "keeps_from_peer", lambda real: lambda *_: None),
        (Peer, "seen_within", lambda real: lambda self, labels: self),
        (PeerTable, "unavailable_because", _without_labels),
        (bus, "label_sent", lambda real: lambda ground, home, peer, labels: labels[0]),
    ),
    "a confined region's own rule is forgotten": (
        (Ground, "confined_to", lambda real: lambda self, region: NOTHING),
    ),
    "agents don't hear of drains": (
        (wire_exchange.Alive, "drains", lambda real: lambda *_: False),
    ),
    "routers don't hear of orders": (
        (control_plane.OperatorOrders, "receive", lambda real: nothing),
    ),
    "streams stay where operators want none": ((ReplicaTable, "move", lambda real: nothing),),
    "an undrain is not followed": (
        (
            AgentOrders,
            "alive",
            lambda real: (
                lambda self, key, order, now: real(
                    self, key, order._replace(drained=order.drained or self.is_drained), now
                )
            ),
        ),
    ),
    "a decode engine gets another prompt's KV cache": ((relay, "handed_out", _anothers),),
    "a tenant's labels are forgotten": (
        (Callers, "residency", lambda real: lambda self, wanted, _: real(self, wanted, None)),
    ),
    "limits are forgotten": ((LimitKeeper, "take", lambda real: lambda *_, **__: Held()),),
    "limits refuse for nothing": ((LimitKeeper, "take", _sometimes(5, _exceeds)),),
    "a line's result is lost": ((Results, "put", _sometimes(3, _stored_nowhere)),),
    "results are written twice": ((Results, "read", _read_twice),),
    "deadlines are forgotten": ((request_manager, "Request", _long_deadline),),
    "bodies are kept": ((Session, "forget", lambda real: nothing),),
    "records are kept": ((Session, "admit", _keeps_records),),
    "a table grows with every event": ((Session, "feed", _grows),),
    "an agent forgets no writer": ((Agent, "_run_relay", lambda real: _keeps_writer),),
    "a restarted agent is not known": ((ReplicaTable, "see", _first_epoch_only),),
    "an engine that failed never returns": (
        _handler(events.ScrapeFailed, _marks_down),
        _handler(events.EngineScraped, _never_again),
    ),
    "the bus' return is not noticed": ((Router, "_bus_is_back", lambda real: nothing),),
    "digests of restarted routers are dropped": (
        (RequestMessages, "receive_digest", _first_digests_only),
    ),
    "requests are refused for nothing": (
        (admission, "too_long", _too_long),
        (ends.admission, "too_long", _too_long),
    ),
    "a served model is unknown": (
        (RouterCore, "known_models", _sometimes(9, lambda self: {"another"})),
    ),
    "an engine gets another's model": (
        _handler(events.EngineScraped, _of_all_models),
        (EngineLoad, "serves", lambda real: lambda *_: True),
    ),
    "a lost replica raises": ((ReplicaTable, "forgotten", _sometimes(400, lambda *_: 1 / 0)),),
    "two runs differ": ((attempts, "decided", lambda real: _by_real_chance(real)),),
}


async def _keeps_writer(self: Any, inbox: str, relay: Any) -> None:
    ended = await relay.run()
    del self._relays[inbox]
    await self.feed(ended)


def _by_real_chance(real: Any) -> Any:
    import random

    chance = random.SystemRandom()

    def decided(state: Any, *args: Any, **named: Any) -> None:
        state.dice.seed(chance.random())
        real(state, *args, **named)

    return decided


@contextmanager
def planted(name: str) -> Iterator[None]:
    """With that fault in it."""
    kept = []
    for where, attribute, patch in PLANTED[name]:
        if isinstance(where, dict):
            kept.append((where, attribute, where[attribute]))
            where[attribute] = patch(where[attribute])
        else:
            kept.append((where, attribute, where.__dict__[attribute]))
            setattr(where, attribute, patch(getattr(where, attribute)))
    try:
        yield
    finally:
        for where, attribute, was in reversed(kept):
            if isinstance(where, dict):
                where[attribute] = was
            else:
                setattr(where, attribute, was)
