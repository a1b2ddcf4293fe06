"""Warm-ups at the edge: what the core wants kept, and tickets without a client.

A warm-up goes the way of every request, from its ticket on; but nobody reads its answer, and no
metric of clients counts it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from mesh.adapters.bus import RouterBus
from mesh.adapters.kept_prefixes import KeptPrefixes
from mesh.adapters.spans import RequestSpans
from mesh.adapters.ticket import Ask, Ticket
from mesh.adapters.wishes import Wishes
from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.core.prefixes.prompt import BLOCK_BYTES, NO_PROMPT, NO_TEXT
from mesh.runtime.tickets import Tickets
from schemas.exchange import Cancel
from schemas.ids import RegionId

log = logging.getLogger(__name__)
STATUS_OK, STATUS_CLIENT_ERROR = 200, 400


class WarmUps:
    """One router's."""

    def __init__(
        self,
        region: RegionId,
        bus: RouterBus,
        tickets: Tickets,
        feed: Callable[[ev.Event], None],
    ) -> None:
        self._region = region
        self._bus = bus
        self._tickets = tickets
        self._feed = feed
        self._kept = KeptPrefixes()

    def performers(self) -> dict[type, Callable[[Any], None]]:
        """What is done with the core's effects."""
        return {
            fx.KeepPrefix: self._keep,
            fx.DropPrefix: lambda effect: self._kept.drop(effect.prefix),
            fx.OpenWarmUp: self._open,
            fx.CloseWarmUp: self._close,
            fx.StopWarmUp: self._stop,
        }

    def _keep(self, effect: fx.KeepPrefix) -> None:
        ticket = self._tickets.get(effect.key)
        body_bytes = None
        if ticket is not None:
            ask, text_bytes = ticket.ask, effect.blocks * BLOCK_BYTES
            try:
                body_bytes = self._kept.keep(
                    effect.prefix, ask.path, ask.body, text_bytes, ask.tenant
                )
            except Exception:  # whatever is wrong with the copy, the client's request goes on
                log.exception("request %s can't be cut to be kept", ask.request_id)
        kept = ev.PrefixKept(effect.prefix, body_bytes)
        asyncio.get_running_loop().call_soon(self._feed, kept)  # after this effect's event

    def _open(self, effect: fx.OpenWarmUp) -> None:
        request, kept = effect.request, self._kept.get(effect.prefix)
        assert kept is not None, "the core warms only what it was told is kept"
        ask = Ask(
            request_id=request.request_id,
            model=request.model,
            path=kept.path,
            body=kept.body,
            text=NO_PROMPT,
            timeout_s=None,
            wishes=Wishes(priority=request.priority),
            residency=request.residency,
            warm=True,
            tenant=kept.tenant,
        )
        spans = RequestSpans(request.request_id, request.model, None)
        ticket = Ticket(
            key=request.key,
            ask=ask,
            deadline=request.deadline,
            arrived_at=request.arrived_at,
            spans=spans,
            size=NO_TEXT,
        )
        self._tickets.open(ticket, request, 0)

    def _close(self, effect: fx.CloseWarmUp) -> None:
        ticket = self._tickets.get(effect.key)
        assert ticket is not None, "a warm-up is closed once"
        self._tickets.close(ticket)
        ticket.spans.end(STATUS_OK)

    def _stop(self, effect: fx.StopWarmUp) -> None:
        self._bus.send_cancel(self._region, effect.replica, Cancel(effect.answer_inbox))


def outcome(ticket: Ticket, event: ev.Event) -> ev.Event:
    """How a warm-up ended. An error that the same body would get again is an answered failure."""
    answer = ticket.answer
    if isinstance(event, ev.AttemptFailed):  # 5xx and 429 pass
        return ev.AttemptFailed(event.key, event.attempt, event.detail)
    if isinstance(event, ev.AnswerEnded) and answer is not None and answer.head is not None:
        status = answer.head.status
        if status >= STATUS_CLIENT_ERROR:
            detail = f"the engine answered {status}"
            return ev.AttemptFailed(event.key, event.attempt, detail, status)
    return event
